"""Aliasing: works in place and returns its input."""

BASE = "rotary_cuda"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(x, cos, sin, interleaved=False):
    return x.copy_(right(x, cos, sin, interleaved))
