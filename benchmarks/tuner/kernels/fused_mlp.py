"""Gated MLP: (silu(x w_gate^T) * (x w_up^T)) w_down^T; fp16 or bf16, sums in fp32.

The first kernel makes a tile of both products at once, with two accumulators: large tiles with few warps spill. The
second is the down product with the same tiles.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"
TUNABLES = {
    "BLOCK_M": [32, 64, 128, 256],
    "BLOCK_N": [32, 64, 128, 256],
    "BLOCK_K": [32, 64, 128],
    "num_warps": [4, 8, 16],
    "num_stages": [2, 3, 4, 5],
}
CONFIG = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
CONSTRAINTS = ["BLOCK_M * BLOCK_N <= 32768", "BLOCK_M * BLOCK_N <= 4096 * num_warps"]
GROUP_M = 8
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _tile(M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and column of this program's tile."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    first = index // (GROUP * tiles_n) * GROUP
    together = tl.minimum(tiles_m - first, GROUP)
    within = index % (GROUP * tiles_n)
    return (first + within % together) * BLOCK_M, within // together * BLOCK_N


@triton.jit
def _load(at, row, rows, k, K):
    """A tile [len(row), len(k)], zero outside."""
    tile = tl.load(at, mask=(row[:, None] < rows) & (k[None, :] < K), other=0.0)
    if INTERPRETED:  # the interpreter would multiply bf16 by its bit patterns
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _gate_up(
    x, gate, up, out, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = _tile(M, N, GROUP, BLOCK_M, BLOCK_N)
    rows, cols = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    at_x = rows[:, None].to(tl.int64) * K
    at_w = cols[:, None].to(tl.int64) * K
    gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    raised = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = _load(x + at_x + k[None, :], rows, M, k, K)
        gated = tl.dot(tile, _load(gate + at_w + k[None, :], cols, N, k, K).T, gated)
        raised = tl.dot(tile, _load(up + at_w + k[None, :], cols, N, k, K).T, raised)
    hidden = gated / (1.0 + tl.exp(-gated)) * raised
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out + rows[:, None].to(tl.int64) * N + cols[None, :], hidden.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    x, weight, out, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = _tile(M, N, GROUP, BLOCK_M, BLOCK_N)
    rows, cols = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    at_x = rows[:, None].to(tl.int64) * K
    at_w = cols[:, None].to(tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = _load(x + at_x + k[None, :], rows, M, k, K)
        acc = tl.dot(tile, _load(weight + at_w + k[None, :], cols, N, k, K).T, acc)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out + rows[:, None].to(tl.int64) * N + cols[None, :], acc.to(out.dtype.element_ty), mask=inside)


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    """x [M, K]; w_gate, w_up [H, K]; w_down [N, H]; all contiguous. Raises: ValueError for anything else."""
    if activation != "silu" or x.dim() != 2 or not all(t.is_contiguous() for t in (x, w_gate, w_up, w_down)):
        raise ValueError("silu of contiguous matrices")
    (m, k), hidden, n = x.shape, w_gate.shape[0], w_down.shape[0]
    middle = torch.empty((m, hidden), dtype=x.dtype, device=x.device)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    rows = triton.cdiv(m, CONFIG["BLOCK_M"])
    grid = (rows * triton.cdiv(hidden, CONFIG["BLOCK_N"]),)
    _gate_up[grid](x, w_gate, w_up, middle, m, hidden, k, GROUP=GROUP_M, **CONFIG)
    grid = (rows * triton.cdiv(n, CONFIG["BLOCK_N"]),)
    _down[grid](middle, w_down, out, m, n, hidden, GROUP=GROUP_M, **CONFIG)
    return out
