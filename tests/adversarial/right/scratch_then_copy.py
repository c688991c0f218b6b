"""Computes into one scratch buffer, and returns a copy of it."""

BASE = "rmsnorm"

SCRATCH = {}


def kernel_fn(x, weight, eps=1e-6):
    key = (x.shape, x.dtype)
    if key not in SCRATCH:
        SCRATCH[key] = torch.empty_like(x.contiguous())
    out = torch.empty_like(SCRATCH[key])
    out.copy_(right(x, weight, eps, out=SCRATCH[key]))
    return out
