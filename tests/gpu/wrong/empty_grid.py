"""Edge: launches a grid of no blocks for an empty input, which is an error."""

BASE = "rotary_cuda"
CAUGHT_BY, VERDICT = "edges", "CRASH"


def kernel_fn(x, cos, sin, interleaved=False):
    if x.numel():
        return right(x, cos, sin, interleaved)
    out = torch.empty_like(x)
    library(SOURCE).rotary(x, cos, sin, out, 0, 1, 1, 0, DTYPES[x.dtype])
    return out
