"""Is an output right? Two conditions against an fp64 truth, both of which must hold.

1. The promised tolerance: |error| <= atol * rms(truth) + rtol * |truth|. The absolute part scales with the output's own
   magnitude, so that no output is small enough to be zero. Of a million elements one may miss it, by half.
2. PyTorch's own accuracy: the error may not exceed a small multiple of what PyTorch's op makes in the same dtype on the
   same inputs, per row of the last dimension, plus one rounding of the output and the reordering of an fp32 sum.

NaN and infinity must match by position. An element is "lost" when its error exceeds half its value; no more elements
may be lost than PyTorch loses, so that flushing small values to zero is seen however small they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autokernel.records import Tolerance

NATIVE_FACTOR = 16.0
"""How many times PyTorch's own row error is still accepted: other summation orders differ by a few times."""

FP32_REORDER = 256 * 2.0**-24
"""Relative error of an fp32 sum in another order, on the row's largest value: one after the other over 32000 numbers
makes some 200 roundings."""

TAIL_SHARE, TAIL_FACTOR = 1e-6, 1.5
"""Of the elements, how many may miss the promised tolerance, and by how much: rounding errors have tails, and among
tens of millions of elements some lie far out (one in 16.8 million of a right bf16 attention missed it by 5 %). They
must still be within PyTorch's own accuracy."""

LOST_FRACTION, LOST_ELEMENTS = 1e-3, 3
"""How many elements a right kernel may lose where PyTorch loses none: cancellation leaves a few next to zero."""

CHUNK_ELEMENTS = 1 << 16
"""Elements that are compared at a time: half a megabyte in fp64."""

ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""One unit in the last place, relative: twice the error of a correct rounding, so that truncation passes too."""

SMALLEST_NORMAL = {"fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-14}
SMALLEST_TOLD_APART = {"fp32": 2.0**-122, "bf16": 2.0**-122, "fp16": 2.0**-20}
"""Below this an element may count as zero: 16 smallest normal numbers, or in fp16, whose subnormals matter (a softmax
over thousands of columns), 16 steps of those."""

LARGEST = {"fp32": 3.4028e38, "bf16": 3.3895e38, "fp16": 65504.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """fp64 output of the oracle, and the absolute error of PyTorch's own op in the tested dtype (fp64, same shape)."""

    value: Tensor
    native_error: Tensor


def native_error(native: Tensor, truth: Tensor) -> Tensor:
    """Absolute error of PyTorch's own result; 0 where it is not finite, as that is no yardstick."""
    error = (native.to(torch.float64) - truth).abs()
    return torch.where(error.isfinite(), error, torch.zeros_like(error))


def mismatch(actual: Tensor, truth: Truth, dtype: str, tolerance: Tolerance) -> str | None:
    """None when `actual` is right, else one line that says where and by how much it is wrong.

    `actual` and `truth.value` have the same shape; `actual` is in `dtype`, the truth in fp64.
    """
    if actual.numel() == 0:
        return None
    if actual.numel() > CHUNK_ELEMENTS and not actual.is_cuda and _plainly_right(actual, truth, dtype, tolerance):
        return None
    got, want = _rows(actual.to(torch.float64)), _rows(truth.value)
    if reason := _non_finite_mismatch(got, want, dtype):
        return reason
    finite = want.isfinite() & (want.abs() <= LARGEST[dtype])
    zero = torch.zeros_like(want)
    size = torch.where(finite, want.abs(), zero)
    error = torch.where(finite & got.isfinite(), (got - want).abs(), zero)
    native = _rows(truth.native_error)
    rms = size.square().mean().sqrt()
    tiny = SMALLEST_NORMAL[dtype]
    promised = tolerance.atol * rms + tolerance.rtol * size + tiny
    row_native = native.amax(dim=-1, keepdim=True)
    row_size = size.amax(dim=-1, keepdim=True)
    usual = NATIVE_FACTOR * row_native + ROUNDING[dtype] * size + FP32_REORDER * row_size + tiny
    if (error > promised).any() and not _is_tail(error / promised):
        return _worst(error / promised, got, want, "the promised tolerance", actual.shape)
    if (error > usual).any():
        return _worst(error / usual, got, want, "PyTorch's own accuracy", actual.shape)
    smallest = SMALLEST_TOLD_APART[dtype]
    lost = int(((error > 0.5 * size) & (size > smallest)).sum())
    native_lost = int(((native > 0.5 * size) & (size > smallest)).sum())
    if lost > 2 * native_lost + LOST_FRACTION * want.numel() + LOST_ELEMENTS:
        return f"{lost} of {want.numel()} elements are off by more than half their value (PyTorch: {native_lost})"
    return None


def _plainly_right(actual: Tensor, truth: Truth, dtype: str, tolerance: Tolerance) -> bool:
    """Whether every element is finite and within both limits, looked at in pieces that stay in a CPU's caches.

    Large outputs are nearly always so, and this takes a third of the time; whatever else they are, `mismatch` tells.
    """
    rows, want_rows, native_rows = _rows(actual), _rows(truth.value), _rows(truth.native_error)
    tiny, step, lost = SMALLEST_NORMAL[dtype], max(1, CHUNK_ELEMENTS // rows.shape[1]), 0
    base = tolerance.atol * float(torch.linalg.vector_norm(want_rows)) / want_rows.numel() ** 0.5 + tiny
    for at in range(0, rows.shape[0], step):
        got, want = rows[at : at + step].to(torch.float64), want_rows[at : at + step]
        size, error = want.abs(), (got - want).abs_()
        row_size, row_native = (part.amax(dim=-1, keepdim=True) for part in (size, native_rows[at : at + step]))
        usual = size * ROUNDING[dtype] + (NATIVE_FACTOR * row_native + FP32_REORDER * row_size + tiny)
        within = error <= torch.minimum(size * tolerance.rtol + base, usual)
        if not (bool(within.all()) and float(row_size.max()) <= LARGEST[dtype] * (1 - ROUNDING[dtype])):
            return False
        lost += int(((error > 0.5 * size) & (size > SMALLEST_TOLD_APART[dtype])).sum())
    return lost <= LOST_ELEMENTS


def _is_tail(excess: Tensor) -> bool:
    """Whether the elements outside the promise are what the tail of a right kernel's rounding errors leaves there."""
    outside = int((excess > 1).sum())
    return outside <= TAIL_SHARE * excess.numel() and bool((excess <= TAIL_FACTOR).all())


def _rows(tensor: Tensor) -> Tensor:
    """[rows, cols] view with the last dimension as columns; a vector or scalar is one row."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _non_finite_mismatch(got: Tensor, want: Tensor, dtype: str) -> str | None:
    if (nan := got.isnan() != want.isnan()).any():
        at = int(nan.reshape(-1).nonzero()[0])
        return f"NaN where it should not be, or missing: element {at} is {_at(got, at)}, should be {_at(want, at)}"
    # A truth beyond the dtype's range must become infinite; within one rounding of the limit either answer is right.
    limit = LARGEST[dtype]
    overflow = want.abs() > limit * (1 + ROUNDING[dtype])
    certain = want.isinf() | overflow | (want.abs() <= limit * (1 - ROUNDING[dtype]))
    expected = (want.isinf() | overflow) * want.sign()
    wrong = certain & ((got.isinf() * got.sign()) != expected) & ~want.isnan()
    if wrong.any():
        at = int(wrong.reshape(-1).nonzero()[0])
        return f"infinity where it should not be, or missing: element {at} is {_at(got, at)}, should be {_at(want, at)}"
    return None


def _worst(excess: Tensor, got: Tensor, want: Tensor, name: str, shape: torch.Size) -> str:
    at = int(excess.argmax())
    index = _index(at, shape)
    count = int((excess > 1).sum())
    return (
        f"outside {name}: {count} of {excess.numel()} elements; worst at {index}: got {_at(got, at)}, "
        f"should be {_at(want, at)} ({float(excess.max()):.3g} x the limit)"
    )


def _index(at: int, shape: torch.Size) -> list[int]:
    """Indices of element number `at`; torch.unravel_index would load sympy into the judge: 23 MB, and a second."""
    index = []
    for size in reversed(shape):
        at, here = divmod(at, size)
        index.append(here)
    return index[::-1]


def _at(tensor: Tensor, index: int) -> str:
    return f"{float(tensor.reshape(-1)[index]):.6g}"
