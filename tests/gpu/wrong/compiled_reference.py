"""Delegates: torch.compile writes the kernel from PyTorch's own operators."""

BASE = "softmax_triton"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"
NEEDS_GPU = True


@torch.compile(dynamic=False)
def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)
