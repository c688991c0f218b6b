"""Large outputs are compared in pieces, with the same result as whole ones."""

import pytest
import torch

from autokernel.judge import compare
from autokernel.judge.compare import Truth, mismatch, native_error
from autokernel.spec import DEFAULT_TOLERANCES, DTYPES

ROWS, COLS = 96, 1500  # three pieces, the last one shorter


def large(dtype):
    truth = torch.randn(ROWS, COLS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    native = truth.to(DTYPES[dtype])
    return native, Truth(value=truth, native_error=native_error(native, truth))


def edited(output, row, value):
    output = output.clone()
    output[row, 7] = value
    return output


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_right_output_needs_only_the_pieces(dtype, monkeypatch):
    native, truth = large(dtype)
    assert compare._plainly_right(native, truth, dtype, DEFAULT_TOLERANCES[dtype])
    monkeypatch.setattr(compare, "_non_finite_mismatch", None)  # what comes after the pieces is not reached
    assert mismatch(native, truth, dtype, DEFAULT_TOLERANCES[dtype]) is None


@pytest.mark.parametrize("row", [0, 50, ROWS - 1])
@pytest.mark.parametrize("value", [9.0, float("nan"), float("inf")])
def test_one_wrong_element_is_found_in_any_piece(row, value):
    native, truth = large("bf16")
    reason = mismatch(edited(native, row, value), truth, "bf16", DEFAULT_TOLERANCES["bf16"])
    assert reason
    assert f"[{row}, 7]" in reason or f"element {row * COLS + 7} " in reason


def test_what_the_pieces_refuse_may_still_be_right():
    native, truth = large("fp32")
    value = truth.value.clone()
    value[3, 3] = float("inf")
    native = native.clone()
    native[3, 3] = float("inf")
    infinite = Truth(value=value, native_error=native_error(native, value))
    assert not compare._plainly_right(native, infinite, "fp32", DEFAULT_TOLERANCES["fp32"])
    assert mismatch(native, infinite, "fp32", DEFAULT_TOLERANCES["fp32"]) is None
