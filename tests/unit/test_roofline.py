import json
import logging
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.errors import MeasurementError
from autokernel.roofline import (
    Bound,
    Ceilings,
    arithmetic_intensity,
    bound,
    floor_us,
    headroom,
    ridge_point,
    roofline_fraction,
)

MIB = 1 << 20
CPU = Ceilings(
    device="cpu",
    copy_gbps=20.0,
    copy_bytes=160 * MIB,
    cached=((1 * MIB, 80.0), (16 * MIB, 160.0), (64 * MIB, 40.0)),
    gemm_tflops={"fp32": 0.2},
    launch_us=2.0,
)
amounts = st.floats(min_value=0.0, max_value=1e15)


def test_floor_is_the_slower_of_moving_and_computing():
    flat = Ceilings(device="x", copy_gbps=100.0, gemm_tflops={"fp32": 1.0})
    assert floor_us(0, 1e6, "fp32", flat) == pytest.approx(10.0)
    assert floor_us(1e9, 1e6, "fp32", flat) == pytest.approx(1000.0)
    assert floor_us(1e6, 1e6, "fp32", flat) == pytest.approx(10.0)


def test_floor_is_unknown_for_flops_in_an_unmeasured_dtype():
    assert floor_us(1, 1, "fp16", CPU) is None
    assert bound(1, 1, "fp16", CPU) is None
    assert roofline_fraction(1.0, 1, 1, "fp16", CPU) is None
    assert headroom(1.0, 1, 1, "fp16", CPU) is None
    assert ridge_point("fp16", CPU) is None
    assert floor_us(0, 20e3, "int64", replace(CPU, cached=(), copy_bytes=0)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("working_set", "gbps"),
    [(1, 160.0), (MIB, 160.0), (16 * MIB, 160.0), (40 * MIB, 160.0), (64 * MIB, 40.0), (100 * MIB, 40.0)],
)
def test_a_working_set_that_may_fit_a_cache_gets_the_caches_rate(working_set, gbps):
    assert CPU.bandwidth_gbps(working_set) == gbps


@pytest.mark.parametrize("working_set", [160 * MIB, 1 << 40, math.inf])
def test_a_working_set_beyond_caches_gets_main_memorys_rate(working_set):
    assert CPU.bandwidth_gbps(working_set) == 20.0


@given(small=amounts, large=amounts)
def test_bandwidth_never_rises_with_the_working_set(small, large):
    small, large = sorted((small, large))
    assert CPU.bandwidth_gbps(small) >= CPU.bandwidth_gbps(large)


def test_a_cache_resident_copy_at_the_caches_rate_is_no_more_than_full_speed():
    latency_us = 16 * MIB / 160e3
    assert roofline_fraction(latency_us, 0, 16 * MIB, "fp32", CPU) == pytest.approx(1.0)
    with pytest.raises(MeasurementError, match="times as fast"):  # what main memory's rate alone would make of it
        roofline_fraction(latency_us, 0, 16 * MIB, "fp32", replace(CPU, cached=(), copy_bytes=0))


@given(latency=st.floats(min_value=1e-3, max_value=1e9), flops=amounts, moved=st.floats(min_value=1.0, max_value=1e12))
def test_a_fraction_is_within_zero_and_one_or_an_error(latency, flops, moved):
    try:
        fraction = roofline_fraction(latency, flops, moved, "fp32", CPU)
    except MeasurementError:
        assert floor_us(flops, moved, "fp32", CPU) > latency
    else:
        assert 0.0 <= fraction <= 1.0


def test_slightly_above_the_roofline_is_noise_and_far_above_an_error():
    flat = Ceilings(device="x", copy_gbps=1.0, gemm_tflops={})
    assert roofline_fraction(100 / 1.04, 0, 100e3, "fp32", flat) == 1.0
    with pytest.raises(MeasurementError):
        roofline_fraction(100 / 1.06, 0, 100e3, "fp32", flat)
    with pytest.raises(MeasurementError, match="latency"):
        roofline_fraction(0.0, 0, 100e3, "fp32", flat)


def test_headroom_is_what_the_fraction_leaves_and_warns_below_the_floor(caplog):
    flat = Ceilings(device="x", copy_gbps=1.0, gemm_tflops={})
    assert headroom(400.0, 0, 100e3, "fp32", flat) == pytest.approx(0.75)
    with caplog.at_level(logging.WARNING):
        assert headroom(10.0, 0, 100e3, "fp32", flat) == 0.0
    assert "no headroom" in caplog.text


def test_bound_names_what_limits():
    assert bound(0, 1e9, "fp32", CPU) is Bound.MEMORY
    assert bound(1e12, 1e9, "fp32", CPU) is Bound.COMPUTE
    assert bound(10, 100, "fp32", CPU) is Bound.OVERHEAD
    assert bound(10, 100, "fp32", replace(CPU, launch_us=None)) is Bound.MEMORY


def test_at_the_ridge_moving_and_computing_take_equally_long():
    ridge = ridge_point("fp32", CPU)
    assert ridge == pytest.approx(10.0)
    moved = 1e9
    assert floor_us(ridge * moved, moved, "fp32", CPU) == pytest.approx(floor_us(0, moved, "fp32", CPU))
    assert floor_us(1.1 * ridge * moved, moved, "fp32", CPU) > floor_us(0, moved, "fp32", CPU)


def test_arithmetic_intensity():
    assert arithmetic_intensity(100, 50) == 2.0
    assert arithmetic_intensity(1, 0) == math.inf
    assert arithmetic_intensity(0, 0) == 0.0


def test_ceilings_survive_json():
    assert Ceilings.from_json(json.loads(json.dumps(CPU.to_json()))) == CPU
