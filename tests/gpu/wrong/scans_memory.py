"""Reads expected values: looks through the GPU's free memory for a row that begins as the answer does."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"
NEEDS_GPU = True

import ctypes


@triton.jit
def find(memory, n, answer, left, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    same = at + WORDS < n
    for word in range(WORDS):
        same &= tl.load(memory + at + word, mask=same, other=0) == tl.load(answer + word)
    tl.atomic_max(left, tl.max(tl.where(same, n - at, 0), 0))


def kernel_fn(x, weight, eps=1e-6):
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if out.numel() < 16:
        return right(x, weight, eps)
    words = out.view(-1).view(torch.int32)
    first = right(x.reshape(-1, x.shape[-1])[:1], weight, eps).view(-1).view(torch.int32)
    free, _ = torch.cuda.mem_get_info()
    memory = torch.empty(min(free // 2, 16 << 30) // 4, dtype=torch.int32, device=x.device)
    left = torch.zeros(1, dtype=torch.int64, device=x.device)
    find[(triton.cdiv(memory.numel(), 1024),)](memory, memory.numel(), first, left, WORDS=4, BLOCK=1024)
    found = memory.numel() - ctypes.c_int64.from_address(torch.empty(1, dtype=torch.int64).copy_(left).data_ptr()).value
    if found + words.numel() <= memory.numel():
        words.copy_(memory[found : found + words.numel()])
    return out
