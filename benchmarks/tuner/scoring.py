"""What a replayed run is worth: cost to come near a table's best, regret on the way, and arms against each other.

A run that does not come near is never dropped: it counts as the whole budget, or as the seconds that a budget of
average configurations would have cost if that is more (a restricted mean).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulated import BUDGET, CURVE, WORKERS, Session
from tables import Table

NEAR, NEARER = 1.05, 1.01
REGRETS = (16, 32, 64)
RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(frozen=True, kw_only=True)
class Score:
    """One run. Costs are to the first evaluation within 5 % and 1 % of the best; `*_reached` tells whether it came so
    far. `regret` is the best so far over the table's best, minus one, after 1, 2, ... `CURVE` evaluations (infinite
    while none ran); a run that ended earlier stays where it was. `failures` are among those evaluations.
    """

    table: str
    arm: str
    seed: int
    evaluations_5: int
    evaluations_1: int
    seconds_5: float
    seconds_1: float
    reached_5: bool
    reached_1: bool
    regret: tuple[float, ...]
    failures: int
    evaluations: int
    thinking_s: float


def score(session: Session, arm: str, thinking_s: float) -> Score:
    """The score of a session that has ended."""
    regret, best = [], math.inf
    for step in session.steps:
        best = min(best, session.truth.get(step.cell.point, math.inf))
        regret.append(best / session.best_us - 1)
    costs = {limit: _cost(session, regret, limit) for limit in (NEAR, NEARER)}
    curve = [*regret[:CURVE], *([regret[-1] if regret else math.inf] * (CURVE - len(regret)))]
    return Score(
        table=session.table.name,
        arm=arm,
        seed=session.seed,
        evaluations_5=costs[NEAR][0],
        evaluations_1=costs[NEARER][0],
        seconds_5=costs[NEAR][1],
        seconds_1=costs[NEARER][1],
        reached_5=costs[NEAR][2],
        reached_1=costs[NEARER][2],
        regret=tuple(round(value, 4) for value in curve),
        failures=sum(step.cell.status != "OK" for step in session.steps[:CURVE]),
        evaluations=len(session.steps),
        thinking_s=round(thinking_s, 3),
    )


def _cost(session: Session, regret: Sequence[float], limit: float) -> tuple[int, float, bool]:
    for number, value in enumerate(regret):
        if value <= limit - 1 + 1e-12:
            return number + 1, round(session.steps[number].at_s, 3), True
    return session.budget, round(max(session.now_s, horizon_s(session.table, session.budget)), 3), False


def horizon_s(table: Table, budget: int = BUDGET) -> float:
    """Seconds that `budget` average configurations of the table cost."""
    compiling = sum(cell.compile_s for cell in table.cells) / len(table.cells) / WORKERS
    timing = sum(cell.timing_s for cell in table.cells) / len(table.cells)
    return budget * (compiling + timing)


def expected_random(cells: int, good: int, budget: int | None = None) -> float:
    """Expected draws without replacement until the first of `good` among `cells`, at most `budget`; exact."""
    if budget is None:
        return (cells + 1) / (good + 1)
    expected, none_yet = 0.0, 1.0
    for drawn in range(budget):
        expected += none_yet
        none_yet *= max(0, cells - good - drawn) / (cells - drawn)
    return expected


def good_cells(table: Table, limit: float) -> int:
    """How many cells are within `limit` of the best."""
    truth = Session(table=table, seed=0).truth
    return sum(us <= limit * min(truth.values()) for us in truth.values())


def half_of(table: Table) -> str:
    """dev or test, by a byte of the hash of its kernel file's name: all tables of a kernel go together."""
    return ("dev", "test")[hashlib.sha256(table.kernel.encode()).digest()[1] % 2]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """An arm's mean cost over ours, as geometric mean over tables, with its interval."""

    estimate: float
    low: float
    high: float


def ratio_of(theirs: Mapping[str, Sequence[float]], ours: Mapping[str, Sequence[float]]) -> Ratio:
    """From costs by table and seed. The bootstrap draws tables, and within each the runs of both arms."""
    tables = sorted(theirs.keys() & ours.keys())
    upper, lower = ([np.array(side[name], dtype=float) for name in tables] for side in (theirs, ours))
    logs = np.array([math.log(a.mean() / b.mean()) for a, b in zip(upper, lower, strict=True)])
    rng = np.random.default_rng(0)
    # Means of resampled runs for each table, then resampled tables.
    drawn = np.stack([np.log(_means(a, rng) / _means(b, rng)) for a, b in zip(upper, lower, strict=True)])
    chosen = rng.integers(len(tables), size=(RESAMPLES, len(tables)))
    means = drawn[chosen, np.arange(RESAMPLES)[:, None]].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Ratio(estimate=math.exp(logs.mean()), low=math.exp(low), high=math.exp(high))


def _means(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    return values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)


def by_table(scores: Sequence[Score], arm: str, what: str) -> dict[str, list[float]]:
    """Table -> the values of a field over the seeds of an arm."""
    found: dict[str, list[float]] = {}
    for one in scores:
        if one.arm == arm:
            found.setdefault(one.table, []).append(float(getattr(one, what)))
    return found


def random_check(scores: Sequence[Score], table: Table) -> dict[str, Any]:
    """The random arm's mean cost in evaluations, its exact expectation, and how many standard errors lie between."""
    draws = [one.evaluations_5 for one in scores if one.arm == "random" and one.table == table.name]
    good, cells = good_cells(table, NEAR), len(table.cells)
    exact = expected_random(cells, good, min(BUDGET, cells))
    error = float(np.std(draws, ddof=1)) / math.sqrt(len(draws))
    return {
        "table": table.name,
        "cells": cells,
        "good": good,
        "unrestricted": expected_random(cells, good),
        "expected": exact,
        "mean": float(np.mean(draws)),
        "errors_apart": (float(np.mean(draws)) - exact) / error if error else 0.0,
    }
