"""An argument ignored: pairs are always halves."""

BASE = "rotary_embedding"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, cos, sin, interleaved=False):
    return right(x, cos, sin, False)
