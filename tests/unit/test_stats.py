"""Intervals that hold whatever the distribution."""

import random

import pytest

from autokernel.stats import MIN_BLOCKS, pooled_interval, ratio_interval


def test_ratio_of_equal_samples_is_one():
    interval = ratio_interval([5.0] * MIN_BLOCKS, [5.0] * MIN_BLOCKS)
    assert (interval.low, interval.estimate, interval.high) == (1.0, 1.0, 1.0)


def test_estimate_is_the_median_of_the_paired_ratios():
    interval = ratio_interval([2, 4, 6, 8, 10, 12, 1400], [1, 2, 3, 4, 5, 4, 7])
    assert interval.estimate == 2.0


def test_fewest_blocks_give_the_extremes():
    interval = ratio_interval([1, 2, 3, 4, 5, 6], [1] * 6)
    assert (interval.low, interval.high) == (1, 6)


@pytest.mark.parametrize("blocks", [6, 12, 24])
def test_interval_covers_the_true_median_of_skewed_noise(blocks):
    rng = random.Random(blocks)
    covered = 0
    for _ in range(400):
        slow = [100 * rng.lognormvariate(0, 0.2) ** 3 for _ in range(blocks)]
        fast = [50 * rng.lognormvariate(0, 0.2) ** 3 for _ in range(blocks)]
        interval = ratio_interval(slow, fast)
        covered += interval.low <= 2.0 <= interval.high
    assert covered / 400 >= 0.93


def test_too_few_or_unpaired_blocks_are_refused():
    with pytest.raises(ValueError, match="6 or more pairs"):
        ratio_interval([1.0] * 5, [1.0] * 5)
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval([1.0] * 7, [1.0] * 6)


def test_pairs_that_disagree_widen_the_interval():
    equal, faster = [[10.0] * 4] * 3, [[10.0] * 4, [9.8] * 4, [10.3] * 4]
    interval = pooled_interval(equal, faster)
    assert interval.low == 10 / 10.3
    assert interval.high == 10 / 9.8


def test_a_pair_that_does_not_win_counts_whole_when_each_is_one_sample():
    theirs, ours = [[10.0] * 4] * MIN_BLOCKS, [[8.0] * 4] * (MIN_BLOCKS - 1) + [[10.0] * 4]
    assert pooled_interval(theirs, ours).low == 1.25
    by_pair = pooled_interval(theirs, ours, pair_by_pair=True)
    assert (by_pair.low, by_pair.estimate) == (1.0, 1.25)


def test_as_many_pairs_as_confidence_needs_when_each_is_one_sample():
    few = [[1.0, 2.0]] * (MIN_BLOCKS - 1)
    with pytest.raises(ValueError, match=str(MIN_BLOCKS)):
        pooled_interval(few, few, pair_by_pair=True)
