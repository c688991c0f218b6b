"""Returns zeros."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return torch.zeros_like(x)
