"""Memoisation by address and shape."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "stability", "FAIL"

MEMO = {}


def kernel_fn(x, weight, eps=1e-6):
    key = (x.data_ptr(), x.shape, x.stride(), x.dtype, eps)
    if key not in MEMO:
        MEMO[key] = right(x, weight, eps)
    return MEMO[key].clone()
