"""Half of the rows on a side stream, which waits for the inputs and is joined before the return."""

BASE = "rmsnorm_triton"
NEEDS_GPU = True

SIDE = torch.cuda.Stream()


def kernel_fn(x, weight, eps=1e-6):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    cols = weight.numel()
    rows = x.view(-1, cols) if x.numel() else x
    if not x.numel() or len(rows) < 2:
        return right(x, weight, eps, out)
    half, current = len(rows) // 2, torch.cuda.current_stream()
    SIDE.wait_stream(current)
    with torch.cuda.stream(SIDE):
        right(rows[half:], weight, eps, out.view(-1, cols)[half:])
    right(rows[:half], weight, eps, out.view(-1, cols)[:half])
    current.wait_stream(SIDE)
    return out
