"""Lets PyTorch do the work."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
