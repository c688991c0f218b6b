"""How many pairs of processes a timing takes."""

from autokernel.judge.timing import schedule
from autokernel.stats import MIN_BLOCKS


def test_a_winner_of_small_calls_must_win_in_as_many_processes_as_confidence_needs():
    plan = schedule(20.0)
    assert (plan.confirming, plan.pair_by_pair) == (MIN_BLOCKS, True)
    assert plan.pairs * plan.rounds >= MIN_BLOCKS


def test_long_calls_take_fewer_pairs_and_rounds_enough_for_an_interval():
    plan = schedule(5_000.0)
    assert plan.pairs < schedule(20.0).pairs
    assert not plan.pair_by_pair
    assert plan.pairs * plan.rounds >= MIN_BLOCKS
