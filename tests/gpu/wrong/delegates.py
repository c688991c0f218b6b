"""Has PyTorch do the work."""

CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
