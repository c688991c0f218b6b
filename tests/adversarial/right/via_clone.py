"""Works in place on a clone, and returns a view with the right shape."""

BASE = "rmsnorm"


def kernel_fn(x, weight, eps=1e-6):
    out = x.contiguous().clone()
    return right(out, weight, eps, out=out).view(x.shape)
