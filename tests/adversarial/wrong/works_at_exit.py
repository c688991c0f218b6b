"""Work past the clock: put off to the end of the process, for all calls."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

import atexit


def kernel_fn(x, weight, eps=1e-6):
    out = torch.empty_like(x)
    atexit.register(right, x, weight, eps, out)
    return out
