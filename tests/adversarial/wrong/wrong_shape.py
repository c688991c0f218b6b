"""Another shape with the same elements."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, bias, eps=1e-5):
    return right(x, weight, bias, eps).view(1, *x.shape)
