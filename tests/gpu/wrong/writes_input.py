"""Normalizes in place."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    right(x, weight, eps, out=x)
    return x.clone()
