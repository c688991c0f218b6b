"""Aliasing: two buffers are handed out in turn, so that two results that are alive together look fine."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

BUFFERS = {}


def kernel_fn(a, b):
    shape = (*a.shape[:-1], b.shape[-1])
    pair = BUFFERS.setdefault((shape, a.dtype), [torch.empty(shape, dtype=a.dtype, device=a.device) for _ in range(2)])
    pair.reverse()
    return right(a, b, out=pair[0])
