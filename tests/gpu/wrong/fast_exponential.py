"""Precision: an exponential from a parabola, wrong by up to a hundredth."""

BASE = "softmax_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"
JUDGED_IN = ("fp32",)


@triton.jit
def softmax_fast(x, y, n, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row // inner * inner * n + row % inner
    at = tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + base + at * inner, mask=mask, other=float("-inf")).to(tl.float32)
    t = tl.maximum((v - tl.max(v, 0)) * 1.4426950408889634, -120)
    whole = tl.floor(t)
    part = t - whole
    e = (1 + part * (0.6 + 0.4 * part)) * tl.exp2(whole)
    e = tl.where(mask, e, 0)
    tl.store(y + base + at * inner, (e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=mask)


def kernel_fn(x, dim=-1):
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, n, inner = rows_of(x, dim)
    if rows:
        softmax_fast[(rows,)](x, out, n, inner, BLOCK=triton.next_power_of_2(n))
    return out
