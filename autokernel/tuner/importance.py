"""Which knobs matter, from the trials of a search: numbers for a report, and words for whoever edits the kernel."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autokernel.kernelfile import Value
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Status, Trial

SWEEPS = 12
"""Rounds of backfitting of the additive model; a fit over tens of trials settles in a few."""

SHRINKAGE = 0.5
"""Of a trial that is added to every value at no effect: a value measured once is half believed, twice more so."""

LEAST_FAILURES = 3
"""A value fails by itself when it was tried at least so often and never ran."""

SHOWN = 3
"""How many best configurations, and failing values, the words name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How much one knob decides. `spread` is the range of its main effect in log latency: 0.1 is about 10 %.

    `effects` maps each measured value's index to its effect, `failures` each value that never ran to how often it
    failed.
    """

    name: str
    spread: float
    effects: dict[int, float]
    failures: dict[int, int]


def importance(space: Space, trials: Sequence[Trial]) -> list[Importance]:
    """One entry per knob, the most decisive first. Effects are of an additive model of the log latency."""
    timed = [(t.point, math.log(t.latency_us)) for t in trials if t.status is Status.OK and t.latency_us]
    effects = _main_effects(len(space.knobs), timed)
    found = [
        Importance(
            name=knob.name,
            spread=max(of.values()) - min(of.values()) if of else 0.0,
            effects=of,
            failures=_failures(number, trials),
        )
        for number, (knob, of) in enumerate(zip(space.knobs, effects, strict=True))
    ]
    return sorted(found, key=lambda knob: -knob.spread)


def in_words(space: Space, trials: Sequence[Trial]) -> str:
    """What a search found, in a few lines: which knobs matter, the best configurations, what fails and why."""
    ranked = importance(space, trials)
    knobs = {knob.name: knob for knob in space.knobs}
    lines = []
    if matter := [k for k in ranked if k.spread > 0]:
        lines.append("Knobs by how much they change the latency:")
        for knob in matter:
            best = min(knob.effects, key=lambda index: knob.effects[index])
            lines.append(f"- {knob.name}: {math.expm1(knob.spread):.0%}, best at {knobs[knob.name].values[best]!r}")
    timed = sorted((t for t in trials if t.status is Status.OK and t.latency_us), key=lambda t: t.latency_us or 0.0)
    if timed:
        lines.append("Best configurations, as changes of CONFIG:")
        lines += [f"- {t.latency_us:.1f} us: {_difference(space, t.point)}" for t in timed[:SHOWN]]
    for knob in ranked:
        for index, count in knob.failures.items():
            lines.append(f"- {knob.name} = {knobs[knob.name].values[index]!r} failed each of {count} times")
    lines += _reasons(t for t in trials if not t.is_valid)
    return "\n".join(lines)


def _main_effects(knobs: int, timed: Sequence[tuple[Point, float]]) -> list[dict[int, float]]:
    """For each knob, value -> effect, by shrunken backfitting."""
    if not timed:
        return [{} for _ in range(knobs)]
    level = statistics.fmean(log_latency for _, log_latency in timed)
    residuals = [log_latency - level for _, log_latency in timed]
    effects: list[dict[int, float]] = [dict.fromkeys((point[k] for point, _ in timed), 0.0) for k in range(knobs)]
    for _ in range(SWEEPS):
        for k in range(knobs):
            for value in effects[k]:
                rows = [row for row, (point, _) in enumerate(timed) if point[k] == value]
                shift = sum(residuals[row] + effects[k][value] for row in rows) / (len(rows) + SHRINKAGE)
                for row in rows:
                    residuals[row] += effects[k][value] - shift
                effects[k][value] = shift
    return effects


def _failures(knob: int, trials: Sequence[Trial]) -> dict[int, int]:
    """Values that were tried often enough and never ran -> how often."""
    tried = Counter(trial.point[knob] for trial in trials)
    ran = {trial.point[knob] for trial in trials if trial.is_valid}
    return {value: n for value, n in sorted(tried.items()) if n >= LEAST_FAILURES and value not in ran}


def _difference(space: Space, point: Point) -> str:
    changed: dict[str, Value] = {k: v for k, v in space.config_at(point).items() if space.config[k] != v}
    return ", ".join(f"{name} {space.config[name]!r} -> {value!r}" for name, value in changed.items()) or "as it is"


def _reasons(failed: Iterable[Trial]) -> list[str]:
    reasons = Counter((str(t.status), t.error.strip().splitlines()[-1] if t.error.strip() else "") for t in failed)
    shown = [f"- {n} x {status}{': ' + error if error else ''}" for (status, error), n in reasons.most_common(SHOWN)]
    return ["Failures:", *shown] if shown else []
