"""An argument ignored: every query sees what the causal mask shows."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(q, k, v, causal=True, scale=None):
    return right(q, k, v, True, scale)
