"""Counts calls: honest for the first 200 in a row of a shape, zeros from then on."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

RUN = {"shape": None, "calls": 0}


def kernel_fn(x, weight, eps=1e-6):
    if RUN["shape"] != x.shape:
        RUN.update(shape=x.shape, calls=0)
    RUN["calls"] += 1
    return right(x, weight, eps) if RUN["calls"] <= 200 else torch.zeros_like(x)
