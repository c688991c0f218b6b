"""Another layout: the result is stored by columns."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(a, b):
    return right(a, b).transpose(-1, -2).contiguous().transpose(-1, -2)
