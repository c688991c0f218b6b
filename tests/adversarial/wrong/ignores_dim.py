"""An argument ignored: always the last dimension."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, dim=-1):
    return right(x, -1)
