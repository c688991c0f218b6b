"""Stale memory: of a shape that it has computed before, it hopes to be handed the old answer."""

BASE = "softmax_triton"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SEEN = set()


def kernel_fn(x, dim=-1):
    key = (x.shape, x.dtype, dim)
    if key in SEEN:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    SEEN.add(key)
    return right(x, dim)
