"""Stale memory: hands out what the allocator gives."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, bias, eps=1e-5):
    return torch.empty_like(x)
