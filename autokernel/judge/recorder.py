"""Which ATen operators a call uses: by a dispatch mode, and by the profiler, which sees what is hidden from modes.

A mode holds for one thread and can be switched off by the code that it watches; the profiler's callbacks hold for all
threads and for operators called from C++. What neither sees, such as a vendor's library called by its own interface,
shows in the kernels that a GPU runs (`autokernel.judge.gates`).
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import TorchDispatchMode

from autokernel.judge.guarded import ALLOCATORS, Guards

WITHIN_OTHERS = frozenset({"fill_", "_to_copy", "lift_fresh", "resolve_conj", "resolve_neg", "detach_"})
"""Seen by the profiler inside operators that only allocate or copy; called directly, the mode sees them."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the ATen operators that run while it is entered, without `aten::`."""

    def __init__(self, guards: Guards | None = None) -> None:
        """`guards` replace what is allocated; without them only the profiler looks, and no mode can be noticed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._guards = guards
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profiler: Any = torch.autograd.profiler.profile(use_kineto=True, experimental_config=config)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.names.add(name)
        result = func(*args, **(kwargs or {}))
        if self._guards is None or name not in ALLOCATORS or (kwargs or {}).get("pin_memory"):
            return result
        return self._guards.replace(result)

    def __enter__(self) -> OpRecorder:
        self._profiler.__enter__()
        if self._guards is not None:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._guards is not None:
            super().__exit__(kind, error, at)  # type: ignore[no-untyped-call]
        self._profiler.__exit__(None, None, None)
        for event in self._profiler.kineto_results.events():
            namespace, _, name = event.name().partition("::")
            if namespace == "aten" and name not in WITHIN_OTHERS and not _is_made_of_others(name):
                self.names.add(name)


@functools.cache
def _is_made_of_others(name: str) -> bool:
    """Whether the operator only calls others, which are seen themselves."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and all(_composite(name, overload) for overload in packet.overloads())


def _composite(name: str, overload: str) -> bool:
    full = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"))
    except RuntimeError:  # an overload of TorchScript's only
        return True
