"""What a history says about the knobs of one kernel: what was tried, what failed, what each value seems to cost.

A configuration is a `Point` of the kernel's `Space`. Experiments on the same text with another CONFIG
become measurements; experiments on other text (an agent changed the structure) say nothing about these knobs and are
left out. Times enter only as ratios to the incumbent measured in the same session, chained from keep to keep, so a
machine that slows down during the night does not blur them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import KernelFile, without_config
from autokernel.records import Decision, Experiment, Verdict
from autokernel.tuner.space import Point, Space

Setting = tuple[int, int]
"""(index of a knob, index of one of its values)."""

SCREENED_WEIGHT = 0.5  # a screening is a short timing: it counts half
DISTANCE_WEIGHT = 0.8  # per knob that a measurement differs from the incumbent in: knobs interact, so near ones count
SHRINKAGE = 0.05  # pulls effects towards zero; small, as interleaved timings are good to a per cent
FIT_ROUNDS = 12  # rounds of backfitting; a fit over one-knob changes settles in a few


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Log of the latency of a configuration relative to the starter, and how much it counts, in (0, 1]."""

    point: Point
    log_latency: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a history tells about one space. `faults` are sets of settings that made a good candidate fail."""

    space: Space
    incumbent: Point
    seen: frozenset[Point]
    faults: tuple[frozenset[Setting], ...]
    effects: Mapping[Setting, float]

    def is_open(self, point: Point) -> bool:
        """Whether `point` is allowed, untried, and holds no combination of settings that is known to fail."""
        if point in self.seen or not self.space.allowed(point):
            return False
        settings = set(enumerate(point))
        return not any(fault <= settings for fault in self.faults)

    def known(self, knob: int) -> dict[int, float]:
        """Measured values of a knob -> change of log latency against the incumbent's value (itself at 0)."""
        origin = self.effects.get((knob, self.incumbent[knob]), 0.0)
        found = {v: effect - origin for (k, v), effect in self.effects.items() if k == knob}
        return found | {self.incumbent[knob]: 0.0}


def changes(origin: Point, point: Point) -> tuple[Setting, ...]:
    """The settings of `point` that differ from `origin`."""
    return tuple((k, new) for k, (old, new) in enumerate(zip(origin, point, strict=True)) if old != new)


def gather(history: KernelHistory, kernel: KernelFile) -> Evidence | None:
    """The evidence on the space of the incumbent, which `kernel` is; None when it has no knob with a choice."""
    space = Space.of(kernel)
    incumbent = space.locate(kernel.config)
    if not space.knobs or incumbent is None:
        return None
    walk = _Walk(space, history)
    for experiment in history.experiments:
        walk.add(experiment)
    return Evidence(
        space=space,
        incumbent=incumbent,
        seen=frozenset(walk.seen | {incumbent}),
        faults=tuple(fault for fault in walk.faults if not any(fault <= set(enumerate(p)) for p in walk.passed)),
        effects=fit_effects(walk.measurements, incumbent),
    )


class _Walk:
    """Reads experiments in order and follows the incumbent through them."""

    def __init__(self, space: Space, history: KernelHistory) -> None:
        self.space = space
        self.skeleton = without_config(history.incumbent)[1]
        self.seen: set[Point] = set()
        self.passed: set[Point] = set()
        self.faults: list[frozenset[Setting]] = []
        self.measurements: list[Measurement] = []
        self.level = 0.0  # log latency of the incumbent of that time, relative to the starter
        self.base = self._point(history.starter if history.starter is not None else history.incumbent)
        if self.base is not None:
            self.seen.add(self.base)
            self.measurements.append(Measurement(point=self.base, log_latency=0.0, weight=1.0))

    def add(self, experiment: Experiment) -> None:
        point = self._point(experiment.proposal.kernel_py)
        log_latency = self._log_latency(experiment)
        if point is not None:
            self.seen.add(point)
            self._learn(experiment.outcome.verdict, point, log_latency)
        if experiment.decision is Decision.KEEP:
            self.base = point
            self.level = self.level if log_latency is None else log_latency

    def _learn(self, verdict: Verdict, point: Point, log_latency: float | None) -> None:
        if verdict not in (Verdict.PASS, Verdict.SCREENED):
            if self.base is not None and point != self.base:
                self.faults.append(frozenset(changes(self.base, point)))
            return
        if verdict is Verdict.PASS:
            self.passed.add(point)
        if log_latency is not None:
            weight = 1.0 if verdict is Verdict.PASS else SCREENED_WEIGHT
            self.measurements.append(Measurement(point=point, log_latency=log_latency, weight=weight))

    def _log_latency(self, experiment: Experiment) -> float | None:
        if not experiment.latency_us or not experiment.incumbent_us:
            return None
        return self.level + math.log(experiment.latency_us / experiment.incumbent_us)

    def _point(self, text: str) -> Point | None:
        try:
            kernel, skeleton = without_config(text)
        except ConfigError:
            return None  # another agent's candidate may be no Python at all
        return self.space.locate(kernel.config) if skeleton == self.skeleton else None


def fit_effects(measurements: Sequence[Measurement], centre: Point) -> dict[Setting, float]:
    """Additive model of log latency: one effect for each measured setting, by weighted, shrunken backfitting."""
    weights = [m.weight * DISTANCE_WEIGHT ** max(0, len(changes(centre, m.point)) - 1) for m in measurements]
    residuals = [m.log_latency for m in measurements]
    members: dict[Setting, list[int]] = {}
    for row, measurement in enumerate(measurements):
        for setting in enumerate(measurement.point):
            members.setdefault(setting, []).append(row)
    effects = dict.fromkeys(members, 0.0)
    everything = list(range(len(measurements)))
    for _ in range(FIT_ROUNDS if measurements else 0):
        _shift(residuals, everything, _mean(residuals, weights, everything, shrinkage=0.0))
        for setting, rows in members.items():
            for row in rows:
                residuals[row] += effects[setting]
            effects[setting] = _mean(residuals, weights, rows, shrinkage=SHRINKAGE)
            _shift(residuals, rows, effects[setting])
    return effects


def _mean(values: Sequence[float], weights: Sequence[float], rows: Iterable[int], *, shrinkage: float) -> float:
    total = norm = 0.0
    for row in rows:
        total += values[row] * weights[row]
        norm += weights[row]
    return total / (norm + shrinkage)


def _shift(residuals: list[float], rows: Iterable[int], amount: float) -> None:
    for row in rows:
        residuals[row] -= amount
