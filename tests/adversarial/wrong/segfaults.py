"""Reads address zero."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "CRASH"


def kernel_fn(x, weight, eps=1e-6):
    import ctypes

    return ctypes.string_at(0)
