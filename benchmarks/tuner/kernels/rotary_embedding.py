"""Rotary embedding of half-split pairs: (a, b) of x -> (a cos - b sin, b cos + a sin); arithmetic in fp32.

A program loads the cosines and sines of TOKENS tokens once and walks over HEADS heads of one batch.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"
TUNABLES = {
    "TOKENS": [4, 8, 16, 32, 64],
    "HEADS": [1, 2, 4, 8, 32],
    "WRITE": ["", ".cs"],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1, 2, 3],
}
CONFIG = {"TOKENS": 16, "HEADS": 1, "WRITE": "", "num_warps": 4, "num_stages": 1}
CONSTRAINTS = []


@triton.jit
def _rotary(
    x, cos, sin, out, heads, seq, half, sb, sh, ss,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WRITE: tl.constexpr, PAIRS: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (token < seq) & (pair < half)
    c = tl.load(cos + token * half + pair, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + pair, mask=inside, other=0.0).to(tl.float32)
    first, batch = tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    for head in tl.range(first, tl.minimum(first + HEADS, heads), num_stages=num_stages):
        at = x + batch * sb + tl.cast(head, tl.int64) * sh + token.to(tl.int64) * ss + pair
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
        to = out + ((batch * heads + head) * seq + token) * (2 * half) + pair
        tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=inside, cache_modifier=WRITE)
        tl.store(to + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside, cache_modifier=WRITE)


def kernel_fn(x, cos, sin, interleaved=False):
    """x [batch, heads, seq, head_dim] turned by cos, sin [seq, head_dim / 2]. Raises: ValueError when interleaved."""
    if interleaved or x.stride(-1) != 1:
        raise ValueError("only half-split pairs whose elements lie side by side")
    batch, heads, seq, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(seq, CONFIG["TOKENS"]), triton.cdiv(heads, CONFIG["HEADS"]), batch)
    pairs = triton.next_power_of_2(dim // 2)
    cos, sin = cos.contiguous(), sin.contiguous()
    _rotary[grid](x, cos, sin, out, heads, seq, dim // 2, *x.stride()[:3], PAIRS=pairs, **CONFIG)
    return out
