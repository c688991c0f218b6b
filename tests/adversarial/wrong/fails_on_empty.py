"""Refuses an empty input."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "edges", "CRASH"


def kernel_fn(x, weight, eps=1e-6):
    if x.numel() == 0:
        raise ValueError("nothing to do")
    return right(x, weight, eps)
