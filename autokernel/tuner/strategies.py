"""The searches by name, `--search lfbo|pattern|random|exhaustive`, and the simple ones among them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autokernel.errors import ConfigError
from autokernel.tuner.coding import Features
from autokernel.tuner.proposing import Candidates
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Status, Strategy, Trial

DEFAULT = "lfbo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a strategy is made from. `seeds` are points to begin with; `parent` trials of the kernel before an edit."""

    space: Space
    seed: int
    seeds: Sequence[Point] = ()
    parent: Sequence[Trial] = ()
    features: Features | None = None


@dataclass(slots=True, kw_only=True)
class Exhaustive:
    """Every configuration in the order of TUNABLES."""

    space: Space

    def propose(self, trials: Sequence[Trial], count: int) -> list[Point]:
        """See `Strategy`."""
        seen = {trial.point for trial in trials}
        return list(itertools.islice((point for point in self.space.points() if point not in seen), count))


@dataclass(slots=True, kw_only=True)
class Random:
    """Configurations drawn evenly, none twice, seeds first."""

    space: Space
    seed: int
    seeds: Sequence[Point] = ()
    _candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        self._candidates = Candidates(self.space)

    def propose(self, trials: Sequence[Trial], count: int) -> list[Point]:
        """See `Strategy`."""
        seen = {trial.point for trial in trials}
        waiting = _unseen(self.seeds, seen)
        if waiting:
            return waiting[:count]
        rng = random.Random(f"{self.seed}/{len(trials)}")
        pool = self._candidates.open(seen, (), rng)
        return rng.sample(pool, min(count, len(pool)))


@dataclass(slots=True, kw_only=True)
class Pattern:
    """Plain pattern search: all one-step neighbours of a point, then those of the best of them; a fresh start when none
    is better. Starts are the seeds, then random points.
    """

    space: Space
    seed: int
    seeds: Sequence[Point] = ()
    _candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        self._candidates = Candidates(self.space)

    def propose(self, trials: Sequence[Trial], count: int) -> list[Point]:
        """See `Strategy`. Follows the search through its trials, which are all of its state."""
        latency = {t.point: t.latency_us for t in trials if t.status is Status.OK and t.latency_us is not None}
        seen = {trial.point: number for number, trial in enumerate(trials)}
        passed: set[Point] = set()
        for start in self._starts(trials):
            if start not in seen:
                return [start]
            here: Point | None = start
            while here is not None and here not in passed:
                passed.add(here)
                near = self.space.neighbours(here)
                if open_ := _unseen(near, seen):
                    random.Random(f"{self.seed}/{here}").shuffle(open_)
                    return open_[:count]
                best = min((p for p in near if p in latency), key=lambda p: latency[p], default=None)
                better = best is not None and (here not in latency or latency[best] < latency[here])
                here = best if better else None
        return []

    def _starts(self, trials: Sequence[Trial]) -> Iterator[Point]:
        yield from dict.fromkeys(self.seeds)
        # The draws are the same in every call, so that starts that were measured are met again in their order.
        rng = random.Random(self.seed)
        if self.space.size <= len(trials):
            yield from self.space.points()
            return
        seen = {trial.point for trial in trials}
        for _ in range(1000 + 20 * len(trials)):
            point = self.space.canonical(tuple(rng.randrange(len(knob.values)) for knob in self.space.knobs))
            if self.space.allowed(point):
                yield point
        yield from self._candidates.open(seen, (), rng)


def _lfbo(task: Task) -> Strategy:
    from autokernel.tuner.lfbo import Lfbo

    return Lfbo(space=task.space, seed=task.seed, seeds=task.seeds, parent=task.parent, features=task.features)


STRATEGIES: dict[str, Callable[[Task], Strategy]] = {
    "lfbo": _lfbo,
    "pattern": lambda task: Pattern(space=task.space, seed=task.seed, seeds=task.seeds),
    "random": lambda task: Random(space=task.space, seed=task.seed, seeds=task.seeds),
    "exhaustive": lambda task: Exhaustive(space=task.space),
}
"""Name -> how it is made. A strategy needs one entry here and nothing elsewhere."""


def strategy_of(name: str, task: Task) -> Strategy:
    """The search called `name`. Raises: ConfigError for another name."""
    if name not in STRATEGIES:
        raise ConfigError(f"there is no search {name!r}", hint=f"choose from {', '.join(STRATEGIES)}")
    return STRATEGIES[name](task)


def _unseen(points: Sequence[Point], seen: set[Point] | dict[Point, int]) -> list[Point]:
    return [point for point in dict.fromkeys(points) if point not in seen]
