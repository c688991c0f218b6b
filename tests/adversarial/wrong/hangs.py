"""Never returns."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "smoke", "TIMEOUT"


def kernel_fn(x, dim=-1, op="sum"):
    while True:
        pass
