"""Answers on the wrong device."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return torch.empty(x.shape, dtype=x.dtype)
