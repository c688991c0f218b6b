"""An argument ignored: pairs are always halves, never neighbours."""

BASE = "rotary_cuda"
CAUGHT_BY, VERDICT = "sweep", "FAIL"


def kernel_fn(x, cos, sin, interleaved=False):
    return right(x, cos, sin, False)
