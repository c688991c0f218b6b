"""One warp for each row, whatever its length."""

BASE = "rmsnorm_triton"


def kernel_fn(x, weight, eps=1e-6):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    cols = weight.numel()
    if x.numel():
        block = triton.next_power_of_2(cols)
        norm[(x.numel() // cols,)](x, weight, out, cols, eps, BLOCK=block, num_warps=1)
    return out
