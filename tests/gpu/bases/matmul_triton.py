"""A plain, right matrix product in Triton: one program for each tile, sums in fp32. Fragments are appended to it."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
BACKEND = "triton"


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at_a = a + batch * M * K + m[:, None] * K + k[None, :]
        at_b = b + batch * K * N + k[:, None] * N + n[None, :]
        left = tl.load(at_a, mask=(m[:, None] < M) & (k[None, :] < K), other=0)
        above = tl.load(at_b, mask=(k[:, None] < K) & (n[None, :] < N), other=0)
        acc = tl.dot(left, above, acc, input_precision=PRECISION)
    at_c = c + batch * M * N + m[:, None] * N + n[None, :]
    tl.store(at_c, acc.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def sizes(a, b):
    """(batches, M, N, K) of a [..., M, K] and b, which has the same leading dimensions or none."""
    rows = a.shape[:-1].numel() if b.dim() == 2 else a.shape[-2]
    return a.shape[:-1].numel() // max(rows, 1), rows, b.shape[-1], a.shape[-1]


def right(a, b, out=None, tile=32, precision="ieee"):
    a, b = a.contiguous(), b.contiguous()
    batches, M, N, K = sizes(a, b)
    out = torch.empty((*a.shape[:-1], N), dtype=a.dtype, device=a.device) if out is None else out
    if out.numel():
        grid = (triton.cdiv(M, tile), triton.cdiv(N, tile), batches)
        product[grid](a, b, out, M, N, K, BM=tile, BN=tile, BK=tile, PRECISION=precision)
    return out


def kernel_fn(a, b):
    return right(a, b)
