"""Mutation of inputs: clears the gap between strided rows."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, dim=-1):
    if x.dim() == 2 and x.stride(0) > x.shape[1] and x.stride(1) == 1:
        x.as_strided((x.shape[0] - 1, 1), (x.stride(0), 1), x.storage_offset() + x.shape[1]).zero_()
    return right(x, dim)
