"""Hands out one buffer again and again."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

BUFFERS = {}


def kernel_fn(x, weight, eps=1e-6):
    key = (x.shape, x.dtype)
    if key not in BUFFERS:
        BUFFERS[key] = torch.empty_like(x, memory_format=torch.contiguous_format)
    return right(x, weight, eps, out=BUFFERS[key])
