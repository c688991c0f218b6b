"""Own time of each op of a call under torch.profiler: time inside the op and outside the ops that it calls.

Device time of the kernels it launched on CUDA, CPU time otherwise. Each call of an op is kept apart, so that one that
was interrupted by the scheduler does not spoil the op's sum.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autokernel.errors import MeasurementError

OUTSIDE_OPS = "(kernels outside any op)"

Key = tuple[str, tuple[tuple[int, ...], ...]]
"""Op name and input shapes; () stands for a scalar and for what is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What one profiler cycle recorded: wall time of each forward, and own times in us of all calls, in order."""

    walls_us: tuple[float, ...]
    calls_us: Mapping[Key, tuple[float, ...]]

    @property
    def wall_us(self) -> float:
        """Median wall time of a forward under the profiler."""
        return statistics.median(self.walls_us)

    def per_forward(self) -> dict[Key, tuple[float, float]]:
        """(calls, own time in us) of each op in one forward."""
        return {key: _per_forward(times, len(self.walls_us)) for key, times in self.calls_us.items()}

    @property
    def total_us(self) -> float:
        """Sum of own times in one forward."""
        return sum(time_us for _, time_us in self.per_forward().values())

    def __add__(self, other: Cycle) -> Cycle:
        keys = [*self.calls_us, *(key for key in other.calls_us if key not in self.calls_us)]
        calls = {key: self.calls_us.get(key, ()) + other.calls_us.get(key, ()) for key in keys}
        return Cycle(walls_us=self.walls_us + other.walls_us, calls_us=calls)


def _per_forward(times: tuple[float, ...], forwards: int) -> tuple[float, float]:
    calls, rest = divmod(len(times), forwards)
    if rest:  # not the same calls in each forward: nothing to line up
        return len(times) / forwards, sum(times) / forwards
    return calls, sum(statistics.median(times[position::calls]) for position in range(calls))


def profile_cycle(call_us: Callable[[], float], device: torch.device, forwards: int) -> Cycle:
    """One cycle of `forwards` forwards; `call_us` runs one, synchronized, and returns its wall time.

    Raises: MeasurementError when the model is on CUDA and the profiler saw no kernel.
    """
    # A line per profiler start on stderr otherwise (Kineto of torch 2.13); what the user has set wins.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        walls = tuple(call_us() for _ in range(forwards))
    # The own time of a user annotation is Python's time between ops: unattributed.
    events: list[Any] = [event for event in profiler.events() or [] if not _is_annotation(event)]
    return Cycle(walls_us=walls, calls_us=device_times(events, forwards) if cuda else cpu_times(events))


def self_device_us(event: Any) -> float:
    """Own device time of a profiler event in us, whatever this version of PyTorch calls it.

    Raises: MeasurementError when it is called neither of the known names.
    """
    for name in ("self_device_time_total", "self_cuda_time_total"):
        value = getattr(event, name, None)
        if value is not None:
            return float(value)
    raise MeasurementError(
        f"PyTorch {torch.__version__}'s profiler names device times in a way not known here", hint="use torch 2.11-2.15"
    )


def cpu_times(events: list[Any]) -> dict[Key, tuple[float, ...]]:
    """Own CPU times in us of the calls of each op, in order."""
    return _grouped([(event, float(event.self_cpu_time_total)) for event in events])


def device_times(events: list[Any], forwards: int) -> dict[Key, tuple[float, ...]]:
    """Kernel times in us of the calls of each launching op, in order.

    A kernel is also listed by itself: that only serves to find what no op launched, which gets a row of its own.
    Raises: MeasurementError when there is no kernel at all.
    """
    launched = [(event, self_device_us(event)) for event in events if _on_host(event)]
    times = _grouped([(event, time_us) for event, time_us in launched if time_us > 0])
    kernels_us = sum(self_device_us(event) for event in events if not _on_host(event))
    if not times and not kernels_us:
        raise MeasurementError(
            "the model runs on CUDA but the profiler recorded no CUDA kernel",
            hint="CUPTI is missing or in use: end other profilers (nsys, ncu, DCGM), check that this PyTorch has CUPTI "
            "and that the driver lets users profile (NVreg_RestrictProfilingToAdminUsers=0)",
        )
    outside_us = kernels_us - sum(map(sum, times.values()))
    if outside_us > 0.001 * kernels_us:
        times[OUTSIDE_OPS, ()] = (outside_us / forwards,) * forwards
    return times


def _grouped(timed_events: list[tuple[Any, float]]) -> dict[Key, tuple[float, ...]]:
    groups: dict[Key, list[float]] = {}
    for event, time_us in sorted(timed_events, key=lambda pair: pair[0].time_range.start):
        shapes = tuple(tuple(shape) if _is_shape(shape) else () for shape in event.input_shapes or ())
        groups.setdefault((event.name, shapes), []).append(time_us)
    return {key: tuple(times) for key, times in groups.items()}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(isinstance(size, int) for size in shape)


def _on_host(event: Any) -> bool:
    return str(event.device_type).endswith(".CPU")


def _is_annotation(event: Any) -> bool:
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith("ProfilerStep")
