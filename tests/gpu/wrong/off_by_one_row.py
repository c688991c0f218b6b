"""Off by one: the last row is left out of the grid."""

BASE = "softmax_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, dim=-1):
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, n, inner = rows_of(x, dim)
    if rows > 1:
        softmax_row[(rows - 1,)](x, out, n, inner, BLOCK=triton.next_power_of_2(n))
    return out
