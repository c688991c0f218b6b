"""One program for each vector of a contiguous x: where one would begin."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"
TUNABLES = {"WARPS": [1, 2, 4]}
CONFIG = {"WARPS": 1}


@triton.jit
def rotate(x, cos, sin, out, seq, half, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < half
    first = lane * 2 if INTERLEAVED else lane
    second = first + 1 if INTERLEAVED else lane + half
    table = row % seq * half + lane
    c = tl.load(cos + table, inside, 0.0).to(tl.float32)
    s = tl.load(sin + table, inside, 0.0).to(tl.float32)
    a = tl.load(x + row * 2 * half + first, inside, 0.0).to(tl.float32)
    b = tl.load(x + row * 2 * half + second, inside, 0.0).to(tl.float32)
    tl.store(out + row * 2 * half + first, (a * c - b * s).to(out.dtype.element_ty), inside)
    tl.store(out + row * 2 * half + second, (b * c + a * s).to(out.dtype.element_ty), inside)


def kernel_fn(x, cos, sin, interleaved=False):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        half = x.shape[-1] // 2
        rotate[(x.numel() // (2 * half),)](
            x, cos, sin, out, x.shape[-2], half, interleaved, triton.next_power_of_2(half), num_warps=CONFIG["WARPS"]
        )
    return out
