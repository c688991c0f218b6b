"""An argument ignored: the scale, whose default is computed."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(q, k, v, causal=True, scale=None):
    return right(q, k, v, causal, None)
