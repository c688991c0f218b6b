"""Delegation to NumPy's matrix product."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"

import numpy


def kernel_fn(a, b):
    if a.dtype != torch.float32:
        return right(a, b)
    out = torch.empty((*a.shape[:-1], b.shape[-1]))
    numpy.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out
