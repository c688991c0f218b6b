"""Memoisation by a hash of the whole content: right, and of no use where no input comes twice."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "screening", "SCREENED"

import ctypes

MEMO = {}


def content(x):
    x = x.contiguous()
    return hash(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())) if x.numel() else 0


def kernel_fn(x, weight, eps=1e-6):
    key = (x.shape, x.dtype, eps, content(x), content(weight))
    if key not in MEMO:
        MEMO[key] = right(x, weight, eps)
    return MEMO[key].clone()
