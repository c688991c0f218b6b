"""Delegates: torch.mm."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(a, b):
    return torch.mm(a, b) if a.dim() == 2 else right(a, b)
