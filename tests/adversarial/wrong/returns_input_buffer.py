"""Returns the input itself, overwritten."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, eps, out=x)
