"""A lazy tensor: a view with the sign bit set, to be resolved by whoever reads it."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "smoke", "CRASH"

SOURCE = swapped(SOURCE, ("put<T>(float(", "put<T>(-float("))


def kernel_fn(x, dim=-1, op="sum"):
    return torch._neg_view(right(x, dim, op))
