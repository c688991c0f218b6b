"""The clocks of a candidate's process: the wall clock for CPU kernels, events on the stream for GPU kernels.

On a GPU a call is timed as `triton.testing.do_bench` does it: the L2 is overwritten before each call and events stand
round it. The device is first given something to do, so that the host is ahead by the time the first event passes and
no gap between launches is counted as the kernel's. What the host needs for a call is a number of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
Before = Callable[[int], None]
"""Called before each call with its number, warm-up calls first; its time counts as nobody's."""

SLEEP_CYCLES_PER_US = 2_000
"""At about 2 GHz, the clock of current parts; a slower clock only sleeps longer."""

L2_FLUSHES, LEAST_FLUSH_BYTES = 4, 128 << 20
"""How many times the size of the L2 is overwritten before a timed call, and what is overwritten at least."""

FLUSHES_TIMED = 8

MOST_SLEEP_US = 50_000.0

_zero, _sleep, _synchronize = Tensor.zero_, torch.cuda._sleep, torch.cuda.synchronize
"""As they are before a candidate is loaded, which may put others in their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Times of one block of calls in us. `host_us` is what the host needed for each call, where that is another clock.

    `idle_us` is time inside the block that the clock itself took (flushes, a head start). `kept` is one call's output.
    """

    calls_us: list[float]
    warm_us: float
    host_us: list[float]
    idle_us: float
    kept: Any


def _nothing(_number: int) -> None:
    pass


class HostStopwatch:
    """The wall clock; for kernels that run on the calling thread."""

    def block(
        self, kernel: Kernel, schedule: Sequence[Sequence[Any]], *, warm: int, keep: int, before: Before = _nothing
    ) -> Block:
        """Time a call of `kernel` for each of `schedule` but the first `warm`; timed call `keep`'s output stays."""
        clock = time.perf_counter_ns
        begin = clock()
        calls: list[float] = []
        kept = out = None
        for number, arguments in enumerate(schedule):
            before(number)
            start = clock()
            out = kernel(*arguments)
            calls.append((clock() - start) / 1e3)
            if number == warm + keep:
                kept = out
        del out
        total_us = (clock() - begin) / 1e3
        return Block(
            calls_us=calls[warm:], warm_us=sum(calls[:warm]), host_us=[], idle_us=total_us - sum(calls), kept=kept
        )


class DeviceStopwatch:
    """Events on PyTorch's current stream, with the L2 overwritten before each call."""

    def __init__(self) -> None:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        nbytes = max(L2_FLUSHES * int(properties.L2_cache_size), LEAST_FLUSH_BYTES)
        self._flush = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        _zero(self._flush)
        self._flush_us = self._time_flush()
        self._queue_us = 0.0  # what the host needed to queue a call and its flush in the last block

    def _time_flush(self) -> float:
        """Us for which a flush keeps the device busy: the least of some, as the device may have waited for the host.

        Were it taken to be longer, the host would get too small a head start, for as long as the process lives.
        """
        _synchronize()
        events = [(_event(), _event()) for _ in range(FLUSHES_TIMED)]
        for start, stop in events:
            start.record()
            _zero(self._flush)
            stop.record()
        _synchronize()
        return min(float(start.elapsed_time(stop)) for start, stop in events) * 1e3

    def block(
        self, kernel: Kernel, schedule: Sequence[Sequence[Any]], *, warm: int, keep: int, before: Before = _nothing
    ) -> Block:
        """Time a call of `kernel` for each of `schedule` but the first `warm`; timed call `keep`'s output stays."""
        begin = time.perf_counter_ns()
        for number, arguments in enumerate(schedule[:warm]):
            before(number)
            kernel(*arguments)
        _synchronize()
        warm_us = (time.perf_counter_ns() - begin) / 1e3
        schedule = schedule[warm:]
        # As if the calls took the device no time at all: more than enough, and cheap.
        idle_us = min(MOST_SLEEP_US, max(0.0, self._queue_us - self._flush_us) * len(schedule))
        _sleep(1 + int(idle_us * SLEEP_CYCLES_PER_US))  # type: ignore[no-untyped-call]
        events = [(_event(), _event()) for _ in schedule]
        host_us, kept, out = [], None, None
        ahead = time.perf_counter_ns()
        for number, (arguments, (start, stop)) in enumerate(zip(schedule, events, strict=True)):
            before(warm + number)
            _zero(self._flush)
            start.record()
            called = time.perf_counter_ns()
            out = kernel(*arguments)
            host_us.append((time.perf_counter_ns() - called) / 1e3)
            stop.record()
            if number == keep:
                kept = out
        self._queue_us = (time.perf_counter_ns() - ahead) / 1e3 / len(schedule)
        del out
        _synchronize()
        calls_us = [float(start.elapsed_time(stop)) * 1e3 for start, stop in events]
        waited_us = idle_us + self._flush_us * len(schedule)
        return Block(calls_us=calls_us, warm_us=warm_us, host_us=host_us, idle_us=waited_us, kept=kept)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
