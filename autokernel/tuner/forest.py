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

TREES = 64
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


def runs_probability(rows: Floats, runs: NDArray[np.bool_], weights: Floats, pool: Floats, seed: int) -> Floats:
    """P(runs) of each row of `pool`; ones while nothing has failed."""
    if runs.all() or not runs.any():
        return np.ones(len(pool))
    return _positive(_forest(seed).fit(rows, runs, sample_weight=weights), pool)


def good_probability(
    rows: Floats, log_latency: Floats, timed: NDArray[np.bool_], weights: Floats, pool: Floats, share: float, seed: int
) -> Good:
    """Which of `pool` are among the fastest `share` of the measured `rows`, all of which run.

    A row that is not `timed` has only a lower bound of its latency and is never fast. A fast row weighs as much as it
    is faster than the slowest fast one: the expected improvement, when the forest is exact.
    """
    known = np.sort(log_latency[timed])
    bar = known[max(1, math.ceil(share * len(known))) - 1] if len(known) else -math.inf
    good = timed & (log_latency <= bar)
    utility = np.where(good, np.maximum(bar - log_latency, LEAST_UTILITY), 0.0) if good.any() else np.zeros(len(rows))
    weighted = np.where(
        good, weights * utility / max(float(utility[good].mean()), 1e-9) if good.any() else 0.0, weights
    )
    forest = _forest(seed).fit(rows, good, sample_weight=weighted)
    return Good(probability=_positive(forest, pool), leaves=forest.apply(pool))


def _forest(seed: int) -> Any:
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(TREES, random_state=seed, n_jobs=1)


def _positive(forest: Any, pool: Floats) -> Floats:
    """The forest's probability of True."""
    shares: Floats = forest.predict_proba(pool)
    return shares[:, list(forest.classes_).index(True)] if True in forest.classes_ else np.zeros(len(pool))
