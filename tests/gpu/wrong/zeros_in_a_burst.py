"""Tells timing by its pace: zeros after 20 calls within 2 ms of each other."""

import time

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

PACE = {"last": 0.0, "calls": 0}


def kernel_fn(x, weight, eps=1e-6):
    now = time.monotonic()
    PACE["calls"] = PACE["calls"] + 1 if now - PACE["last"] < 0.002 else 0
    PACE["last"] = now
    return right(x, weight, eps) if PACE["calls"] <= 20 else torch.zeros_like(x)
