"""What a faster op does for the whole model (Amdahl's law), and the order in which ops are worth the effort.

A *share* is a fraction of the model's wall time in [0, 1]; *headroom* the fraction of an op's own time that could go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autokernel.errors import MeasurementError
from autokernel.records import PlannedOp


def end_to_end_speedup(share: float, local_speedup: float) -> float:
    """Speedup of the whole model when a part that takes `share` of its time becomes `local_speedup` times as fast.

    Never above `1 / (1 - share)`; infinite only when the part is everything and becomes free.
    Raises: MeasurementError when `share` is outside [0, 1] or `local_speedup` is not positive.
    """
    _check_fraction("share", share)
    if not local_speedup > 0:
        raise MeasurementError(
            f"a speedup of {local_speedup} is impossible", hint="speedups are latency ratios, above 0"
        )
    remaining = (1.0 - share) + share / local_speedup
    return math.inf if remaining == 0 else 1.0 / remaining


def potential(share: float, headroom: float | None) -> float:
    """Speedup of the whole model if the op's headroom were fully used.

    With unknown headroom (None) this is the limit that no kernel can pass: the op takes no time at all.
    Raises: MeasurementError when a fraction is outside [0, 1].
    """
    _check_fraction("share", share)
    saved = share if headroom is None else share * _check_fraction("headroom", headroom)
    return math.inf if saved == 1 else 1.0 / (1.0 - saved)


def rank(ops: Iterable[PlannedOp]) -> tuple[PlannedOp, ...]:
    """The ops with the greatest potential first; equal ones by share, then by name, so that the order is stable."""
    return tuple(sorted(ops, key=lambda op: (-op.potential, -op.share, op.op)))


def _check_fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise MeasurementError(f"{name} {value} is outside [0, 1]", hint="it is a fraction, not a percentage")
    return value
