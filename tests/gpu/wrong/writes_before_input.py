"""Out of bounds: writes one element before its input."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


@triton.jit
def leave_a_mark(x):
    tl.store(x - 1, 0.0)


def kernel_fn(x, weight, eps=1e-6):
    out = right(x, weight, eps)
    leave_a_mark[(1,)](x)
    return out
