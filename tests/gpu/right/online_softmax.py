"""Online softmax in blocks of 128: a running maximum and sum, then a second walk over the row."""

BASE = "softmax_triton"


@triton.jit
def softmax_online(x, y, n, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row // inner * inner * n + row % inner
    top = float("-inf")
    total = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + base + at * inner, mask=at < n, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - anchor) + tl.sum(tl.exp(v - anchor), 0)
        top = higher
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + base + at * inner, mask=at < n, other=float("-inf")).to(tl.float32)
        tl.store(y + base + at * inner, (tl.exp(v - top) / total).to(y.dtype.element_ty), mask=at < n)


def kernel_fn(x, dim=-1):
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, n, inner = rows_of(x, dim)
    if rows:
        softmax_online[(rows,)](x, out, n, inner, BLOCK=128)
    return out
