"""Memory that a kernel allocates through PyTorch, with red zones round it and a known byte in it.

An element that is never written is then seen whatever lay there before, and so is a write before or behind an output
or a work buffer, which would hit some neighbour's memory in a model, or nothing at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autokernel.judge.wire import RED_ZONE_BYTES, RED_ZONE_VALUE, storage_elements

ALLOCATORS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class OutOfBounds(RuntimeError):
    """A write outside of an allocation."""


class Guards:
    """The allocations of some calls."""

    def __init__(self, poison: int) -> None:
        self._poison = poison
        self._held: list[tuple[Tensor, int, tuple[int, ...]]] = []

    def replace(self, fresh: Any) -> Any:
        """A guarded tensor like `fresh`, or `fresh` itself where it is no plain one."""
        if type(fresh) is not Tensor or fresh.layout is not torch.strided or fresh.numel() == 0:
            return fresh
        if fresh.device.type == "meta":
            return fresh
        shape, stride = tuple(fresh.shape), fresh.stride()
        nbytes = storage_elements(shape, stride) * fresh.element_size()
        memory = torch.empty(nbytes + 2 * RED_ZONE_BYTES, dtype=torch.uint8, device=fresh.device)
        memory.fill_(self._poison)
        for zone in _zones(memory, nbytes):
            zone.fill_(RED_ZONE_VALUE)
        self._held.append((memory, nbytes, shape))
        inner = memory[RED_ZONE_BYTES : RED_ZONE_BYTES + nbytes].view(fresh.dtype)
        return inner.as_strided(shape, stride)

    def check(self) -> None:
        """Raises: OutOfBounds when a red zone has changed."""
        for memory, nbytes, shape in self._held:
            for zone, side in zip(_zones(memory, nbytes), ("before", "behind"), strict=True):
                if bool((zone != RED_ZONE_VALUE).any()):
                    raise OutOfBounds(f"the kernel wrote {side} its own memory of shape {shape}")


def _zones(memory: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
    return memory[:RED_ZONE_BYTES], memory[RED_ZONE_BYTES + nbytes :]
