"""One program a row, which goes over it twice in steps of 1024: where one would begin."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"
TUNABLES = {"BLOCK": [256, 512, 1024, 2048], "WARPS": [1, 2, 4, 8]}
CONFIG = {"BLOCK": 1024, "WARPS": 4}


@triton.jit
def norm(x, weight, out, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        inside = start + lane < cols
        value = tl.load(x + row * cols + start + lane, inside, 0.0).to(tl.float32)
        total += value * value
    scale = 1.0 / tl.sqrt_rn(tl.sum(total, 0) / cols + eps)
    for start in range(0, cols, BLOCK):
        inside = start + lane < cols
        value = tl.load(x + row * cols + start + lane, inside, 0.0).to(tl.float32) * scale
        if weight is not None:
            value *= tl.load(weight + start + lane, inside, 0.0).to(tl.float32)
        tl.store(out + row * cols + start + lane, value.to(out.dtype.element_ty), inside)


def kernel_fn(x, weight, eps=1e-6):
    x = x.contiguous()
    cols = x.shape[-1] if weight is None else weight.numel()
    out = torch.empty_like(x)
    if x.numel():
        weight = None if weight is None else weight.contiguous()
        norm[(x.numel() // cols,)](x, weight, out, cols, float(eps), CONFIG["BLOCK"], num_warps=CONFIG["WARPS"])
    return out
