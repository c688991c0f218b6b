"""The roofline: how fast work of known FLOPs and bytes can be on a device whose ceilings are known.

No device is touched here; `ceilings.py` measures. What is unknown is None, never a guess.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from autokernel.errors import MeasurementError

log = logging.getLogger(__name__)

IMPOSSIBLE_FRACTION = 1.05
"""A roofline fraction above this cannot be noise: a byte count, a FLOP count or a ceiling is wrong."""


class Bound(StrEnum):
    """What limits a piece of work."""

    MEMORY = "memory"
    COMPUTE = "compute"
    OVERHEAD = "overhead"  # so little work that starting it costs more than doing it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device reached in a quick measurement.

    `copy_gbps` holds for working sets of `copy_bytes` and more. `cached` holds (working set in bytes, GB/s) pairs,
    small to large, below that: what fits into a CPU's caches moves several times as fast, and a fraction taken of the
    main memory's rate would exceed 1. `gemm_tflops` is by dtype (`fp32`, `bf16`); `launch_us` is the cost of starting
    one op.
    """

    device: str
    copy_gbps: float
    gemm_tflops: Mapping[str, float]
    copy_bytes: int = 0
    cached: tuple[tuple[int, float], ...] = ()
    launch_us: float | None = None

    def bandwidth_gbps(self, working_set_bytes: float) -> float:
        """Highest bandwidth seen at this working set's size: at the next smaller size measured or any larger one.

        Between two sizes this is the smaller one's, which may be too high and is never too low.
        """
        if working_set_bytes >= self.copy_bytes:
            return self.copy_gbps
        start = max((size for size, _ in self.cached if size <= working_set_bytes), default=0)
        return max([self.copy_gbps, *(rate for size, rate in self.cached if size >= start)])

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Ceilings:
        """Inverse of `to_json`."""
        return Ceilings(**{**raw, "cached": tuple((int(size), float(rate)) for size, rate in raw["cached"])})


def arithmetic_intensity(flops: float, bytes_moved: float) -> float:
    """FLOP per byte; infinite when nothing is moved but something is computed, 0 when neither."""
    if bytes_moved > 0:
        return flops / bytes_moved
    return math.inf if flops > 0 else 0.0


def ridge_point(dtype: str, ceilings: Ceilings, bytes_moved: float = math.inf) -> float | None:
    """Intensity in FLOP/byte above which compute binds; None when the dtype's compute ceiling is unknown."""
    tflops = ceilings.gemm_tflops.get(dtype)
    return None if tflops is None else tflops * 1e3 / ceilings.bandwidth_gbps(bytes_moved)


def floor_us(flops: float, bytes_moved: float, dtype: str, ceilings: Ceilings) -> float | None:
    """Least time in us for this work: the larger of moving the bytes and computing the FLOPs.

    None when FLOPs are to be done in a dtype whose compute ceiling is unknown.
    """
    memory_us = bytes_moved / (ceilings.bandwidth_gbps(bytes_moved) * 1e3)
    if flops <= 0:
        return memory_us
    tflops = ceilings.gemm_tflops.get(dtype)
    return None if tflops is None else max(memory_us, flops / (tflops * 1e6))


def bound(flops: float, bytes_moved: float, dtype: str, ceilings: Ceilings) -> Bound | None:
    """What limits this work; None when the dtype's compute ceiling is unknown."""
    floor = floor_us(flops, bytes_moved, dtype, ceilings)
    ridge = ridge_point(dtype, ceilings, bytes_moved)
    if floor is None:
        return None
    if ceilings.launch_us is not None and floor < ceilings.launch_us:
        return Bound.OVERHEAD
    if ridge is not None and arithmetic_intensity(flops, bytes_moved) > ridge:
        return Bound.COMPUTE
    return Bound.MEMORY


def roofline_fraction(
    latency_us: float, flops: float, bytes_moved: float, dtype: str, ceilings: Ceilings
) -> float | None:
    """Share of the attainable roofline that a latency reached, in [0, 1]; None when a ceiling is unknown.

    Raises: MeasurementError above 1.05, as a count or a ceiling must then be wrong; up to there it is noise
        and reads 1.
    """
    if not latency_us > 0:
        raise MeasurementError(f"a latency of {latency_us} us is impossible", hint="measure again")
    floor = floor_us(flops, bytes_moved, dtype, ceilings)
    if floor is None:
        return None
    fraction = floor / latency_us
    if fraction > IMPOSSIBLE_FRACTION:
        raise MeasurementError(
            f"{latency_us:.1f} us is {fraction:.2f} times as fast as {ceilings.device} allows ({floor:.1f} us)",
            hint="a byte count, a FLOP count or a ceiling is wrong; measure the ceilings again on an idle machine",
        )
    return min(fraction, 1.0)


def headroom(latency_us: float, flops: float, bytes_moved: float, dtype: str, ceilings: Ceilings) -> float | None:
    """Fraction of `latency_us` that the roofline leaves, in [0, 1]; None when a ceiling is unknown.

    For planning only: a latency under the floor is warned of and has no headroom, where `roofline_fraction` raises,
    because ceilings measured in a second on a busy machine can be too low and a plan must still be made.
    """
    try:
        fraction = roofline_fraction(latency_us, flops, bytes_moved, dtype, ceilings)
    except MeasurementError as error:
        log.warning("no headroom assumed: %s", error)
        return 0.0
    return None if fraction is None else 1.0 - fraction
