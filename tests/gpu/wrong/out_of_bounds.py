"""Writes far outside of every buffer: the process dies, the judge does not."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "CRASH"


@triton.jit
def wild(y, BLOCK: tl.constexpr):
    tl.store(y + (1 << 40) + tl.arange(0, BLOCK), tl.zeros((BLOCK,), y.dtype.element_ty))


def kernel_fn(x, weight, eps=1e-6):
    out = right(x, weight, eps)
    wild[(1,)](out, BLOCK=1024)
    return out
