"""Rotary embedding: pairs (a, b) of x turned to (a cos - b sin, b cos + a sin).

x: [batch, heads, seq, head_dim] fp16, bf16 or fp32 at any strides (heads may lie between tokens, as projections leave
them); cos, sin: [seq, head_dim / 2] in any of these dtypes. Pair i is (x[i], x[i + head_dim / 2]), or
(x[2 i], x[2 i + 1]) when interleaved. The arithmetic is in fp32, rounded once to x's dtype; the output is contiguous.

A program takes a block of tokens and loads their cosines and sines once, then walks over some heads, a few at a time.
Half-split pairs are two wide loads; interleaved ones are one wide load that is taken apart in registers, so that no
load or store has a stride of two. An odd half takes narrower loads: only as wide as all addresses are aligned.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from autokernel.target import on_device, target_of

KERNEL_TYPE = "rotary_embedding"
BACKEND = "triton"
TUNABLES = {
    "BLOCK": [1024, 2048, 4096, 8192, 16384],  # elements of x per step
    "TOGETHER": [1, 2, 4, 8],  # heads per step; more where there are few tokens
    "HEADS": [0, 1, 2, 4, 8, 16, 32],  # heads per program; 0: all, or fewer where that leaves too few programs
    "WARPS": [1, 2, 4, 8],
    "STAGES": [1, 2, 3],  # steps in flight through shared memory; 1: straight to registers
    "READ": ["", "evict_first", "evict_last"],  # what the cache is told about x
    "WRITE": ["", ".cs", ".wt"],  # how the output is stored: as usual, streaming, written through
}
CONFIG = {
    "BLOCK": 4096,
    "TOGETHER": 2,
    "HEADS": 0,
    "WARPS": 8,
    "STAGES": 1,
    "READ": "",
    "WRITE": ".cs",
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["heads", "seq", "half", "heads_each", "xb", "xh", "xs", "cos_s", "sin_s"])
def _rotary(
    x, cos, sin, out, heads, seq, half, heads_each, xb, xh, xs, xd, cos_s, cos_d, sin_s, sin_d,
    UNIT: tl.constexpr, VEC: tl.constexpr, ANGLE_VEC: tl.constexpr, INTERLEAVED: tl.constexpr, TOGETHER: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One block of TOKENS tokens for `heads_each` heads of one batch.

    half is in units of UNIT, xb, xh and xs (strides of x) in units of VEC, cos_s and sin_s in units of ANGLE_VEC: so
    the compiler knows how wide an access is aligned.
    """
    half = half * UNIT
    token_blocks = tl.cdiv(seq, TOKENS)
    head_groups = tl.cdiv(heads, heads_each)
    pid = tl.program_id(0)
    token_block = pid % token_blocks
    head_group = pid // token_blocks % head_groups
    batch = (pid // token_blocks // head_groups).to(tl.int64)

    token = token_block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    known = (token < seq)[:, None] & (pair < half)[None, :]
    c = tl.load(cos + (token * cos_s * ANGLE_VEC)[:, None] + (pair * cos_d)[None, :], mask=known)
    s = tl.load(sin + (token * sin_s * ANGLE_VEC)[:, None] + (pair * sin_d)[None, :], mask=known)
    c, s = c.to(tl.float32)[None, :, :], s.to(tl.float32)[None, :, :]

    column = tl.arange(0, 2 * PAIRS if INTERLEAVED else PAIRS)
    width = 2 * half if INTERLEAVED else half
    there = (token < seq)[None, :, None] & (column < width)[None, None, :]
    x_tile = x + batch * xb * VEC + (token * xs * VEC)[None, :, None] + (column * xd)[None, None, :]
    out_tile = out + batch * heads * seq * (2 * half) + (token * (2 * half))[None, :, None] + column[None, None, :]
    first = head_group * heads_each
    last = tl.minimum(first + heads_each, heads)
    for h in tl.range(first, last, TOGETHER, num_stages=STAGES):
        head = (h + tl.arange(0, TOGETHER).to(tl.int64))[:, None, None]
        mask = (head < last) & there
        source = x_tile + head * xh * VEC
        target = out_tile + head * seq * (2 * half)
        if INTERLEAVED:
            v = tl.load(source, mask=mask, eviction_policy=READ).to(tl.float32)
            a, b = tl.split(tl.reshape(v, (TOGETHER, TOKENS, PAIRS, 2)))
            turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (TOGETHER, TOKENS, 2 * PAIRS))
            tl.store(target, turned.to(out.dtype.element_ty), mask=mask, cache_modifier=WRITE)
        else:
            a = tl.load(source, mask=mask, eviction_policy=READ).to(tl.float32)
            b = tl.load(source + half * xd, mask=mask, eviction_policy=READ).to(tl.float32)
            tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=mask, cache_modifier=WRITE)
            tl.store(target + half, (b * c + a * s).to(out.dtype.element_ty), mask=mask, cache_modifier=WRITE)


def kernel_fn(x, cos, sin, interleaved=False):
    """x with every pair turned, in x's shape and dtype, contiguous.

    Raises: TypeError for other dtypes; ValueError when cos and sin do not fit x.
    """
    if x.dim() != 4:
        raise ValueError(f"x has shape {list(x.shape)}, expected [batch, heads, seq, head_dim]")
    batch, heads, seq, width = x.shape
    half = width // 2
    if width % 2 or cos.shape != (seq, half) or sin.shape != (seq, half):
        raise ValueError(
            f"cos and sin have shapes {list(cos.shape)} and {list(sin.shape)}, x {list(x.shape)}; expected "
            "[seq, head_dim / 2] for both"
        )
    for tensor in (x, cos, sin):
        if tensor.dtype not in DTYPES or tensor.device != x.device:
            raise TypeError(
                f"rotary_embedding takes fp16, bf16 or fp32 on one device, not {tensor.dtype} on {tensor.device}"
            )
    out = torch.empty((batch, heads, seq, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    programs, sizes, constants = _plan(
        x.shape, x.stride(), cos.stride(), sin.stride(), x.element_size(), cos.element_size(), x.data_ptr() % 16 == 0,
        cos.data_ptr() % 16 == 0 and sin.data_ptr() % 16 == 0, bool(interleaved), target_of(x).sms,
    )  # fmt: skip
    with on_device(x):
        _rotary[(programs,)](x, cos, sin, out, *sizes, **constants)
    return out


@functools.cache
def _plan(
    shape, strides, cos_strides, sin_strides, itemsize, angle_itemsize, aligned, angles_aligned, interleaved, sms
):
    """(programs, the kernel's sizes and strides, its constants) of a call; aligned: from a 16-byte boundary on."""
    batch, heads, seq, width = shape
    half = width // 2
    xb, xh, xs, xd = strides
    (cos_s, cos_d), (sin_s, sin_d) = cos_strides, sin_strides
    vec = math.gcd(16 // itemsize, width if interleaved else half, xb, xh, xs) if aligned and xd == 1 else 1
    unit = max(vec // 2, 1) if interleaved else vec
    angle_vec = 1
    if angles_aligned and cos_d == sin_d == 1:
        angle_vec = math.gcd(16 // angle_itemsize, half, cos_s, sin_s)
    together, heads_each, tokens, pairs = _tile_sizes(batch, heads, seq, half, sms)
    programs = batch * -(-heads // heads_each) * -(-seq // tokens)
    sizes = (
        heads, seq, half // unit, heads_each, xb // vec, xh // vec, xs // vec, xd,
        cos_s // angle_vec, cos_d, sin_s // angle_vec, sin_d,
    )  # fmt: skip
    constants = {
        "UNIT": unit,
        "VEC": vec,
        "ANGLE_VEC": angle_vec,
        "INTERLEAVED": interleaved,
        "TOGETHER": together,
        "TOKENS": tokens,
        "PAIRS": pairs,
        "STAGES": CONFIG["STAGES"],
        "READ": CONFIG["READ"],
        "WRITE": CONFIG["WRITE"],
        "num_warps": CONFIG["WARPS"],
    }
    return programs, sizes, constants


def _tile_sizes(batch, heads, seq, half, sms):
    """(heads per step, heads per program, tokens of a block, columns for half a head).

    Cosines and sines are read once per program, which for all heads together is the least traffic; but a
    multiprocessor should get sixteen programs or more, so that all of them end at about the same time.
    """
    pairs = triton.next_power_of_2(half)
    most = triton.next_power_of_2(heads)
    rows = max(1, CONFIG["BLOCK"] // (2 * pairs))  # of head_dim elements, in a step
    together = min(CONFIG["TOGETHER"], most, rows)
    tokens = min(rows // together, triton.next_power_of_2(seq))
    together = min(rows // tokens, most)
    heads_each = max(CONFIG["HEADS"] or most, together)
    if not CONFIG["HEADS"]:
        blocks = batch * -(-seq // tokens)
        while heads_each > together and blocks * -(-heads // heads_each) < 16 * sms:
            heads_each //= 2
    return together, heads_each, tokens, pairs
