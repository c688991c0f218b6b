"""Softmax over the last dimension; fp16, bf16 or fp32, arithmetic in fp32.

A program takes ROWS rows and walks over them in blocks of BLOCK columns: once for the running maximum and sum, once to
write. A row that fits into one block is read once and stays in registers.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"
TUNABLES = {
    "BLOCK": [256, 512, 1024, 2048, 4096, 8192],
    "ROWS": [1, 2, 4],
    "WRITE": ["", ".cs"],
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1, 2, 3, 4],
}
CONFIG = {"BLOCK": 1024, "ROWS": 1, "WRITE": "", "num_warps": 4, "num_stages": 1}
CONSTRAINTS = ["BLOCK * ROWS <= 8192 * num_warps"]


@triton.jit
def _softmax(
    x, out, rows, cols, stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr, ONCE: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at, to = x + row.to(tl.int64) * stride, out + row.to(tl.int64) * cols
    if ONCE:
        inside = (row < rows) & (col < cols)
        v = tl.load(at + col, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(v, 1)[:, None]
        e = tl.exp(v - tl.where(top == -float("inf"), 0.0, top))
        y = e / tl.sum(e, 1)[:, None]
        tl.store(to + col, y.to(out.dtype.element_ty), mask=inside, cache_modifier=WRITE)
    else:
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in tl.range(0, cols, BLOCK, num_stages=num_stages):
            inside = (row < rows) & (start + col < cols)
            v = tl.load(at + start + col, mask=inside, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(v, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(v - base[:, None]), 1)
            top = higher
        for start in tl.range(0, cols, BLOCK, num_stages=num_stages):
            inside = (row < rows) & (start + col < cols)
            v = tl.load(at + start + col, mask=inside, other=-float("inf")).to(tl.float32)
            y = tl.exp(v - top[:, None]) / total[:, None]
            tl.store(to + start + col, y.to(out.dtype.element_ty), mask=inside, cache_modifier=WRITE)


def kernel_fn(x, dim=-1):
    """Softmax of x [rows, cols] over its last dimension. Raises: ValueError for another rank or dimension."""
    if x.dim() != 2 or dim not in (-1, 1) or x.stride(1) != 1:
        raise ValueError(f"softmax takes the rows of a matrix, not dimension {dim} of {list(x.shape)}")
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, CONFIG["ROWS"]),)
    _softmax[grid](x, out, rows, cols, x.stride(0), ONCE=cols <= CONFIG["BLOCK"], **CONFIG)
    return out
