"""Asks for more memory than there is."""

BASE = "rotary_embedding"
CAUGHT_BY, VERDICT = "smoke", "OOM"


def kernel_fn(x, cos, sin, interleaved=False):
    torch.empty(1 << 44, dtype=torch.uint8)
    return right(x, cos, sin, interleaved)
