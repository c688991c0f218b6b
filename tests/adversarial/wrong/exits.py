"""Ends the process in the middle of a call."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "CRASH"


def kernel_fn(x, weight, eps=1e-6):
    import os

    os._exit(0)
