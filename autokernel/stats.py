"""Medians and distribution-free intervals for interleaved measurements; no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autokernel.records import Interval

CONFIDENCE = 0.95
MIN_BLOCKS = 6  # the fewest pairs whose extremes bracket the median with 95 % confidence: 1 - 2 * 0.5**6 = 0.969


def ratio_interval(numerator_us: Sequence[float], denominator_us: Sequence[float]) -> Interval:
    """`median_interval` of the paired ratios.

    Pairs should be blocks long enough to be independent of each other; consecutive single calls are not.

    Raises: ValueError for unequal lengths or fewer than `MIN_BLOCKS` pairs.
    """
    if len(numerator_us) != len(denominator_us) or len(numerator_us) < MIN_BLOCKS:
        raise ValueError(f"need {MIN_BLOCKS} or more pairs, got {len(numerator_us)} and {len(denominator_us)}")
    return median_interval([a / b for a, b in zip(numerator_us, denominator_us, strict=True)])


def median_interval(values: Sequence[float]) -> Interval:
    """Their median with a 95 % interval from order statistics.

    The k-th smallest and k-th largest of n values bracket the true median with probability 1 - 2 P(Bin(n, 1/2) < k),
    whatever the distribution (the sign test turned round), so that no normality and no resampling seed is needed.

    Raises: ValueError for fewer than `MIN_BLOCKS` values.
    """
    if len(values) < MIN_BLOCKS:
        raise ValueError(f"need {MIN_BLOCKS} or more values, got {len(values)}")
    ordered = sorted(values)
    rank = _interval_rank(len(ordered))
    return Interval(low=ordered[rank - 1], estimate=statistics.median(ordered), high=ordered[-rank])


def pooled_interval(
    numerators_us: Sequence[Sequence[float]], denominators_us: Sequence[Sequence[float]], *, pair_by_pair: bool = False
) -> Interval:
    """`ratio_interval` over the rounds of several pairs of processes, each with its list of rounds.

    All rounds are one sample, whose interval spans what the pairs disagree by; with `pair_by_pair` a pair's medians are
    one sample, so that what six pairs are to show each of them must.
    Raises: ValueError for unequal lengths, or for fewer than `MIN_BLOCKS` samples.
    """
    if pair_by_pair:
        return ratio_interval(
            [statistics.median(rounds) for rounds in numerators_us],
            [statistics.median(rounds) for rounds in denominators_us],
        )
    return ratio_interval(
        [us for rounds in numerators_us for us in rounds], [us for rounds in denominators_us for us in rounds]
    )


def _interval_rank(n: int) -> int:
    """Largest k with 1 - 2 P(Bin(n, 1/2) < k) >= CONFIDENCE."""
    tail, k = 0.0, 0
    while True:
        tail += math.comb(n, k) / 2**n
        if 1 - 2 * tail < CONFIDENCE:
            return k
        k += 1
