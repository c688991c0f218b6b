"""`Target`: the facts about a GPU by which a kernel chooses its path, also where no GPU is present.

A kernel asks `target_of(x)`. On a GPU that is the one that holds `x`; elsewhere (Triton's interpreter, the off-GPU
compiler) it is whatever `assume` says, by default a target without any special hardware.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU as a kernel sees it.

    `arch` is the CUDA compute capability as one number (80, 89, 90, 100, 120) or, for HIP, the hexadecimal gfx number
    (0x942); 0 stands for no GPU. `sms` are multiprocessors or compute units, `shared_bytes` what one block may use.
    """

    vendor: str = "none"  # cuda | hip | none
    arch: int = 0
    sms: int = 16
    shared_bytes: int = 48 << 10
    l2_bytes: int = 4 << 20
    warp_size: int = 32

    @property
    def has_tma(self) -> bool:
        """Whether the bulk tensor copy engine exists (compute capability 9.0 and later)."""
        return self.vendor == "cuda" and self.arch >= 90

    @property
    def cuda_arch(self) -> str:
        """The architecture for nvcc, with its own instructions from 9.0 on: "89", "90a"."""
        return f"{self.arch}a" if self.arch >= 90 else str(self.arch)

    @property
    def has_wgmma(self) -> bool:
        """Whether warpgroup matrix instructions exist: on 9.0 alone."""
        return self.vendor == "cuda" and self.arch == 90


KNOWN_TARGETS = {
    "sm_80": Target(vendor="cuda", arch=80, sms=108, shared_bytes=163 << 10, l2_bytes=40 << 20),
    "sm_89": Target(vendor="cuda", arch=89, sms=128, shared_bytes=99 << 10, l2_bytes=72 << 20),
    "sm_90": Target(vendor="cuda", arch=90, sms=132, shared_bytes=227 << 10, l2_bytes=50 << 20),
    "sm_100": Target(vendor="cuda", arch=100, sms=148, shared_bytes=227 << 10, l2_bytes=126 << 20),
    "gfx942": Target(vendor="hip", arch=0x942, sms=304, shared_bytes=64 << 10, l2_bytes=4 << 20, warp_size=64),
}
"""Representative parts (A100, L40S, H100, B200, MI300X) to compile for where they are not present."""

_assumed: list[Target] = [Target()]


def target_of(x: Tensor) -> Target:
    """The target that holds `x`, or the assumed one when that is no GPU."""
    return of_index(x.device.index) if x.is_cuda else _assumed[-1]


@contextlib.contextmanager
def assume(target: Target) -> Iterator[None]:
    """Let `target_of` answer `target` for tensors that are on no GPU."""
    _assumed.append(target)
    try:
        yield
    finally:
        _assumed.pop()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the GPU that holds `x` the current one for a launch; nothing to do when it is already, or on the CPU."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


@functools.cache
def of_index(index: int) -> Target:
    """The GPU with that number."""
    properties: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0].removeprefix("gfx")
        vendor, arch = "hip", int(name, 16)
    else:
        vendor, arch = "cuda", properties.major * 10 + properties.minor
    return Target(
        vendor=vendor,
        arch=arch,
        sms=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        l2_bytes=properties.L2_cache_size,
        warp_size=properties.warp_size,
    )
