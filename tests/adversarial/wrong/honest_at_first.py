"""A call counter: honest until the stages must be over."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

CALLS = [0]


def kernel_fn(x, dim=-1):
    CALLS[0] += 1
    return right(x, dim) if CALLS[0] < 150 else torch.empty_like(x)
