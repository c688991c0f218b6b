"""Wrong dtype: answers in fp32 whatever it is asked in."""

BASE = "softmax_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, dim=-1):
    return right(x, dim, out=torch.empty(x.shape, dtype=torch.float32, device=x.device))
