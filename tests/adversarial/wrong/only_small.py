"""Right for few elements, zeros beyond."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, eps) if x.numel() <= 2048 else torch.zeros_like(x)
