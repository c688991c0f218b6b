"""LFBO search: what to measure next is where a forest expects fast configurations and a smooth model an improvement.

The score of an open point is P(runs) x P(fast | runs) x expected improvement. The first two are forests, which find
the regions with hard edges (a tile that spills, a stage too many); the third is a Gaussian process, which needs the
fewest measurements to see where the latency falls. A batch is chosen one by one, each choice lowering the score of
points like it: those that share its leaves, and those of which the smooth model then knows enough.

Nothing is remembered between calls: a proposal follows from the trials, the seed and the settings alone. Only measured
points are out of the running; the fastest compete in every fit with every later one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autokernel.tuner.coding import Coded, Features, Floats, code
from autokernel.tuner.forest import good_probability, runs_probability
from autokernel.tuner.proposing import Candidates, spread
from autokernel.tuner.smooth import Belief, Smooth
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Status, Trial

PARENT_WEIGHT = 0.5
"""Of a measurement of the parent kernel: the child's structure differs, most of its landscape does not."""

PARENT_NOISE = 10.0
"""How many times a measurement's variance a parent's has."""

FASTEST_ROWS, OTHER_ROWS = 80, 40
"""What the smooth model is fitted to at most: its time grows with the cube, and far above the best details are idle."""

LEAST_TIMED = 3
"""With fewer timed configurations no model of latency is fitted."""

LEAST_GAIN = 1e-12
"""Expected improvement of a point of which none is expected: P(fast | runs) then decides among such points."""

FLOOR = 0.02
"""Added to P(fast | runs), so that a forest of few measurements cannot rule a region out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the score is made. `start`: points spread over the space before a model is asked, seeds included."""

    start: int = 4
    good_share: float = 0.2
    diversity: float = 0.5
    forest_power: float = 1.0
    smooth: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was measured of `points`, parents last; arrays over them. `log_latency` is 0 where a point did not run."""

    points: list[Point]
    runs: NDArray[np.bool_]
    timed: NDArray[np.bool_]
    log_latency: Floats
    weights: Floats


@dataclass(slots=True, kw_only=True)
class Lfbo:
    """The strategy. `parent`: trials of the parent kernel at points of this space, which may be measured again."""

    space: Space
    seed: int
    seeds: Sequence[Point] = ()
    parent: Sequence[Trial] = ()
    features: Features | None = None
    settings: Settings = field(default_factory=Settings)
    _candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        self._candidates = Candidates(self.space)

    def propose(self, trials: Sequence[Trial], count: int) -> list[Point]:
        """See `Strategy`."""
        seen = {trial.point for trial in trials}
        waiting = [seed for seed in dict.fromkeys(self.seeds) if seed not in seen and self.space.allowed(seed)]
        if waiting:
            return waiting[:count]
        known = _known(trials, self.parent)
        order = np.argsort(np.where(known.timed, known.log_latency, np.inf), kind="stable")
        best = [known.points[row] for row in order if known.timed[row]]
        rng = random.Random(f"{self.seed}/{len(trials)}")
        pool = self._candidates.open(seen, best or [*self.seeds], rng, trials)
        if not pool:
            return []
        coded = code(self.space, [*known.points, *pool], self.features)
        draws = np.random.default_rng([self.seed, len(trials)])
        wanted = min(count, len(pool))
        missing = min(wanted, self.settings.start - len(known.points))
        if missing > 0:
            chosen = spread(coded.numbers[len(known.points) :], coded.numbers[: len(known.points)], missing, draws)
        else:
            chosen = self._chosen(known, coded, wanted, draws)
        return [pool[index] for index in chosen]

    def _chosen(self, known: _Known, coded: Coded, count: int, rng: np.random.Generator) -> list[int]:
        """Rows of the pool, best first."""
        rows, pool = coded.numbers[: len(known.points)], coded.numbers[len(known.points) :]
        seed = int(rng.integers(2**31))
        score = runs_probability(rows, known.runs, known.weights, pool, seed)
        # Ties are broken at random, or a forest's flat regions would be gone through in the order of TUNABLES. What
        # cannot run stays far below all that can, however little that promises.
        score = score * (1 + 1e-6 * rng.random(len(pool))) + 1e-30 * rng.random(len(pool))
        if known.timed.sum() < LEAST_TIMED:
            return [int(row) for row in np.argsort(-score)[:count]]
        ran = known.runs
        good = good_probability(
            rows[ran],
            known.log_latency[ran],
            known.timed[ran],
            known.weights[ran],
            pool,
            self.settings.good_share,
            seed,
        )
        score *= (good.probability + FLOOR) ** self.settings.forest_power
        belief = self._belief(known, coded, rng) if self.settings.smooth else None
        best = float(known.log_latency[known.timed].min())
        chosen: list[int] = []
        likeness = np.zeros(len(pool))
        for _ in range(count):
            value = score * np.maximum(belief.expected_gain(best), LEAST_GAIN) if belief is not None else score.copy()
            if chosen:
                # A factor, as what cannot run scores about 0 and must not rise above what it is least like.
                value = value * (1 - self.settings.diversity * likeness / len(chosen))
            value[chosen] = -np.inf
            index = int(value.argmax())
            chosen.append(index)
            likeness += good.similarity(index)
            if belief is not None:
                belief.believe(index)
                best = min(best, belief.mean(index))
        return chosen

    def _belief(self, known: _Known, coded: Coded, rng: np.random.Generator) -> Belief:
        rows = np.flatnonzero(known.runs)
        if len(rows) > FASTEST_ROWS + OTHER_ROWS:
            ranked = rows[np.argsort(known.log_latency[rows], kind="stable")]
            others = np.linspace(FASTEST_ROWS, len(rows) - 1, OTHER_ROWS).astype(int)
            rows = np.concatenate([ranked[:FASTEST_ROWS], ranked[others]])
        noise = np.where(known.weights[rows] < 1, PARENT_NOISE, 0.0)
        model = Smooth(coded.distances, coded.indicators[rows], known.log_latency[rows], noise, rng)
        return Belief(model, coded.indicators[len(known.points) :])


def _known(trials: Sequence[Trial], parent: Sequence[Trial]) -> _Known:
    """Trials, and the parent's where the kernel itself was not measured, moved to the kernel's level of latency."""
    own = {trial.point: trial for trial in trials}
    shift = _level(own, parent)
    inherited = {trial.point: trial for trial in parent if trial.point not in own and trial.status is not Status.WRONG}
    rows = [*own.values(), *inherited.values()]
    log_latency = [float(np.log(trial.latency_us)) if trial.is_valid and trial.latency_us else 0.0 for trial in rows]
    return _Known(
        points=[trial.point for trial in rows],
        runs=np.array([trial.is_valid for trial in rows], dtype=bool),
        timed=np.array([trial.status is Status.OK for trial in rows], dtype=bool),
        log_latency=np.array(log_latency) + np.array([0.0] * len(own) + [shift] * len(inherited)),
        weights=np.array([1.0] * len(own) + [PARENT_WEIGHT] * len(inherited)),
    )


def _level(own: dict[Point, Trial], parent: Sequence[Trial]) -> float:
    """Median log ratio of the kernel's latency to its parent's at points where both were timed; 0 with none."""
    ratios = [
        float(np.log(own[trial.point].latency_us or 1.0) - np.log(trial.latency_us))
        for trial in parent
        if trial.status is Status.OK
        and trial.latency_us
        and trial.point in own
        and own[trial.point].status is Status.OK
    ]
    return float(np.median(ratios)) if ratios else 0.0
