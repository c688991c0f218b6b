"""Slows the clock down once it is timed."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "timing", "TAMPER"


import time

REAL, START = time.perf_counter_ns, time.perf_counter_ns()
time.perf_counter_ns = lambda: START + (REAL() - START) // 100


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, eps)
