"""Delegates only while operators are not recorded, which is when it is timed."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "timing", "DELEGATES"


def kernel_fn(a, b):
    return right(a, b) if torch._C._len_torch_dispatch_stack() else torch.matmul(a, b)
