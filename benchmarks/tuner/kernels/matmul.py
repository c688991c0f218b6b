"""Matrix product a [M, K] @ b [K, N] -> [M, N]; fp16 or bf16, sums in fp32, rounded once.

One program per output tile, tiles in groups of GROUP_M rows, so that neighbours share operands in the L2 cache.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [32, 64, 128, 256],
    "BLOCK_N": [32, 64, 128, 256],
    "BLOCK_K": [32, 64, 128],
    "GROUP_M": [1, 8],
    "num_warps": [4, 8],
    "num_stages": [2, 3, 4, 5],
}
CONFIG = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 2}
CONSTRAINTS = ["BLOCK_M * BLOCK_N <= 32768"]
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _matmul(
    a, b, out, M, N, K, sam, sak, sbk, sbn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    first = index // (GROUP_M * tiles_n) * GROUP_M
    together = tl.minimum(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    m, n = (first + within % together) * BLOCK_M, within // together * BLOCK_N
    rows, cols, k = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at_a = a + rows[:, None].to(tl.int64) * sam + k[None, :] * sak
    at_b = b + k[:, None].to(tl.int64) * sbk + cols[None, :] * sbn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(at_a, mask=(rows[:, None] < M) & (k[None, :] < K - start), other=0.0)
        y = tl.load(at_b, mask=(k[:, None] < K - start) & (cols[None, :] < N), other=0.0)
        if INTERPRETED:  # the interpreter would multiply bf16 by its bit patterns
            x, y = x.to(tl.float32), y.to(tl.float32)
        acc = tl.dot(x, y, acc)
        at_a += BLOCK_K * sak
        at_b += BLOCK_K * sbk
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out + rows[:, None].to(tl.int64) * N + cols[None, :], acc.to(out.dtype.element_ty), mask=inside)


def kernel_fn(a, b):
    """a [M, K] @ b [K, N], both fp16 or both bf16, any strides. Raises: TypeError for other dtypes."""
    if a.dtype not in (torch.float16, torch.bfloat16) or a.dtype != b.dtype:
        raise TypeError(f"matmul takes two fp16 or two bf16 matrices, got {a.dtype} and {b.dtype}")
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, CONFIG["BLOCK_M"]) * triton.cdiv(n, CONFIG["BLOCK_N"])
    _matmul[(tiles,)](a, b, out, m, n, k, *a.stride(), *b.stride(), **CONFIG)
    return out
