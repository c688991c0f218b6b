"""What counts as right: both tolerances, positions of NaN and infinity, and no output small enough to be zero."""

import subprocess
import sys

import pytest
import torch

from autokernel.judge.compare import Truth, mismatch, native_error
from autokernel.spec import DEFAULT_TOLERANCES, DTYPES


def verdict(actual, truth, dtype="fp32", native=None):
    own = truth.to(DTYPES[dtype]) if native is None else native
    return mismatch(actual, Truth(value=truth, native_error=native_error(own, truth)), dtype, DEFAULT_TOLERANCES[dtype])


@pytest.fixture
def truth():
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_correctly_rounded_output_is_right(truth, dtype):
    assert verdict(truth.to(DTYPES[dtype]), truth, dtype) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_zeros_and_means_are_wrong_at_every_scale(truth, dtype, scale):
    scaled = truth * scale
    assert verdict(torch.zeros_like(scaled).to(DTYPES[dtype]), scaled, dtype)
    assert verdict(torch.full_like(scaled, scaled.mean().item()).to(DTYPES[dtype]), scaled, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_softmax_with_its_small_values_set_to_zero_is_wrong(truth, dtype):
    value = torch.softmax(truth * 4, dim=-1)
    flushed = torch.where(value < 1e-4, torch.zeros_like(value), value).to(DTYPES[dtype])
    assert verdict(value.to(DTYPES[dtype]), value, dtype) is None
    assert verdict(flushed, value, dtype)


def test_low_precision_result_in_fp32_is_wrong(truth):
    assert verdict(truth.to(torch.bfloat16).float(), truth)


def test_error_within_the_promise_but_far_above_pytorchs_is_wrong(truth):
    assert "accuracy" in verdict(truth.float() * (1 + 3e-5), truth)


def test_one_wrong_element_is_named(truth):
    actual = truth.float()
    actual[3, 7] += 0.5
    assert "[3, 7]" in verdict(actual, truth)


def test_nan_must_match_by_position(truth):
    truth[2, 5] = float("nan")
    assert verdict(truth.float(), truth) is None
    assert "NaN" in verdict(torch.full_like(truth, float("nan")).float(), truth)
    assert "NaN" in verdict(truth.float().nan_to_num(), truth)


def test_infinity_must_match_by_position_and_sign(truth):
    truth[0, 0] = float("inf")
    assert verdict(truth.float(), truth) is None
    assert "infinity" in verdict(-truth.float(), truth)
    assert "infinity" in verdict(truth.float().nan_to_num(posinf=3e38), truth)


def test_overflow_of_the_dtype_is_expected_where_the_truth_exceeds_it(truth):
    truth[1, 1] = 1e6
    assert verdict(truth.to(torch.float16), truth, "fp16") is None
    assert "infinity" in verdict(truth.to(torch.float16).nan_to_num(posinf=65504.0), truth, "fp16")


def test_few_small_elements_of_a_bf16_output_may_lose_their_digits():
    """Cancellation leaves elements near zero whose relative error is large for PyTorch and for any right kernel."""
    truth = torch.ones(4, 64, dtype=torch.float64)
    truth[0, 0] = 1e-4
    actual = truth.clone()
    actual[0, 0] = 2e-4
    native = truth.clone()
    native[0, 1] += 4e-3
    assert verdict(actual.to(torch.bfloat16), truth, "bf16", native.to(torch.bfloat16)) is None


def test_empty_output_is_right():
    assert verdict(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.float64)) is None


def one_in(count, truth, factor):
    """A bf16 output with PyTorch's errors, and `count` elements off by `factor` times the promised tolerance."""
    promised = DEFAULT_TOLERANCES["bf16"].atol * truth.square().mean().sqrt() + DEFAULT_TOLERANCES["bf16"].rtol * truth
    off = truth.clone()
    off.view(-1)[:count] += factor * promised.view(-1)[:count]
    return off.to(torch.bfloat16)


@pytest.fixture(scope="module")
def large():
    """Two million elements, and a result of PyTorch's that is off by more than the promise in some of each row."""
    truth = torch.rand(1024, 2048, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    return truth, (truth + 0.01 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(3))).float()


@pytest.mark.parametrize(("count", "factor", "right"), [(2, 1.2, True), (2, 1.7, False), (4, 1.2, False)])
def test_the_far_tail_of_rounding_errors_may_miss_the_promise(large, count, factor, right):
    truth, native = large
    reason = verdict(one_in(count, truth, factor), truth, "bf16", native)
    assert (reason is None) == right, reason
    if not right:
        assert "promised" in reason


def test_a_small_output_has_no_tail(truth):
    positive = truth.abs() + 0.5
    assert verdict(one_in(1, positive, 1.2), positive, "bf16", positive + 0.05)


LEAN = """
import sys, torch
from autokernel.judge.compare import Truth, mismatch
from autokernel.records import Tolerance
want = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
got = want.float()
got[1, 2, 0] = 99
print(mismatch(got, Truth(value=want, native_error=torch.zeros_like(want)), "fp32", Tolerance(atol=1e-5, rtol=1e-5)))
print("sympy" in sys.modules)
"""


def test_the_worst_element_is_named_without_loading_symbolic_mathematics():
    said = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True).stdout
    assert "worst at [1, 2, 0]: got 99, should be 20" in said
    assert said.splitlines()[-1] == "False"
