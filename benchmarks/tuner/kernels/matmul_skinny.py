"""Matrix product a [M, K] @ b [K, N] -> [M, N] with few rows; fp16 or bf16, sums in fp32, rounded once.

All rows are one tile, so the product is as fast as b is read. SPLIT_K programs share a tile's K; their fp32 sums go to
a workspace that a second kernel adds up in the order of K, so that results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_N": [16, 32, 64, 128],
    "BLOCK_K": [32, 64, 128, 256],
    "SPLIT_K": [1, 2, 4, 8],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2, 3, 4],
}
CONFIG = {"BLOCK_N": 32, "BLOCK_K": 64, "SPLIT_K": 1, "num_warps": 4, "num_stages": 2}
CONSTRAINTS = []
SUM_BLOCK = 1024
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _part(
    a, b, out, M, N, K, sam, sak, sbk, sbn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Program (i, p) writes the products of tile i over the p-th part of K to out [SPLIT_K, M, N]."""
    rows, cols = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, steps = tl.program_id(1), tl.cdiv(K, BLOCK_K)
    first = steps * part // SPLIT_K
    last = steps * (part + 1) // SPLIT_K
    k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    at_a = a + rows[:, None] * sam + k[None, :].to(tl.int64) * sak
    at_b = b + k[:, None].to(tl.int64) * sbk + cols[None, :] * sbn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        left = K - step * BLOCK_K
        within = tl.arange(0, BLOCK_K)
        x = tl.load(at_a, mask=(rows[:, None] < M) & (within[None, :] < left), other=0.0)
        y = tl.load(at_b, mask=(within[:, None] < left) & (cols[None, :] < N), other=0.0)
        if INTERPRETED:  # the interpreter would multiply bf16 by its bit patterns
            x, y = x.to(tl.float32), y.to(tl.float32)
        acc = tl.dot(x, y, acc)
        at_a += BLOCK_K * sak
        at_b += BLOCK_K * sbk
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = out + part.to(tl.int64) * M * N + rows[:, None].to(tl.int64) * N + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def kernel_fn(a, b):
    """a [M, K] @ b [K, N] with M <= 128, both fp16 or both bf16, any strides. Raises: TypeError, ValueError."""
    if a.dtype not in (torch.float16, torch.bfloat16) or a.dtype != b.dtype:
        raise TypeError(f"matmul takes two fp16 or two bf16 matrices, got {a.dtype} and {b.dtype}")
    (m, k), n = a.shape, b.shape[1]
    if m > 128:
        raise ValueError(f"a has {m} rows, more than one tile's 128")
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    parts = CONFIG["SPLIT_K"]
    target = out if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=a.device)
    rows = max(16, triton.next_power_of_2(m))
    grid = (triton.cdiv(n, CONFIG["BLOCK_N"]), parts)
    _part[grid](a, b, target, m, n, k, *a.stride(), *b.stride(), BLOCK_M=rows, **CONFIG)
    if parts > 1:
        _add_parts[(triton.cdiv(m * n, SUM_BLOCK),)](target, out, m * n, PARTS=parts, BLOCK=SUM_BLOCK)
    return out
