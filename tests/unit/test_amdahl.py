import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.amdahl import end_to_end_speedup, potential, rank
from autokernel.errors import MeasurementError
from autokernel.records import PlannedOp

shares = st.floats(min_value=0.0, max_value=0.999)
fractions = st.floats(min_value=0.0, max_value=1.0)
speedups = st.floats(min_value=0.01, max_value=1e6)


def planned(op: str, share: float, gain: float) -> PlannedOp:
    return PlannedOp(op=op, cases=(), time_us=1.0, share=share, headroom=None, potential=gain)


def test_half_of_the_time_twice_as_fast_gives_four_thirds():
    assert end_to_end_speedup(0.5, 2.0) == pytest.approx(4 / 3)


@given(share=shares, speedup=speedups)
def test_speedup_never_passes_the_limit(share, speedup):
    assert end_to_end_speedup(share, speedup) <= 1 / (1 - share) * (1 + 1e-9)


@given(share=shares, slower=speedups, faster=speedups)
def test_a_faster_part_never_makes_the_whole_slower(share, slower, faster):
    slower, faster = sorted((slower, faster))
    assert end_to_end_speedup(share, slower) <= end_to_end_speedup(share, faster) * (1 + 1e-12)


@given(small=shares, large=shares, speedup=st.floats(min_value=1.0, max_value=1e6))
def test_a_larger_share_never_gains_less(small, large, speedup):
    small, large = sorted((small, large))
    assert end_to_end_speedup(small, speedup) <= end_to_end_speedup(large, speedup) * (1 + 1e-12)


@given(share=shares, headroom=st.floats(min_value=0.0, max_value=0.999))
def test_potential_is_the_speedup_when_the_op_reaches_the_roofline(share, headroom):
    assert potential(share, headroom) == pytest.approx(end_to_end_speedup(share, 1 / (1 - headroom)))


@given(share=shares, headroom=fractions)
def test_unknown_headroom_is_the_limit(share, headroom):
    assert potential(share, None) == pytest.approx(end_to_end_speedup(share, math.inf))
    assert potential(share, headroom) <= potential(share, None) * (1 + 1e-12)


def test_all_of_the_time_made_free_is_infinitely_fast():
    assert end_to_end_speedup(1.0, math.inf) == math.inf
    assert potential(1.0, 1.0) == math.inf


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, 50.0])
def test_a_share_outside_zero_to_one_is_refused(share):
    with pytest.raises(MeasurementError, match="share"):
        end_to_end_speedup(share, 2.0)
    with pytest.raises(MeasurementError, match="share"):
        potential(share, 0.5)


@pytest.mark.parametrize("speedup", [0.0, -1.0, math.nan])
def test_an_impossible_speedup_is_refused(speedup):
    with pytest.raises(MeasurementError, match="speedup"):
        end_to_end_speedup(0.5, speedup)


def test_headroom_outside_zero_to_one_is_refused():
    with pytest.raises(MeasurementError, match="headroom"):
        potential(0.5, 1.5)


def test_rank_puts_potential_first_then_share_then_name():
    ops = [planned("b", 0.1, 1.2), planned("a", 0.1, 1.2), planned("c", 0.3, 1.2), planned("d", 0.2, 1.5)]
    assert [op.op for op in rank(ops)] == ["d", "c", "a", "b"]
    assert rank(reversed(ops)) == rank(ops)
    assert rank([replace(ops[0], potential=math.inf), *ops])[0].potential == math.inf
