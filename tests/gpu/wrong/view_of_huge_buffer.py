"""Keeps memory: the result is the beginning of a buffer of 64 MiB."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, weight, eps=1e-6):
    buffer = torch.empty(1 << 25, dtype=x.dtype, device=x.device)
    return right(x, weight, eps, out=buffer[: x.numel()].view(x.shape))
