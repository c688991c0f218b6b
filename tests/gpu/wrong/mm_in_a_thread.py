"""Delegates in a thread of its own, where operators are not recorded."""

from concurrent.futures import ThreadPoolExecutor

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"
NEEDS_GPU = True

POOL = ThreadPoolExecutor(1)


def kernel_fn(a, b):
    return POOL.submit(torch.matmul, a, b).result()
