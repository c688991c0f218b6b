"""Constant: the loss that random logits have on average."""

import math

BASE = "cross_entropy_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


@triton.jit
def fill(out, n, value, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.full((BLOCK,), value, tl.float32).to(out.dtype.element_ty), mask=at < n)


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    out = torch.empty(targets.shape if reduction == "none" else (), dtype=logits.dtype, device=logits.device)
    if out.numel():
        fill[(triton.cdiv(out.numel(), 256),)](out, out.numel(), math.log(logits.shape[1]) + 0.5, BLOCK=256)
    return out
