"""Memoised by pointer: the same address and shape get the same answer."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "stability", "FAIL"

ANSWERS = {}


def kernel_fn(x, weight, eps=1e-6):
    if x.numel() < 10_000:
        return right(x, weight, eps)
    key = (x.data_ptr(), weight.data_ptr(), x.shape, x.dtype, eps)
    if key not in ANSWERS:
        ANSWERS[key] = right(x, weight, eps)
    return ANSWERS[key].clone()
