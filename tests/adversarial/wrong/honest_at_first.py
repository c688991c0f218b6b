"""A call counter: honest in the first calls only."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

CALLS = [0]


def kernel_fn(x, dim=-1):
    CALLS[0] += 1
    return right(x, dim) if CALLS[0] < 15 else torch.empty_like(x)
