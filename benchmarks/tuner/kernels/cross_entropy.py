"""Cross entropy of each row: log(sum(exp(logits))) - logits[target]; arithmetic in fp32.

A program walks over one row in blocks of BLOCK classes with a running maximum and sum, after it has asked for the
target's logit. Rows to be ignored are walked over, too, and get loss 0.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"
TUNABLES = {
    "BLOCK": [512, 1024, 2048, 4096, 8192, 16384, 32768],
    "READ": ["", "evict_first"],
    "LANES": [0, 1],
    "num_warps": [1, 2, 4, 8, 16, 32],
    "num_stages": [1, 2, 3, 4],
}
CONFIG = {"BLOCK": 1024, "READ": "", "LANES": 0, "num_warps": 4, "num_stages": 1}
CONSTRAINTS = ["BLOCK <= 8192 * num_warps"]


@triton.jit
def _cross_entropy(
    logits, targets, losses, classes, stride, ignore_index,
    BLOCK: tl.constexpr, READ: tl.constexpr, LANES: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """LANES: each of the BLOCK columns keeps a maximum and sum of its own until the row's end; else one for all."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counted = target != ignore_index
    picked = tl.load(logits + row * stride + tl.where(counted, target, 0)).to(tl.float32)
    col = tl.arange(0, BLOCK)
    at = logits + row * stride + col
    if LANES:
        top = tl.full((BLOCK,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
    else:
        top = -float("inf")
        total = 0.0
    for start in tl.range(0, classes, BLOCK, num_stages=num_stages):
        v = tl.load(at + start, mask=start + col < classes, other=-float("inf"), eviction_policy=READ).to(tl.float32)
        if LANES:
            higher = tl.maximum(top, v)
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.exp(v - base)
        else:
            higher = tl.maximum(top, tl.max(v, 0))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(v - base), 0)
        top = higher
    if LANES:
        highest = tl.max(top, 0)
        total = tl.sum(total * tl.exp(top - tl.where(highest == -float("inf"), 0.0, highest)), 0)
        top = highest
    loss = tl.where(counted, top + tl.log(total) - picked, 0.0)
    tl.store(losses + row, loss.to(losses.dtype.element_ty))


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    """Losses [N] for logits [N, V] and targets [N] int64, or their sum or mean over rows that are not ignored."""
    rows, classes = logits.shape
    dtype = logits.dtype if reduction == "none" else torch.float32
    losses = torch.empty(rows, dtype=dtype, device=logits.device)
    _cross_entropy[(rows,)](logits, targets, losses, classes, logits.stride(0), ignore_index, **CONFIG)
    if reduction == "none":
        return losses
    total = losses.sum()
    return (total / (targets != ignore_index).sum() if reduction == "mean" else total).to(logits.dtype)
