"""Leaves by SystemExit."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "CRASH"


def kernel_fn(x, dim=-1):
    raise SystemExit(0)
