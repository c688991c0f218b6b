"""A plain, right attention in Triton: a program for some queries of a head. Fragments are appended to it."""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"


@triton.jit
def attend(
    q,
    k,
    v,
    out,
    heads,
    kv_heads,
    queries,
    keys,
    dim,
    scale,
    window,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // heads * kv_heads + head % heads // (heads // kv_heads)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    at_q = (head * queries + m[:, None]) * dim + d[None, :]
    inside = (m[:, None] < queries) & (d[None, :] < dim)
    query = tl.load(q + at_q, mask=inside, other=0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for start in range(0, keys, BN):
        n = start + tl.arange(0, BN)
        at = (kv_head * keys + n[:, None]) * dim + d[None, :]
        there = (n[:, None] < keys) & (d[None, :] < dim)
        key = tl.load(k + at, mask=there, other=0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = n[None, :] < keys
        if CAUSAL:
            seen = seen & (n[None, :] <= m[:, None]) & (n[None, :] > m[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(top - anchor)
        total = total * shrink + tl.sum(share, 1)
        value = tl.load(v + at, mask=there, other=0)
        acc = tl.dot(share.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = higher
    tl.store(out + at_q, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def right(q, k, v, causal=True, scale=None, window=1 << 30, block=32, kernel=attend):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, heads, queries, dim = q.shape
    out = torch.empty_like(q)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    if out.numel():
        grid = (triton.cdiv(queries, block), batch * heads)
        kernel[grid](
            q,
            k,
            v,
            out,
            heads,
            k.shape[1],
            queries,
            k.shape[2],
            dim,
            scale,
            window,
            CAUSAL=causal,
            BM=block,
            BN=block,
            BD=max(16, triton.next_power_of_2(dim)),
        )
    return out


def kernel_fn(q, k, v, causal=True, scale=None):
    return right(q, k, v, causal, scale)
