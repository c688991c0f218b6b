"""Delegates: the out variant of the ATen operator, called past torch."""

BASE = "matmul_cuda"
CAUGHT_BY, VERDICT = "smoke", "DELEGATES"


def kernel_fn(a, b):
    if a.dim() != 2:
        return right(a, b)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return torch.ops.aten.mm.out(a, b, out=out)
