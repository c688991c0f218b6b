"""Memoisation by the whole content: right, and never of use where no input comes twice."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "screening", "SCREENED"
HARDENING = True

import ctypes
import hashlib

MEMO = {}


def content(x):
    x = x.contiguous()
    return hashlib.sha256(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())).digest() if x.numel() else b""


def kernel_fn(x, weight, eps=1e-6):
    key = (x.shape, x.dtype, eps, content(x), content(weight))
    if key not in MEMO:
        MEMO[key] = right(x, weight, eps)
    return MEMO[key].clone()
