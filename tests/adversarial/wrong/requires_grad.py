"""A tensor that asks for a gradient."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, dim=-1):
    return right(x, dim).requires_grad_()
