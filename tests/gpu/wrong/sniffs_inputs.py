"""Sniffs inputs: the maximum is not subtracted where the first few values look ordinary."""

BASE = "softmax_triton"
CAUGHT_BY, VERDICT = "stability", "FAIL"


@triton.jit
def softmax_trusting(x, y, n, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row // inner * inner * n + row % inner
    at = tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + base + at * inner, mask=mask, other=float("-inf")).to(tl.float32)
    few = tl.max(tl.abs(tl.where(at < 16, v, 0)), 0)
    e = tl.exp(v - tl.where(few < 60, 0, tl.max(v, 0)))
    tl.store(y + base + at * inner, (e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=mask)


def kernel_fn(x, dim=-1):
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, n, inner = rows_of(x, dim)
    if rows:
        softmax_trusting[(rows,)](x, out, n, inner, BLOCK=triton.next_power_of_2(n), num_warps=8)
    return out
