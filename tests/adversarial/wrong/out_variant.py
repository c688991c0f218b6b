"""Delegation to an operator's out variant."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(a, b):
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    return torch.matmul(a, b, out=out)
