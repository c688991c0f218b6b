"""Causal attention without the score matrix: softmax(q k^T * scale) v; fp16 or bf16, scores and sums in fp32.

A program keeps BLOCK_M query rows of one head and walks over the keys in blocks of BLOCK_N with a running maximum and
sum. With DIAGONAL = 1 the blocks that are wholly seen go through a loop without masks. ORDER says which rows are begun
first: the last ones, which have the most keys, or the first ones.
"""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [32, 64, 128, 256],
    "BLOCK_N": [32, 64, 128],
    "DIAGONAL": [0, 1],
    "ORDER": ["first", "last"],
    "num_warps": [2, 4, 8],
    "num_stages": [1, 2, 3, 4],
}
CONFIG = {"BLOCK_M": 64, "BLOCK_N": 32, "DIAGONAL": 0, "ORDER": "first", "num_warps": 4, "num_stages": 1}
CONSTRAINTS = ["BLOCK_M * BLOCK_N <= 8192 * num_warps", "BLOCK_M <= 64 * num_warps"]
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = math.log2(math.e)


@triton.jit
def _keys(
    acc, total, top, q, k, v, row, first, last, seq, scale, sks, svs,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Show the rows the keys first .. last; `top` is in units of log2."""
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        at = key[:, None].to(tl.int64)
        dims = tl.arange(0, D)[None, :]
        if MASKED:
            keys = tl.load(k + at * sks + dims, mask=key[:, None] < seq, other=0.0)
            values = tl.load(v + at * svs + dims, mask=key[:, None] < seq, other=0.0)
        else:
            keys = tl.load(k + at * sks + dims)
            values = tl.load(v + at * svs + dims)
        if INTERPRETED:  # the interpreter would multiply bf16 by its bit patterns
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(q, keys.T) * scale
        if MASKED:
            scores = tl.where((key[None, :] <= row[:, None]) & (key[None, :] < seq), scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        top = higher
    return acc, total, top


@triton.jit
def _attention(
    q, k, v, out, heads, group, seq, scale, sqb, sqh, sqs, skb, skh, sks, svb, svh, svs,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(seq, BLOCK_M)
    tile = tl.program_id(0)
    if ORDER == "last":
        tile = tiles - 1 - tile
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)[None, :]
    at = q + batch * sqb + head.to(tl.int64) * sqh + row[:, None].to(tl.int64) * sqs + dims
    queries = tl.load(at, mask=row[:, None] < seq, other=0.0)
    if INTERPRETED:
        queries = queries.to(tl.float32)
    k += batch * skb + (head // group).to(tl.int64) * skh
    v += batch * svb + (head // group).to(tl.int64) * svh
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    end = tl.minimum((tile + 1) * BLOCK_M, seq)
    whole = 0
    if DIAGONAL:
        whole = tile * BLOCK_M // BLOCK_N * BLOCK_N
        acc, total, top = _keys(
            acc, total, top, queries, k, v, row, 0, whole, seq, scale, sks, svs, False, D, BLOCK_N
        )  # fmt: skip
    acc, total, top = _keys(acc, total, top, queries, k, v, row, whole, end, seq, scale, sks, svs, True, D, BLOCK_N)
    y = acc / total[:, None]
    to = out + ((batch * heads + head) * seq + row[:, None]) * D + dims
    tl.store(to, y.to(out.dtype.element_ty), mask=row[:, None] < seq)


def kernel_fn(q, k, v, causal=True, scale=None):
    """q [batch, heads, seq, head_dim], k and v with as many or fewer heads; causal, head_dim a power of two.

    Raises: ValueError for anything else.
    """
    batch, heads, seq, dim = q.shape
    if not causal or k.shape[2] != seq or dim & (dim - 1) or dim < 16:
        raise ValueError(f"causal self-attention with a power of two as head_dim, got {list(q.shape)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    factor = (1 / math.sqrt(dim) if scale is None else scale) * LOG2E
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    grid = (triton.cdiv(seq, CONFIG["BLOCK_M"]), batch * heads)
    _attention[grid](q, k, v, out, heads, heads // k.shape[1], seq, factor, *strides, D=dim, **CONFIG)
    return out
