"""What the whole-model measurement says against each of PyTorch's ways, as intervals; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autokernel.records import Interval


def against_eager(integration: Mapping[str, Any] | None) -> Interval | None:
    """Speedup of the model with the kernels over eager; None when it was not measured."""
    raw = integration["speedup"] if integration else None
    return Interval(**raw) if raw else None


def against_compile(integration: Mapping[str, Any] | None) -> Interval | None:
    """Speedup of the model with the kernels over torch.compile; None when either was not measured.

    Where they were not measured against each other, but each against eager, the bounds are those of the worst and the
    best case.
    """
    if integration and (measured := integration.get("speedup_over_compile")):
        return Interval(**measured)
    ours = against_eager(integration)
    raw = integration.get("compile_speedup") if integration else None
    if ours is None or raw is None:
        return None
    compiled = Interval(**raw)
    return Interval(
        low=ours.low / compiled.high, estimate=ours.estimate / compiled.estimate, high=ours.high / compiled.low
    )


def standing(speedup: Interval) -> str:
    """`faster`, `SLOWER` or `no sure difference`."""
    return "faster" if speedup.low > 1 else "SLOWER" if speedup.high < 1 else "no sure difference"
