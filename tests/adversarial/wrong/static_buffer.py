"""Hands out one buffer for all calls of a shape, so that two results alive together are one."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "determinism", "FAIL"


BUFFERS = {}


def kernel_fn(x, weight, eps=1e-6):
    key = (x.shape, x.dtype)
    if key not in BUFFERS:
        BUFFERS[key] = torch.empty_like(x.contiguous())
    return right(x, weight, eps, out=BUFFERS[key])
