"""Which open configurations most likely compile to code that was timed already.

A kernel.py chooses its structure by shape, and then most of its knobs do nothing: configurations that differ in them
are one binary and say nothing new. What points of one digest differ in did not matter there, and most likely does not
where the same kernel is launched with other values of the knobs that do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass

from autokernel.tuner.roles import is_left_to_kernel
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Trial

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Group:
    """The points of one digest: which values each knob had, and which knobs are taken to be idle there."""

    values: tuple[Set[int], ...]
    idle: frozenset[int]

    @classmethod
    def of(cls, points: Sequence[Point], space: Space) -> _Group:
        """A knob is idle when all values are alike, or two that leave nothing to the kernel: 0 may stand for one."""
        values = tuple(map(set, zip(*points, strict=True)))
        idle = set()
        for k, (knob, seen) in enumerate(zip(space.knobs, values, strict=True)):
            named = [index for index in seen if not is_left_to_kernel(knob.values[index])]
            if len(named) > 1 or len(seen) == len(knob.values) > 1:
                idle.add(k)
        return cls(values, frozenset(idle))

    def may_hold(self, values: Sequence[Set[int]], idle: Set[int]) -> bool:
        """Whether some of these values are its own, whatever those of the `idle` knobs are."""
        return all(k in idle or own & other for k, (own, other) in enumerate(zip(self.values, values, strict=True)))


class Twins:
    """What `trials` tell of twins; those without a digest tell nothing."""

    def __init__(self, space: Space, trials: Sequence[Trial]) -> None:
        points: dict[tuple[str, str], list[Point]] = {}
        for trial in trials:
            if trial.digest is not None:
                kernel = trial.resources.kernel if trial.resources else ""
                points.setdefault((kernel, trial.digest), []).append(trial.point)
        by_kernel: dict[str, list[_Group]] = {}
        for (kernel, _), alike in points.items():
            by_kernel.setdefault(kernel, []).append(_Group.of(alike, space))
        self._groups: list[tuple[_Group, frozenset[int]]] = []
        for groups in by_kernel.values():
            shared = _shared(groups)
            self._groups += [(group, group.idle | shared) for group in groups]

    def expects(self, point: Point) -> bool:
        """Whether `point` differs from some points of one digest in nothing but idle knobs."""
        values = [{index} for index in point]
        return any(group.may_hold(values, idle) for group, idle in self._groups)


def _shared(groups: Sequence[_Group]) -> frozenset[int]:
    """Knobs that were idle at some digest of a kernel; none where two digests then differ in nothing else."""
    idle = NOTHING.union(*(group.idle for group in groups))
    if any(one.may_hold(other.values, idle) for one, other in itertools.combinations(groups, 2)):
        return NOTHING
    return idle
