"""Which of a model's calls of an op are timed, and the work in them: FLOPs, bytes, floor, and what binds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autokernel import roofline
from autokernel.history import KernelHistory
from autokernel.recording import Work
from autokernel.records import TimedCase
from autokernel.roofline import Bound, Ceilings
from autokernel.standing import RooflinePosition, measured_apart

if TYPE_CHECKING:
    from autokernel.spec import KernelSpec

MAX_TIMED_CASES = 4


def by_weight(spec: KernelSpec, cases: Sequence[TimedCase]) -> list[TimedCase]:
    """The calls, those that move the most bytes in one forward first."""
    return sorted(cases, key=lambda item: item.calls * spec.bytes_moved(item.case), reverse=True)


def timed_calls(spec: KernelSpec, cases: Sequence[TimedCase]) -> list[TimedCase]:
    """The few calls that are timed; without a model, the spec's heaviest case."""
    return by_weight(spec, cases)[:MAX_TIMED_CASES] or [TimedCase(case=max(spec.cases, key=spec.bytes_moved), calls=1)]


def work_of(spec: KernelSpec, timed: Sequence[TimedCase]) -> Work:
    """FLOPs and bytes of what is timed, in one forward."""
    first = timed[0].case
    more = f" +{len(timed) - 1}" if len(timed) > 1 else ""
    return Work(
        flops=sum(item.calls * spec.flops(item.case) for item in timed),
        nbytes=sum(item.calls * spec.bytes_moved(item.case) for item in timed),
        case=first.label + more,
        dtype=first.dtype,
    )


def floor_us(spec: KernelSpec, timed: Sequence[TimedCase], ceilings: Ceilings) -> float | None:
    """Least time that the measured ceilings allow for what is timed; None when one is unknown."""
    total = 0.0
    for item in timed:
        flops, nbytes = spec.flops(item.case), spec.bytes_moved(item.case)
        floor = roofline.floor_us(flops, nbytes, item.case.dtype, ceilings)
        if floor is None:
            return None
        total += item.calls * floor
    return total


def bound(spec: KernelSpec, timed: Sequence[TimedCase], ceilings: Ceilings) -> Bound | None:
    """What limits the larger part of the floor; None when a ceiling is unknown.

    A call whose floor is below the cost of a launch counts with that cost.
    """
    parts: dict[Bound, float] = defaultdict(float)
    for item in timed:
        flops, nbytes = spec.flops(item.case), spec.bytes_moved(item.case)
        found = roofline.bound(flops, nbytes, item.case.dtype, ceilings)
        floor = roofline.floor_us(flops, nbytes, item.case.dtype, ceilings)
        if found is None or floor is None:
            return None
        parts[found] += item.calls * max(floor, ceilings.launch_us or 0.0)
    return max(parts, key=lambda name: parts[name])


def position(spec: KernelSpec, history: KernelHistory, ceilings: Ceilings) -> RooflinePosition:
    """Where the incumbent stands by the history's newest measurements."""
    timed = timed_calls(spec, history.planned.cases)
    work = work_of(spec, timed)
    host_us, graph_us = measured_apart(history)
    return RooflinePosition(
        latency_us=history.incumbent_us,
        floor_us=history.floor_us,
        bound=bound(spec, timed, ceilings),
        flops=work.flops,
        nbytes=work.nbytes,
        ridge=roofline.ridge_point(work.dtype, ceilings, spec.bytes_moved(timed[0].case)),
        host_us=host_us,
        graph_us=graph_us,
    )
