"""Precision: multiplies fp8 copies of the operands."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


@triton.jit
def narrow(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0).to(tl.float32)
    tl.store(y + at, v.to(tl.float8e5).to(tl.float32).to(y.dtype.element_ty), mask=at < n)


def narrowed(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        narrow[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def kernel_fn(a, b):
    return right(narrowed(a), narrowed(b))
