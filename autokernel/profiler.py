"""Where a model's time goes: wall time of one forward, and each op's own time in it, by input shapes.

An op's own time is what it spends outside the ops that it calls, so that every microsecond is counted once: device
time of the kernels it launched when the model is on CUDA, else CPU time. Ops are not judged or matched here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autokernel.errors import MeasurementError
from autokernel.model import LoadedModel, forward
from autokernel.nodetime import attribute_nodes as attribute_nodes

log = logging.getLogger(__name__)

STABLE = 0.05  # medians of consecutive windows of calls that differ less are warm
WARMUP_WINDOW = 3
AGREEMENT = 0.15  # total own time of two profiler cycles that differ less agree
MOST_CYCLES = 6
CYCLE_S = 0.2  # a profiler cycle repeats short forwards up to about this long
MOST_FORWARDS = 20
LEAST_SAMPLES, MOST_SAMPLES = 3, 50
OUTSIDE_OPS = "(kernels outside any op)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One op with one set of input shapes: calls and own time in one forward, and its share of the wall time.

    A shape is () for a scalar and for what is no tensor.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    calls: float
    time_us: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """One forward's wall time, measured without the profiler, and where it goes; ops by time, longest first.

    `profiled_us` is the sum of own times as the profiler saw them; the ops' times are scaled to the wall time when the
    profiler slowed the model. `unattributed_us` is wall time in no op: Python, launch gaps, waiting.
    """

    model: str
    device: str
    wall_us: float
    wall_iqr_us: float
    wall_samples: int
    profiled_us: float
    unattributed_us: float
    ops: tuple[OpTime, ...]
    notes: tuple[str, ...] = ()

    @property
    def attributed_us(self) -> float:
        """Sum of the ops' own times."""
        return sum(op.time_us for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> ModelProfile:
        """Inverse of `to_json`."""
        ops = tuple(OpTime(**{**op, "shapes": tuple(tuple(shape) for shape in op["shapes"])}) for op in raw["ops"])
        return ModelProfile(**{**raw, "ops": ops, "notes": tuple(raw["notes"])})


def profile_model(loaded: LoadedModel, *, seconds: float = 2.0) -> ModelProfile:
    """Profile one forward of `loaded`, without gradients.

    Args:
        seconds: about how long to warm up and how long to sample the wall time, at most; few calls are always made.

    Raises: ConfigError when the forward raises, MeasurementError when the profiler sees nothing.
    """
    forward(loaded)  # its faults are shown as the user's own, before any clock runs
    device = model_device(loaded)
    with torch.no_grad():
        notes = _warm_up(loaded, device, seconds)
        samples = _wall_samples(loaded, device, seconds)
        wall_us = statistics.median(samples)
        cycles, cycle_wall_us, note = _agreeing_cycles(loaded, device, wall_us)
    notes += note
    profiled_us = sum(row.time_us for row in cycles)
    # The profiler slows the host but not the kernels. Own times beyond the wall time are streams that overlap.
    slowed = 1.0 if device.type == "cuda" else wall_us / cycle_wall_us
    scale = min(1.0, slowed, wall_us / profiled_us)
    ops = _scaled(cycles, scale, wall_us)
    low, _, high = statistics.quantiles(samples, n=4)
    return ModelProfile(
        model=loaded.name,
        device=str(device),
        wall_us=wall_us,
        wall_iqr_us=high - low,
        wall_samples=len(samples),
        profiled_us=profiled_us,
        unattributed_us=max(0.0, wall_us - sum(op.time_us for op in ops)),
        ops=ops,
        notes=notes,
    )


def model_device(loaded: LoadedModel) -> torch.device:
    """Where the model lives: the device of its first parameter, buffer or tensor input; CPU when there is none."""
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    tensors += [leaf for leaf in pytree.tree_leaves((loaded.args, loaded.kwargs)) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


# --- wall time -------------------------------------------------------------------------------------------------------


def _call_us(loaded: LoadedModel, device: torch.device, forwards: int = 1) -> float:
    """Wall time of one forward, from an idle device to an idle device."""
    _synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(forwards):
        loaded.model(*loaded.args, **loaded.kwargs)
    _synchronize(device)
    return (time.perf_counter_ns() - start) / 1e3 / forwards


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm_up(loaded: LoadedModel, device: torch.device, seconds: float) -> tuple[str, ...]:
    """Call the model until two consecutive windows take the same time; a note when the time ran out first."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        samples.append(_call_us(loaded, device))
        if len(samples) >= 2 * WARMUP_WINDOW:
            before = statistics.median(samples[-2 * WARMUP_WINDOW : -WARMUP_WINDOW])
            latest = statistics.median(samples[-WARMUP_WINDOW:])
            if abs(latest - before) <= STABLE * latest:
                return ()
    return (f"not yet steady after {len(samples)} warm-up calls",)


def _wall_samples(loaded: LoadedModel, device: torch.device, seconds: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < LEAST_SAMPLES or (len(samples) < MOST_SAMPLES and time.perf_counter() < end):
        samples.append(_call_us(loaded, device))
    return samples


# --- own time of each op ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    op: str
    shapes: tuple[tuple[int, ...], ...]
    calls: float
    time_us: float


def _agreeing_cycles(
    loaded: LoadedModel, device: torch.device, wall_us: float
) -> tuple[list[_Row], float, tuple[str, ...]]:
    """(rows averaged over two cycles that agree, wall time under the profiler, a note when none agreed)."""
    forwards = max(1, min(MOST_FORWARDS, round(CYCLE_S * 1e6 / wall_us)))
    _cycle(loaded, device, 1)  # thrown away: the first cycle pays for starting the profiler
    before_wall, before = _cycle(loaded, device, forwards)
    for _ in range(MOST_CYCLES - 1):
        latest_wall, latest = _cycle(loaded, device, forwards)
        totals = sorted(sum(row.time_us for row in rows) for rows in (before, latest))
        same_calls = {(row.op, row.shapes): row.calls for row in before} == {
            (row.op, row.shapes): row.calls for row in latest
        }
        if same_calls and totals[1] - totals[0] <= AGREEMENT * totals[1]:
            return _mean(before, latest), (before_wall + latest_wall) / 2, ()
        before_wall, before = latest_wall, latest
    what = f"differ by {1 - totals[0] / totals[1]:.0%}" if same_calls else "saw different calls"
    note = f"no two of {MOST_CYCLES} profiler cycles agree (the last two {what}); the shares are rough"
    log.warning("%s: %s", loaded.name, note)
    return latest, latest_wall, (note,)


def _cycle(loaded: LoadedModel, device: torch.device, forwards: int) -> tuple[float, list[_Row]]:
    """(wall time, rows) of one forward under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        cycle_wall_us = _call_us(loaded, device, forwards)
    averages = profiler.key_averages(group_by_input_shape=True)
    rows = _device_rows(averages, forwards) if device.type == "cuda" else _cpu_rows(averages, forwards)
    if not rows:
        raise MeasurementError(
            f"{loaded.name}: the profiler recorded no op on {device}", hint="the forward must call PyTorch ops"
        )
    return cycle_wall_us, rows


def _cpu_rows(averages: Any, forwards: int) -> list[_Row]:
    # The own time of a user annotation is Python's time between ops: unattributed.
    return [
        _row(event, forwards, event.self_cpu_time_total) for event in averages if not _is_annotation(event)
    ]  # fmt: skip


def _device_rows(averages: Any, forwards: int) -> list[_Row]:
    """Kernel time by launching op. A kernel is also listed by itself: that only serves to find what no op launched.

    Raises: MeasurementError when no kernel was recorded at all.
    """
    events = [event for event in averages if not _is_annotation(event)]
    launchers = [event for event in events if _on_host(event)]
    kernels = [event for event in events if not _on_host(event)]
    rows = [_row(event, forwards, self_device_us(event)) for event in launchers if self_device_us(event) > 0]
    kernel_us = sum(self_device_us(event) for event in kernels) / forwards
    if not rows and not kernel_us:
        raise MeasurementError(
            "the model runs on CUDA but the profiler recorded no CUDA kernel",
            hint="CUPTI is missing or in use: end other profilers (nsys, ncu, DCGM), check that this PyTorch has CUPTI "
            "and that the driver lets users profile (NVreg_RestrictProfilingToAdminUsers=0)",
        )
    outside_us = kernel_us - sum(row.time_us for row in rows)
    if outside_us > 0.001 * kernel_us:
        rows.append(_Row(op=OUTSIDE_OPS, shapes=(), calls=1, time_us=outside_us))
    return rows


def self_device_us(event: Any) -> float:
    """Own device time of a profiler event in us, whatever this version of PyTorch calls it."""
    for name in ("self_device_time_total", "self_cuda_time_total"):
        value = getattr(event, name, None)
        if value is not None:
            return float(value)
    raise MeasurementError(
        f"PyTorch {torch.__version__}'s profiler names device times in a way not known here", hint="use torch 2.11-2.15"
    )


def _on_host(event: Any) -> bool:
    return str(event.device_type).endswith(".CPU")


def _is_annotation(event: Any) -> bool:
    return bool(getattr(event, "is_user_annotation", False)) or event.key.startswith("ProfilerStep")


def _row(event: Any, forwards: int, total_us: float) -> _Row:
    shapes = tuple(tuple(shape) if _is_shape(shape) else () for shape in event.input_shapes or ())
    return _Row(op=event.key, shapes=shapes, calls=event.count / forwards, time_us=float(total_us) / forwards)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(isinstance(size, int) for size in shape)


def _mean(first: list[_Row], second: list[_Row]) -> list[_Row]:
    times = {(row.op, row.shapes): row.time_us for row in first}
    return [
        _Row(op=row.op, shapes=row.shapes, calls=row.calls, time_us=(row.time_us + times[row.op, row.shapes]) / 2)
        for row in second
    ]


def _scaled(rows: list[_Row], scale: float, wall_us: float) -> tuple[OpTime, ...]:
    ops = [
        OpTime(
            op=row.op,
            shapes=row.shapes,
            calls=row.calls,
            time_us=row.time_us * scale,
            share=row.time_us * scale / wall_us,
        )
        for row in rows
    ]
    return tuple(sorted(ops, key=lambda op: -op.time_us))
