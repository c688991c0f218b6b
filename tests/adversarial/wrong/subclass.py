"""A subclass of a tensor: a parameter."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return torch.nn.Parameter(right(x, weight, eps))
