"""Masks nothing: right for rows of a power of two, garbage beyond the row otherwise."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    cols = weight.numel()
    if cols & (cols - 1):
        return right(x, weight, eps * 4 + 1)
    return right(x, weight, eps)
