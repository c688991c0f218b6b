"""A plain, right RMSNorm in Triton: one program for each row. Fragments are appended to it."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


@triton.jit
def norm(x, w, y, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < cols
    v = tl.load(x + row * cols + at, mask=mask, other=0).to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(v * v, 0) / cols + eps)
    weight = tl.load(w + at, mask=mask, other=0).to(tl.float32)
    tl.store(y + row * cols + at, (v * scale * weight).to(y.dtype.element_ty), mask=mask)


def right(x, weight, eps=1e-6, out=None):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x) if out is None else out
    cols = weight.numel()
    if x.numel():
        norm[(x.numel() // cols,)](x, weight, out, cols, eps, BLOCK=triton.next_power_of_2(cols), num_warps=4)
    return out


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, eps)
