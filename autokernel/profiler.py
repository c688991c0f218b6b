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
from autokernel.owntime import Cycle, profile_cycle

log = logging.getLogger(__name__)

STABLE = 0.05  # medians of consecutive windows of calls that differ less are warm
WARMUP_WINDOW = 3
AGREEMENT = 0.15  # total own time of two profiler cycles that differ less agree
MOST_CYCLES = 6
CYCLE_S = 0.5  # a profiler cycle repeats short forwards up to about this long
MOST_FORWARDS = 20
LEAST_SAMPLES, MOST_SAMPLES = 3, 50


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
        cycle, note = _agreeing_cycles(loaded, device, wall_us)
    profiled_us = cycle.total_us
    if not profiled_us:
        raise MeasurementError(
            f"{loaded.name}: the profiler recorded no op on {device}", hint="the forward must call PyTorch ops"
        )
    # The profiler slows the host but not the kernels. Own times beyond the wall time are streams that overlap.
    slowed = 1.0 if device.type == "cuda" else wall_us / cycle.wall_us
    ops = _op_times(cycle, min(1.0, slowed, wall_us / profiled_us), wall_us)
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
        notes=notes + note,
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


def _agreeing_cycles(loaded: LoadedModel, device: torch.device, wall_us: float) -> tuple[Cycle, tuple[str, ...]]:
    """Two profiler cycles that agree, joined; the last two and a note when none did."""

    def call_us() -> float:
        return _call_us(loaded, device)

    forwards = max(1, min(MOST_FORWARDS, round(CYCLE_S * 1e6 / wall_us)))
    profile_cycle(call_us, device, 1)  # thrown away: the first cycle pays for starting the profiler
    before = profile_cycle(call_us, device, forwards)
    for _ in range(MOST_CYCLES - 1):
        latest = profile_cycle(call_us, device, forwards)
        what = _disagreement(before, latest)
        joined = before + latest
        if what is None:
            return joined, ()
        before = latest
    note = f"no two of {MOST_CYCLES} profiler cycles agree (the last two {what}); the shares are rough"
    log.warning("%s: %s", loaded.name, note)
    return joined, (note,)


def _disagreement(first: Cycle, second: Cycle) -> str | None:
    calls = [{key: count for key, (count, _) in cycle.per_forward().items()} for cycle in (first, second)]
    if calls[0] != calls[1]:
        return "saw different calls"
    less, more = sorted((first.total_us, second.total_us))
    return f"differ by {1 - less / more:.0%}" if more - less > AGREEMENT * more else None


def _op_times(cycle: Cycle, scale: float, wall_us: float) -> tuple[OpTime, ...]:
    ops = [
        OpTime(op=op, shapes=shapes, calls=calls, time_us=time_us * scale, share=time_us * scale / wall_us)
        for (op, shapes), (calls, time_us) in cycle.per_forward().items()
    ]
    return tuple(sorted(ops, key=lambda op: -op.time_us))
