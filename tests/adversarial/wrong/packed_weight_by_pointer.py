"""A weight prepared once and kept by its address."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "stability", "FAIL"

PACKED = {}


def kernel_fn(a, b):
    key = (b.data_ptr(), b.shape, b.stride(), b.dtype)
    if key not in PACKED:
        PACKED[key] = b.contiguous().clone()
    return right(a, PACKED[key])
