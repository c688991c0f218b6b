"""A plain, right cross entropy in Triton: a program for each row, then one that adds up. Fragments are appended."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"


@triton.jit
def row_loss(logits, targets, losses, classes, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    loss = 0.0
    if target != ignored:
        top = float("-inf")
        total = 0.0
        for start in range(0, classes, BLOCK):
            at = start + tl.arange(0, BLOCK)
            v = tl.load(logits + row * classes + at, mask=at < classes, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(v, 0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - anchor) + tl.sum(tl.exp(v - anchor), 0)
            top = higher
        loss = tl.log(total) + top - tl.load(logits + row * classes + target).to(tl.float32)
    tl.store(losses + row, loss.to(losses.dtype.element_ty))


@triton.jit
def add_up(losses, targets, out, rows, ignored, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + at, mask=at < rows, other=0)
        counts += (tl.load(targets + at, mask=at < rows, other=ignored) != ignored).to(tl.float32)
    total = tl.sum(sums, 0)
    if MEAN:
        total = total / tl.sum(counts, 0)
    tl.store(out, total.to(out.dtype.element_ty))


def right(logits, targets, ignore_index=-100, reduction="mean", kernel=row_loss, block=1024):
    logits, targets = logits.contiguous(), targets.contiguous()
    rows, classes = logits.shape
    dtype = logits.dtype if reduction == "none" else torch.float32
    losses = torch.empty(rows, dtype=dtype, device=logits.device)
    if rows:
        kernel[(rows,)](logits, targets, losses, classes, ignore_index, BLOCK=block)
    if reduction == "none":
        return losses
    out = torch.empty((), dtype=logits.dtype, device=logits.device)
    add_up[(1,)](losses, targets, out, rows, ignore_index, MEAN=reduction == "mean", BLOCK=128)
    return out


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    return right(logits, targets, ignore_index, reduction)
