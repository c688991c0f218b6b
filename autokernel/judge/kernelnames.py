"""Whose kernels ran on the GPU: a vendor's library shows in their names, however it was called."""

from __future__ import annotations

import re
from collections.abc import Iterable

VENDORS = re.compile(
    r"cublas|cudnn|cutlass|nvjet|xmma|(volta|turing|ampere|hopper|blackwell)_|splitKreduce|gemv2?T?_|gemmSN|gemmk1"
    r"|flash_fwd|flash_bwd|fmha|pytorch_flash|rocblas|hipblas|Cijk_|miopen",
    re.IGNORECASE,
)
ATEN = re.compile(r"at::native|at_cuda_detail|triton_(poi|per|red|tem|mm)_")
"""PyTorch's own kernels, and those that torch.compile writes."""

ALLOCATES_OR_COPIES = re.compile(
    r"FillFunctor|copy_kernel|CatArrayBatchedCopy|Memset|Memcpy|direct_copy", re.IGNORECASE
)


def others_work(names: Iterable[str], kernel_py: str) -> str | None:
    """The first kernel that is not the candidate's own, or None. A name that its text defines is its own."""
    for name in sorted(names):
        if ALLOCATES_OR_COPIES.search(name) or not (VENDORS.search(name) or ATEN.search(name)):
            continue
        if not any(word in kernel_py for word in re.findall(r"[A-Za-z_]\w{5,}", name) if VENDORS.search(word)):
            return name[:120]
    return None
