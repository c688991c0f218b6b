"""Points as arrays: numbers per point for forests, and indicators with distances per knob for the smooth model.

What a caller knows of a configuration without measuring it (`Features`: tile bytes, occupancy) is one more knob to
both, in the smooth model cut into bins of equally many points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autokernel.tuner.knobs import Knob
from autokernel.tuner.space import Point, Space

Features = Callable[[Point], Sequence[float]]
"""What is known of a point beside its knobs, equally many finite numbers for each."""

Floats = NDArray[np.float64]

BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """Points as arrays, row by row.

    `numbers` [points, columns] are the codes of the knobs and then the features, each in [0, 1]. `indicators`
    [points, values of all knobs] have a one at each knob's value; `distances` hold per knob, and per feature with its
    bins, a [values, values] matrix with the greatest at 1.
    """

    numbers: Floats
    indicators: Floats
    distances: tuple[Floats, ...]


def code(space: Space, points: Sequence[Point], features: Features | None = None) -> Coded:
    """`points` as arrays. Bins and scales are of these points: code together what is compared."""
    chosen = np.array(points, dtype=np.intp).reshape(len(points), len(space.knobs))
    tables = [_scaled(np.array([knob.encode(i) for i in range(len(knob.values))])) for knob in space.knobs]
    numbers = [table[chosen[:, k]] for k, table in enumerate(tables)]
    indicators = [np.eye(len(knob.values))[chosen[:, k]] for k, knob in enumerate(space.knobs)]
    distances = [_distance(table) for table in tables]
    if features is not None:
        known = _scaled(np.array([features(point) for point in points], dtype=float).reshape(len(points), -1))
        numbers.append(known)
        for column in known.T:
            edges = np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1]))
            indicators.append(np.eye(len(edges) + 1)[np.searchsorted(edges, column, side="right")])
            distances.append(_distance(np.linspace(0.0, 1.0, len(edges) + 1)[:, None]))
    return Coded(numbers=np.hstack(numbers), indicators=np.hstack(indicators), distances=tuple(distances))


def spread_out(knob: Knob) -> list[int]:
    """The knob's values from its middle outwards."""
    middle = (len(knob.values) - 1) / 2
    return sorted(range(len(knob.values)), key=lambda index: abs(index - middle))


def _scaled(columns: Floats) -> Floats:
    """Each column moved and stretched to [0, 1]; a constant one is 0."""
    low, high = columns.min(axis=0), columns.max(axis=0)
    scaled: Floats = (columns - low) / np.where(high > low, high - low, 1.0)
    return scaled


def _distance(table: Floats) -> Floats:
    """Euclidean distances of the rows of `table`, the greatest at 1."""
    apart: Floats = np.sqrt(((table[:, None, :] - table[None, :, :]) ** 2).sum(axis=-1))
    return apart / max(float(apart.max()), 1e-9)
