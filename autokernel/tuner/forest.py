"""Two forests of randomized trees: how likely a configuration runs at all, and how likely it is a fast one if it does.

Classes instead of latencies (likelihood-free Bayesian optimization, Song, Yu, Neiswanger and Ermon 2022): only where
the fast ones lie matters, not how slow the slow ones are. Failures teach the first forest and leave the second alone,
so that a region with many failures is not taken for a slow one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autokernel.tuner.coding import Floats

TREES_RUNS, TREES_GOOD = 24, 64
TRIED_RUNS, TRIED_GOOD = 1.0, "sqrt"
"""Columns that a split chooses among, at one random threshold each: all, where one knob alone may tell what fails."""

LEAST_UTILITY = 0.02
"""Of a fast configuration, in log latency: the one that is just fast enough still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Good:
    """P(fast | runs) of each point of a pool [points], and the leaves it falls in [points, trees]."""

    probability: Floats
    leaves: NDArray[np.intp]

    def similarity(self, index: int) -> Floats:
        """Share of trees in which each point falls in one leaf with the point `index` [points]."""
        shared: Floats = (self.leaves == self.leaves[index]).mean(axis=1)
        return shared


def preload() -> None:
    """Import what a fit needs, which takes a second."""
    import sklearn.tree  # noqa: F401


def runs_probability(rows: Floats, runs: NDArray[np.bool_], weights: Floats, pool: Floats, seed: int) -> Floats:
    """P(runs) of each row of `pool`; ones while nothing has failed."""
    if runs.all() or not runs.any():
        return np.ones(len(pool))
    return _grown(rows, runs, weights, pool, TRIED_RUNS, TREES_RUNS, seed).probability


def good_probability(
    rows: Floats, log_latency: Floats, timed: NDArray[np.bool_], weights: Floats, pool: Floats, share: float, seed: int
) -> Good:
    """Which of `pool` are among the fastest `share` of the measured `rows`, all of which run and one of which is timed.

    A row that is not `timed` has only a lower bound of its latency and is never fast. A fast row weighs as much as it
    is faster than the slowest fast one: the expected improvement, when the forest is exact.
    """
    known = np.sort(log_latency[timed])
    bar = known[max(1, math.ceil(share * len(known))) - 1]
    good = timed & (log_latency <= bar)
    utility = np.maximum(bar - log_latency, LEAST_UTILITY)
    return _grown(
        rows,
        good,
        np.where(good, weights * utility / utility[good].mean(), weights),
        pool,
        TRIED_GOOD,
        TREES_GOOD,
        seed,
    )


def _grown(
    rows: Floats,
    labels: NDArray[np.bool_],
    weights: Floats,
    pool: Floats,
    tried: float | str,
    trees: int,
    seed: int,
) -> Good:
    """What trees over all of `rows` say of `pool`.

    Regression trees on labels of 0 and 1 split as classification trees do, as the variance is half the Gini impurity.
    They are fitted and read one by one: with tens of rows, what surrounds a tree takes several times as long as it.
    """
    import sklearn
    from sklearn.tree import ExtraTreeRegressor

    narrow, wide = rows.astype(np.float32), pool.astype(np.float32)
    kinds = labels.astype(np.float64)[:, None]
    probability, leaves = np.zeros(len(pool)), np.empty((len(pool), trees), dtype=np.intp)
    state = np.random.RandomState(seed)  # one for all trees: to make one takes as long as to grow a tree
    with sklearn.config_context(skip_parameter_validation=True):
        for number in range(trees):
            tree = ExtraTreeRegressor(max_features=tried, random_state=state)
            grown: Any = tree.fit(narrow, kinds, sample_weight=weights, check_input=False).tree_
            leaves[:, number] = grown.apply(wide)
            probability += grown.value[leaves[:, number], 0, 0] / trees
    return Good(probability=probability, leaves=leaves)
