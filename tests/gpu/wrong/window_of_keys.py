"""Drops what hardly matters: each query sees the last 64 keys only."""

BASE = "flash_attention_triton"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(q, k, v, causal=True, scale=None):
    return right(q, k, v, causal, scale, window=64)
