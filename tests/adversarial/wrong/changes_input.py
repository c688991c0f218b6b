"""Normalizes in place and returns a copy."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    right(x, weight, eps, out=x)
    return x.clone()
