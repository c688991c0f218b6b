"""An alias of the input, where a reduction over one element is the identity."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "edges", "FAIL"


def kernel_fn(x, dim=-1, op="sum"):
    return x.squeeze(dim) if isinstance(dim, int) and x.shape[dim] == 1 else right(x, dim, op)
