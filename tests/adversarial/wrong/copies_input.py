"""Copy of an input: turns nothing."""

BASE = "rotary_embedding"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, cos, sin, interleaved=False):
    return x.clone()
