"""LayerNorm over the last dimension, with weight and bias; fp16, bf16 or fp32, arithmetic in fp32.

A program takes ROWS rows and walks over them in blocks of BLOCK columns: once for mean and squared deviations, joined
block by block without cancellation, once to write. A row that fits into one block is read once.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "layernorm"
BACKEND = "triton"
TUNABLES = {
    "BLOCK": [256, 512, 1024, 2048, 4096],
    "ROWS": [1, 2, 4, 8],
    "WRITE": ["", ".cs"],
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1, 2, 3],
}
CONFIG = {"BLOCK": 1024, "ROWS": 1, "WRITE": "", "num_warps": 4, "num_stages": 1}
CONSTRAINTS = ["BLOCK * ROWS <= 8192 * num_warps"]


@triton.jit
def _layernorm(
    x, weight, bias, out, rows, cols, stride, eps,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr, ONCE: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at, to = x + row.to(tl.int64) * stride, out + row.to(tl.int64) * cols
    if ONCE:
        inside = (row < rows) & (col < cols)
        v = tl.load(at + col, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(v, 1)[:, None] / cols
        away = tl.where(col < cols, v - mean, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(away * away, 1)[:, None] / cols + eps)
        w = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
        b = tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)
        tl.store(to + col, (away * scale * w + b).to(out.dtype.element_ty), mask=inside, cache_modifier=WRITE)
    else:
        mean = tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)  # of the deviations from the mean so far
        for start in tl.range(0, cols, BLOCK, num_stages=num_stages):
            inside = (row < rows) & (start + col < cols)
            count = tl.minimum(cols - start, BLOCK).to(tl.float32)
            v = tl.load(at + start + col, mask=inside, other=0.0).to(tl.float32)
            here = tl.sum(v, 1) / count
            away = tl.where(inside, v - here[:, None], 0.0)
            apart = here - mean
            seen = start + count
            squares += tl.sum(away * away, 1) + apart * apart * (start * count / seen)
            mean += apart * (count / seen)
        scale = 1.0 / tl.sqrt(squares / cols + eps)
        for start in tl.range(0, cols, BLOCK, num_stages=num_stages):
            inside = (row < rows) & (start + col < cols)
            v = tl.load(at + start + col, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(weight + start + col, mask=start + col < cols, other=0.0).to(tl.float32)
            b = tl.load(bias + start + col, mask=start + col < cols, other=0.0).to(tl.float32)
            y = (v - mean[:, None]) * scale[:, None] * w + b
            tl.store(to + start + col, y.to(out.dtype.element_ty), mask=inside, cache_modifier=WRITE)


def kernel_fn(x, weight, bias, eps=1e-5):
    """LayerNorm of x [rows, cols] with weight and bias [cols]. Raises: ValueError for other shapes."""
    if x.dim() != 2 or weight.shape != x.shape[1:] or bias.shape != x.shape[1:] or x.stride(1) != 1:
        raise ValueError(f"layernorm takes [rows, cols] and two [cols], got {list(x.shape)}")
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, CONFIG["ROWS"]),)
    _layernorm[grid](x, weight, bias, out, rows, cols, x.stride(0), eps, ONCE=cols <= CONFIG["BLOCK"], **CONFIG)
    return out
