"""Which unmeasured points a search looks at: all of a small space, else those around the best and random ones."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from autokernel.tuner.coding import Floats
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Trial
from autokernel.tuner.twins import Twins

SCORED_WHOLE = 50_000
"""Up to so many combinations all unmeasured points are looked at."""

SAMPLED = 4_000
"""Of a larger space: points looked at, of which a quarter are random and the rest near the best."""

DRAWS_PER_POINT = 20
"""Random combinations tried for each point wanted; constraints may refuse many."""

INCUMBENTS = 8
RADIUS = 2


class Candidates:
    """The open points of one space. What does not change between proposals is worked out once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._whole: list[Point] | None = None
        self._near = [[knob.neighbours(i, RADIUS) for i in range(len(knob.values))] for knob in space.knobs]

    def open(
        self, seen: Collection[Point], best: Sequence[Point], rng: random.Random, trials: Sequence[Trial] = ()
    ) -> list[Point]:
        """Points that are not `seen`, to choose among; `best` are the incumbents, best first.

        Of those of a large space that most likely are twins of `trials` one stays, as the expectation may be wrong.
        """
        if self.space.size <= SCORED_WHOLE:
            if self._whole is None:
                self._whole = list(self.space.points())
            return [point for point in self._whole if point not in seen]
        near = self._around(best[:INCUMBENTS], rng)
        found = dict.fromkeys(point for point in near if point not in seen)
        wanted = SAMPLED - len(found)
        found |= dict.fromkeys(point for point in self._random(max(wanted, SAMPLED // 4), rng) if point not in seen)
        twins = Twins(self.space, trials)
        expected = {point for point in found if twins.expects(point)}
        new = [point for point in found if point not in expected]
        return [*new, rng.choice(sorted(expected))] if expected else new

    def _around(self, best: Sequence[Point], rng: random.Random) -> list[Point]:
        """All one-knob changes of each incumbent, and random changes of two to four knobs of it or of two of them."""
        near = [moved for point in best for moved in self.space.neighbours(point, RADIUS)]
        if not best:
            return near
        for _ in range(SAMPLED // 4 * 3 - len(near)):
            # The better half as often again: ranks are drawn with falling weight.
            point = list(best[min(rng.randrange(len(best)), rng.randrange(len(best)))])
            other = best[rng.randrange(len(best))]
            for k in rng.sample(range(len(point)), min(len(point), rng.randint(2, 4))):
                point[k] = rng.choice((*self._near[k][point[k]], other[k]))
            near.append(self.space.canonical(tuple(point)))
        return [point for point in near if self.space.allowed(point)]

    def _random(self, count: int, rng: random.Random) -> Iterator[Point]:
        """At most `count` allowed points, uniform over the combinations."""
        found = 0
        for _ in range(DRAWS_PER_POINT * count):
            if found == count:
                return
            point = self.space.canonical(tuple(rng.randrange(len(knob.values)) for knob in self.space.knobs))
            if self.space.allowed(point):
                found += 1
                yield point


def spread(pool: Floats, taken: Floats, count: int, rng: np.random.Generator, looked_at: int = 64) -> list[int]:
    """Rows of `pool` far from `taken` and from each other; the first one in the middle when nothing is taken.

    For each, the farthest of `looked_at` random rows: the farthest of all would always be a corner of the space.
    """
    chosen: list[int] = []
    while len(chosen) < min(count, len(pool)):
        rows = np.setdiff1d(rng.choice(len(pool), min(looked_at + len(chosen), len(pool)), replace=False), chosen)
        there = np.vstack([taken, pool[chosen]])
        if len(there):
            distance = np.abs(pool[rows][:, None, :] - there[None, :, :]).sum(axis=-1).min(axis=1)
            chosen.append(int(rows[distance.argmax()]))
        else:
            chosen.append(int(rows[np.abs(pool[rows] - 0.5).sum(axis=1).argmin()]))
    return chosen
