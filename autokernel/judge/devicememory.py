"""GPU memory that two processes share: allocated by the judge, opened by the child through a CUDA IPC handle.

PyTorch's own sharing counts references in the other process, which a killed child never gives back; these are the
runtime's plain calls, so that whoever allocated the memory alone decides how long it lives.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from autokernel.errors import DeviceError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1

MOST_UNUSED_BYTES = 2 << 30
"""That this process may keep reserved on the GPU for its next tensors, while other processes need memory there."""

_NO_MEMORY = ("out of memory", "can't allocate memory")
"""What PyTorch's errors say: on a GPU, where some have no class of their own, and on a CPU."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that this process found no memory."""
    if error is None:
        return False
    text = str(error).lower()
    told = isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)
    return told or is_out_of_memory(error.__cause__)


def release_unused(most_bytes: int = MOST_UNUSED_BYTES) -> None:
    """Give back what PyTorch has reserved on the GPU and does not use, if it is more than `most_bytes`.

    The truth of a large call takes several times the room of its inputs, and the children have the same inputs.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > most_bytes:
        torch.cuda.empty_cache()


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def allocate(nbytes: int) -> Tensor:
    """Fresh memory on the current GPU as a flat uint8 tensor; never freed, so keep and reuse it.

    Raises: torch.OutOfMemoryError when there is not enough.
    """
    pointer = ctypes.c_void_p()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if _call("Malloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes)) != 0:
        torch.cuda.empty_cache()  # PyTorch may be holding what is missing
        if status := _call("Malloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes)):
            raise torch.OutOfMemoryError(f"out of memory: {nbytes} bytes on the GPU (error {status})")
    assert pointer.value is not None
    return _as_tensor(pointer.value, nbytes)


def free(memory: Tensor) -> None:
    """Give back what `allocate` returned; views of it must not be used any more."""
    torch.cuda.synchronize()
    _call("Free", ctypes.c_void_p(memory.data_ptr()))


def handle_of(memory: Tensor) -> str:
    """Hexadecimal name under which another process can `open_shared` this allocation."""
    handle = _Handle()
    if status := _call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(memory.data_ptr())):
        raise DeviceError(
            f"the GPU does not share memory between processes (error {status})",
            hint="CUDA IPC needs Linux, and in a container --ipc=host or a private /dev/shm of some size",
        )
    return bytes(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)).hex()


def open_shared(handle: str, nbytes: int) -> Tensor:
    """The other process's memory as a flat uint8 tensor. Raises: RuntimeError when it cannot be opened."""
    pointer, raw = ctypes.c_void_p(), _Handle()
    ctypes.memmove(ctypes.byref(raw), bytes.fromhex(handle), HANDLE_BYTES)
    if status := _call("IpcOpenMemHandle", ctypes.byref(pointer), raw, ctypes.c_uint(_LAZY_PEER_ACCESS)):
        raise RuntimeError(f"cannot open the judge's GPU memory (error {status})")
    assert pointer.value is not None
    return _as_tensor(pointer.value, nbytes)


def close_shared(memory: Tensor) -> None:
    """Unmap what `open_shared` returned."""
    torch.cuda.synchronize()
    _call("IpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))


def _call(name: str, *arguments: Any) -> int:
    prefix, library = _runtime()
    status: int = getattr(library, prefix + name)(*arguments)
    return status


@functools.cache
def _runtime() -> tuple[str, ctypes.CDLL]:
    """(prefix of its functions, the runtime library that PyTorch has loaded)."""
    prefix, names = ("hip", ("libamdhip64.so",)) if torch.version.hip else ("cuda", _cudart_names())
    for name in names:
        try:
            return prefix, ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceError(f"none of {', '.join(names)} can be loaded", hint="install a CUDA build of torch")


def _cudart_names() -> tuple[str, ...]:
    major = (torch.version.cuda or "").split(".")[0]
    return (f"libcudart.so.{major}", "libcudart.so")


class _Span:
    """Raw device memory in the form that `torch.as_tensor` takes without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def _as_tensor(pointer: int, nbytes: int) -> Tensor:
    return torch.as_tensor(_Span(pointer, nbytes), device="cuda")
