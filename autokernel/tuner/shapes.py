"""Several shapes at once: one CONFIG for a weighted mix of them, or a few with the shapes that each serves.

A latency of None is a configuration that does not run on that shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autokernel.tuner.space import Point

Row = Sequence[float | None]
"""Latencies of one configuration in us, shape by shape."""

WITHIN = 0.03
"""How far a mix may stay behind the best configuration of each shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A few configurations and, shape by shape, which of them it takes.

    `loss` is how much longer the weighted mix takes than with the best configuration for each shape, 0.02 for 2 %.
    """

    points: tuple[Point, ...]
    takes: tuple[Point, ...]
    loss: float


def mixed_latency(row: Row, weights: Sequence[float]) -> float | None:
    """Weighted sum of the latencies in us; None when the configuration fails on one shape."""
    known = [latency for latency in row if latency is not None]
    if len(known) < len(row):
        return None
    return sum(weight * latency for weight, latency in zip(weights, known, strict=True))


def best_for_mix(latencies: Mapping[Point, Row], weights: Sequence[float]) -> Point | None:
    """The configuration with the least weighted sum; None when none runs on all shapes."""
    mixed = {point: mixed for point, row in latencies.items() if (mixed := mixed_latency(row, weights)) is not None}
    return min(mixed, key=lambda point: mixed[point], default=None)


def dispatch_table(latencies: Mapping[Point, Row], weights: Sequence[float], within: float = WITHIN) -> Dispatch:
    """Few configurations with which the weighted mix stays `within` of the best one for each shape.

    Greedy: the configuration that lowers the mix most is added until it is near enough, then those that later ones
    made needless are taken out again. What a set saves has falling returns, so a greedy set of k saves at least
    1 - 1/e of what the best k would (Nemhauser, Wolsey and Fisher 1978).
    Raises: ValueError when a shape has no configuration that runs, or the weights do not fit the shapes.
    """
    rows = {point: _times(row) for point, row in latencies.items()}
    if any(len(row) != len(weights) for row in rows.values()):
        raise ValueError(f"{len(weights)} weights for rows of other lengths")
    floor = [min((row[shape] for row in rows.values()), default=math.inf) for shape in range(len(weights))]
    if math.inf in floor:
        raise ValueError(f"no configuration runs on shape {floor.index(math.inf)}")
    bound = (1 + within) * _mix(floor, weights)
    chosen: list[Point] = []
    while not chosen or _cost(rows, chosen, weights) > bound:
        chosen.append(min(rows, key=lambda point: _ranking(rows, [*chosen, point], weights)))
    for point in list(chosen):
        rest = [other for other in chosen if other != point]
        if rest and _cost(rows, rest, weights) <= bound:
            chosen = rest
    takes = tuple(min(chosen, key=lambda point: rows[point][shape]) for shape in range(len(weights)))
    ideal = _mix(floor, weights)
    loss = _cost(rows, chosen, weights) / ideal - 1 if ideal > 0 else 0.0
    return Dispatch(points=tuple(chosen), takes=takes, loss=loss)


def _ranking(rows: Mapping[Point, list[float]], points: Sequence[Point], weights: Sequence[float]) -> tuple[int, float]:
    """Shapes on which none of `points` runs, then the mix over the other shapes; less is better."""
    best = [min(column) for column in zip(*(rows[point] for point in points), strict=True)]
    missing = sum(map(math.isinf, best))
    return missing, _mix([0.0 if math.isinf(latency) else latency for latency in best], weights)


def _cost(rows: Mapping[Point, list[float]], points: Sequence[Point], weights: Sequence[float]) -> float:
    missing, mix = _ranking(rows, points, weights)
    return math.inf if missing else mix


def _mix(latencies: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * latency for weight, latency in zip(weights, latencies, strict=True))


def _times(row: Row) -> list[float]:
    return [math.inf if latency is None else latency for latency in row]
