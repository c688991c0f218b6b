"""The search loop: a strategy proposes, a provider measures, the journal keeps, and a best is accepted once it is sure.

It knows neither how points are chosen nor how they are measured. Points of one binary are timed once. A reading that
beats the best is only a claim: the two are timed again in turns before it becomes the best, as the fastest of many
noisy readings is the luckiest one.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel.kernelfile import Value
from autokernel.stats import MIN_BLOCKS, ratio_interval
from autokernel.tuner.journal import Progress, TrialLog, crash_of
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Provider, Status, Strategy, Trial

FIRST_BATCH = 4
LARGEST_BATCH = 32
SPACE_SHARE = 0.05
"""A batch is at most this share of the space (but FIRST_BATCH): nothing is learnt within a batch."""

GROWTH = 4
"""A batch is at most one in so many of what is measured already, so that the first choices learn from each other."""

AHEAD = 12
"""How many points that may come next are compiled meanwhile: there are more cores than GPUs."""

CHALLENGERS = 3
"""Most readings of one batch that are compared with the best again."""

NEAR_BEST = 1.01
"""A reading up to so many times the best's is compared with it: the best's own may have been a lucky one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop, whichever comes first; None is no limit. `patience`: evaluations in a row without a better one."""

    evaluations: int | None = None
    seconds: float | None = None
    patience: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome. `best`, its `config` and reading are None when no configuration ran; `why` says what ended it."""

    best: Point | None
    config: dict[str, Value] | None
    latency_us: float | None
    trials: tuple[Trial, ...]
    evaluations: int
    elapsed_s: float
    why: str


def tune(
    space: Space,
    provider: Provider,
    strategy: Strategy,
    budget: Budget,
    *,
    seeds: Sequence[Point] = (),
    journal_path: Path | None = None,
    batch: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Search `space` until the budget is used up or nothing is left, `seeds` first.

    With a `journal_path` that holds the beginning of the same search, it goes on from there as if never interrupted.
    Raises: LogError when the journal is damaged or of another search; what the provider raises.
    """
    log = TrialLog(journal_path)
    try:
        progress = log.resume(identity_of(space, seeds))
        search = _Search(
            space=space,
            provider=provider,
            strategy=strategy,
            budget=budget,
            seeds=tuple(dict.fromkeys(seeds)),
            log=log,
            progress=progress,
            batch=batch,
            clock=clock,
            begun=clock() - progress.elapsed_s,
        )
        return search.run()
    finally:
        log.close()


def identity_of(space: Space, seeds: Sequence[Point]) -> dict[str, object]:
    """What must be equal for one search to go on from another's journal."""
    return {
        "knobs": {knob.name: [repr(value) for value in knob.values] for knob in space.knobs},
        "rules": [rule.text for rule in (*space.constraints, *space.unused.values())],
        "seeds": [list(point) for point in seeds],
    }


def batch_size(space_size: int, measured: int) -> int:
    """How many points to measure before the strategy is asked again."""
    return max(FIRST_BATCH, min(LARGEST_BATCH, int(SPACE_SHARE * space_size), measured // GROWTH))


@dataclass(slots=True, kw_only=True)
class _Search:
    """One search under way."""

    space: Space
    provider: Provider
    strategy: Strategy
    budget: Budget
    seeds: tuple[Point, ...]
    log: TrialLog
    progress: Progress
    batch: int | None
    clock: Callable[[], float]
    begun: float  # by the clock, had all processes of this search run without a pause

    def run(self) -> Tuned:
        self._mend()
        why = self._over()
        while why is None:
            points, ahead = self._next()
            if not points:
                why = "every configuration has been measured"
                break
            if ahead:
                self.provider.prepare([*points, *ahead])
            self._measure(points)
            self._compare()
            why = self._over()
        best = self.progress.best
        return Tuned(
            best=best,
            config=None if best is None else self.space.config_at(best),
            latency_us=None if best is None else self._latencies()[best],
            trials=tuple(self.progress.trials),
            evaluations=self.progress.evaluations,
            elapsed_s=self.clock() - self.begun,
            why=why,
        )

    def _mend(self) -> None:
        """Finish what was under way when a former process died."""
        crashed = self.progress.crashed
        if len(crashed) == 1:
            self._finish([crash_of(crashed[0])], timed=0)
        elif crashed:
            for point in crashed:
                self._measure([point])
        if self.progress.compared < len(self.progress.trials):
            self._compare()

    def _over(self) -> str | None:
        """Why to stop now; None to go on."""
        budget, progress = self.budget, self.progress
        if budget.evaluations is not None and progress.evaluations >= budget.evaluations:
            return f"{progress.evaluations} evaluations"
        if budget.seconds is not None and self.clock() - self.begun >= budget.seconds:
            return f"{budget.seconds:g} seconds"
        if budget.patience is not None and (stale := self._since_best()) >= budget.patience:
            return f"{stale} evaluations without a better one"
        return None

    def _since_best(self) -> int:
        points = [trial.point for trial in self.progress.trials]
        return len(points) - 1 - points.index(self.progress.best) if self.progress.best in points else len(points)

    def _next(self) -> tuple[list[Point], list[Point]]:
        """Points to measure now, and as many that may come next."""
        seen = {trial.point for trial in self.progress.trials}
        count = self.batch or batch_size(self.space.size, len(seen))
        if self.budget.evaluations is not None:
            count = min(count, self.budget.evaluations - self.progress.evaluations)
        ranked = [seed for seed in self.seeds if seed not in seen]
        if not ranked:
            ranked = self.strategy.propose(self.progress.trials, count + AHEAD)
        return ranked[:count], ranked[count:]

    def _measure(self, points: Sequence[Point]) -> None:
        """Measure `points`, but take over what is known of a binary that was timed already."""
        known = {trial.digest: trial for trial in self.progress.trials if trial.digest is not None}
        self.log.start(points)
        try:
            digests = dict(zip(points, self.provider.digests(points), strict=True))
            first: dict[str, Point] = {}
            for point, digest in digests.items():
                if digest is not None:
                    first.setdefault(digest, point)
            fresh = [p for p, d in digests.items() if d is None or (d not in known and first[d] == p)]
            trials = {trial.point: trial for trial in (self.provider.measure(fresh) if fresh else ())}
        except BaseException:
            self.log.stopped()
            raise
        measured = known | {digests[point]: trial for point, trial in trials.items() if digests[point] is not None}
        whole = [trials[p] if p in trials else _twin(measured[digests[p]], p) for p in points]
        self._finish(whole, timed=len(fresh))

    def _finish(self, trials: Sequence[Trial], timed: int) -> None:
        self.progress.trials += trials
        self.progress.evaluations += timed
        self.log.done(trials, timed, self.clock() - self.begun)

    def _compare(self) -> None:
        """Let the latest readings that beat the best's, or come near it, prove themselves."""
        latencies, best = self._latencies(), self.progress.best
        latest = [t.point for t in self.progress.trials[self.progress.compared :] if t.status is Status.OK]
        bar = math.inf if best is None else NEAR_BEST * latencies[best]
        claims = sorted((point for point in latest if latencies[point] < bar), key=lambda point: latencies[point])
        self.progress.compared = len(self.progress.trials)
        if not claims:
            return
        # Without a best the fastest reading is one, and the others are compared with it.
        holder = claims[0] if best is None else best
        rivals = [point for point in claims[:CHALLENGERS] if point != holder]
        rounds = self.provider.confirm([holder, *rivals]) if rivals else [[]]
        self.progress.best = winner(holder, rivals, rounds, latencies)
        self.log.confirmed([holder, *rivals], self.progress.best, self.progress.compared, self.clock() - self.begun)

    def _latencies(self) -> Mapping[Point, float]:
        return {
            t.point: t.latency_us for t in self.progress.trials if t.status is Status.OK and t.latency_us is not None
        }


def winner(
    holder: Point, rivals: Sequence[Point], rounds: Sequence[Sequence[float]], latencies: Mapping[Point, float]
) -> Point:
    """The rival that is surely faster than `holder` by the most, else `holder`; by single readings without rounds.

    `rounds` are of the holder and then of the rivals, in us. With too few for an interval, medians decide.
    """
    ratios = {holder: 1.0}
    for rival, times in zip(rivals, rounds[1:], strict=False):
        if not times or len(times) != len(rounds[0]):
            ratios[rival] = latencies[rival] / latencies[holder]
        elif len(times) < MIN_BLOCKS:
            ratios[rival] = statistics.median(times) / statistics.median(rounds[0])
        else:
            interval = ratio_interval(times, rounds[0])
            ratios[rival] = interval.estimate if interval.high < 1 else 1.0
    return min(ratios, key=lambda point: ratios[point])


def _twin(trial: Trial, point: Point) -> Trial:
    return dataclasses.replace(trial, point=point, compile_s=0.0, timing_s=0.0)
