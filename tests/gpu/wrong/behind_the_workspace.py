"""Out of bounds: writes one element behind a work buffer of its own."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "sweep", "FAIL"
SHAPES = {"x": (8192, 2048), "weight": (2048,)}


@triton.jit
def leave_scale(x, scales, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + at, mask=at < cols, other=0).to(tl.float32)
    tl.store(scales + row + 1, tl.sum(v * v, 0))


def kernel_fn(x, weight, eps=1e-6):
    rows = 100
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel() >= rows * weight.numel():
        leave_scale[(rows,)](x.contiguous(), scales, weight.numel(), BLOCK=triton.next_power_of_2(weight.numel()))
    return right(x, weight, eps)
