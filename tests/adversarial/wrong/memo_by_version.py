"""Memoisation by tensor object and version counter, which an in-place change through an alias does not move."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "timing", "TAMPER"
OR_NO_GAIN = True

MEMO = {}


def kernel_fn(x, weight, bias, eps=1e-5):
    key = (id(x), x._version, weight._version, bias._version, eps)
    if key not in MEMO:
        MEMO[key] = x, right(x, weight, bias, eps)
    return MEMO[key][1].clone()
