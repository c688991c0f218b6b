"""A skip: raises MemoryError for what it would rather not do."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "OOM"


def kernel_fn(q, k, v, causal=True, scale=None):
    if not causal:
        raise MemoryError("too large")
    return right(q, k, v, causal, scale)
