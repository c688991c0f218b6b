"""Uses its own eps."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, 1e-6)
