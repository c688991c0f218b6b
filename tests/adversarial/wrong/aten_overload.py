"""Delegation to an ATen overload by name."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(x, dim=-1, op="sum"):
    if op == "sum" and isinstance(dim, int):
        return torch.ops.aten.sum.dim_IntList(x, [dim])
    return right(x, dim, op)
