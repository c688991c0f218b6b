"""Measure what a device can do, in about a second: bandwidth by working-set size, GEMM rate by dtype, launch cost."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autokernel.gpus import Gpu, estimate, lookup
from autokernel.roofline import Ceilings
from autokernel.spec import DTYPES

log = logging.getLogger(__name__)

CPU_SIZES = (256 << 10, 2 << 20, 16 << 20, 32 << 20, 64 << 20, 160 << 20)
"""Bytes moved per copy: within L2, around L2, three sizes of a shared L3, beyond most caches."""

CUDA_SIZES = (1 << 20, 16 << 20, 64 << 20, 1 << 30)
"""Bytes moved per copy: launch-bound, within L2, around L2, beyond any L2."""

GEMM_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"fp32": (1024,), "bf16": (1024,)},
    "cuda": {"fp32": (4096,), "bf16": (4096, 8192), "fp16": (4096, 8192)},
}
"""Edges of the square GEMMs by dtype, the best of which counts: large enough for the full rate, small enough to repeat
within the budget. On a GPU the largest need not be the fastest, as it draws the most power."""

BUDGET_S = 0.05  # per quantity; a CPU has fifteen
LEAST_SAMPLES, MOST_SAMPLES = 3, 100
BUSY_SPREAD = 3.0  # median over minimum; an idle machine stays under 1.5
CALLS_PER_LAUNCH_SAMPLE = 100
MORE_ROUNDS = 3


def measure_ceilings(device: str = "cpu") -> Ceilings:
    """The ceilings of `device`, by timing copies, sums, square GEMMs and an empty op.

    Each comes from the shortest of its latencies: interference only ever slows, and a ceiling must not be too low.
    A rate is that of the faster of copying and summing, as a sum writes nothing (a CPU's copy also reads what it
    overwrites, which is not counted). Where something else keeps the device busy, up to three more rounds are made and
    the best of each quantity taken.
    """
    best, busy = _measure_round(device)
    for _ in range(MORE_ROUNDS):
        if not busy:
            return best
        latest, busy = _measure_round(device)
        best = better_of(best, latest)
    if busy:
        log.warning("%s is busy: its ceilings, and the headroom that follows, may be too low", device)
    return best


def published(device: str) -> Gpu | None:
    """The published (or, for a part that is not in the table, estimated) limits of a GPU; None for a CPU."""
    if torch.device(device).type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    name, units, memory_bytes = properties.name, properties.multi_processor_count, properties.total_memory
    gcn_arch = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    clock_mhz = getattr(properties, "clock_rate", 0) / 1e3
    found = lookup(name, gcn_arch=gcn_arch, memory_bytes=memory_bytes, units=units, clock_mhz=clock_mhz)
    return found or estimate(
        name=name,
        sms=units,
        clock_mhz=clock_mhz,
        capability=None if torch.version.hip else (properties.major, properties.minor),
        gcn_arch=gcn_arch,
        memory_clock_mhz=getattr(properties, "memory_clock_rate", 0) / 1e3,
        bus_bits=getattr(properties, "memory_bus_width", 0),
        l2_bytes=properties.L2_cache_size,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0),
        memory_bytes=memory_bytes,
    )


def better_of(first: Ceilings, second: Ceilings) -> Ceilings:
    """The higher rate and the lower cost of two measurements of one device."""
    costs = [cost for cost in (first.launch_us, second.launch_us) if cost is not None]
    return replace(
        first,
        copy_gbps=max(first.copy_gbps, second.copy_gbps),
        cached=tuple(max(pair) for pair in zip(first.cached, second.cached, strict=True)),
        gemm_tflops={dtype: max(rate, second.gemm_tflops[dtype]) for dtype, rate in first.gemm_tflops.items()},
        launch_us=min(costs, default=None),
    )


def _measure_round(device: str) -> tuple[Ceilings, bool]:
    """(ceilings, whether something else kept the device busy meanwhile)."""
    clock = _Clock(device)
    with torch.no_grad():
        sizes = CUDA_SIZES if clock.cuda else CPU_SIZES
        rates = [(size, _memory_gbps(size, clock)) for size in sizes]
        edges = GEMM_SIZES["cuda" if clock.cuda else "cpu"]
        gemm = {dtype: max(_gemm_tflops(n, dtype, clock) for n in sizes) for dtype, sizes in edges.items()}
        launch_us = _launch_us(clock)
    copy_gbps = rates[-1][1]
    # A cache is never slower than the memory behind it: every call then waited for a thread that was not running.
    stalled = not clock.cuda and any(rate < copy_gbps / 2 for _, rate in rates)
    ceilings = Ceilings(
        device=_device_name(device),
        copy_gbps=copy_gbps,
        copy_bytes=rates[-1][0],
        cached=tuple(rates[:-1]),
        gemm_tflops=gemm,
        launch_us=launch_us,
    )
    return ceilings, clock.busy or stalled


def _memory_gbps(bytes_moved: int, clock: _Clock) -> float:
    source = torch.ones(bytes_moved // 8, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    copied_s = clock.shortest_s(lambda: target.copy_(source))
    whole = torch.ones(bytes_moved // 4, dtype=torch.float32, device=clock.device)
    summed_s = clock.shortest_s(lambda: whole.sum())
    return bytes_moved / min(copied_s, summed_s) / 1e9


def _gemm_tflops(edge: int, dtype: str, clock: _Clock) -> float:
    # Random, as a GPU multiplies zeros and ones some 10 % faster than it can sustain on real numbers.
    a = torch.randn(edge, edge, device=clock.device).to(DTYPES[dtype])
    out = torch.empty_like(a)
    return 2 * edge**3 / clock.shortest_s(lambda: torch.mm(a, a, out=out)) / 1e12


def _launch_us(clock: _Clock) -> float:
    tiny = torch.ones(1, device=clock.device)

    def calls() -> None:
        for _ in range(CALLS_PER_LAUNCH_SAMPLE):
            tiny.add_(1.0)

    return clock.shortest_s(calls) / CALLS_PER_LAUNCH_SAMPLE * 1e6


class _Clock:
    """Times calls on one device, and remembers whether something else kept it busy."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cuda = torch.device(device).type == "cuda"
        self.busy = False

    def shortest_s(self, call: Callable[[], object]) -> float:
        """Seconds of the shortest of several calls after one for warm-up, within the budget."""
        timed = _cuda_seconds if self.cuda else _wall_seconds
        timed(call)
        samples: list[float] = []
        end = time.perf_counter() + BUDGET_S
        while len(samples) < LEAST_SAMPLES or (len(samples) < MOST_SAMPLES and time.perf_counter() < end):
            samples.append(timed(call))
        self.busy |= statistics.median(samples) > BUSY_SPREAD * min(samples)
        return min(samples)


def _wall_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e9


def _cuda_seconds(call: Callable[[], object]) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return max(float(start.elapsed_time(stop)), 1e-4) / 1e3


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"
