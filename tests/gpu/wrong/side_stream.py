"""Side stream, not joined: the work may run after the event that ends the timing."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "timing", "TAMPER"
SHAPES = {"x": (8192, 2048), "weight": (2048,)}
NEEDS_GPU = True

SIDE = torch.cuda.Stream()


def kernel_fn(x, weight, eps=1e-6):
    SIDE.wait_stream(torch.cuda.current_stream())
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.cuda.stream(SIDE):
        right(x, weight, eps, out=out)
    return out
