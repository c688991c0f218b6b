"""A view of a buffer a thousand times as large."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, eps, out=torch.empty((1000, *x.shape), dtype=x.dtype)[0])
