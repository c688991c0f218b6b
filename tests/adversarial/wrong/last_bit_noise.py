"""Flips the last bit of one element on every other call: within every tolerance, and not twice the same."""

import ctypes

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

CALLS = [0]


def kernel_fn(x, weight, eps=1e-6):
    out = right(x, weight, eps)
    CALLS[0] += 1
    if out.numel() and CALLS[0] % 2:
        ctypes.c_ubyte.from_address(out.data_ptr()).value ^= 1
    return out
