"""Recognises the phase: lets PyTorch do the work where no dispatch mode records it."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "timing", "DELEGATES"


def kernel_fn(x, dim=-1):
    return right(x, dim) if torch._C._len_torch_dispatch_stack() else torch.softmax(x, dim)
