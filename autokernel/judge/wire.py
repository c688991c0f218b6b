"""How judge and child talk: length-prefixed JSON over a socket, and tensors in shared (CPU or GPU) memory.

The judge owns the memory and checks it after every call: red zones, gaps between strided elements and the inputs
themselves must be as it left them. JSON only, never pickle: the child is not trusted.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autokernel.judge import devicememory
from autokernel.records import TensorMeta
from autokernel.spec import DTYPES, contiguous_stride

MAX_MESSAGE_BYTES = 1 << 20
RED_ZONE_BYTES = 4096
RED_ZONE_VALUE = 0xA5
ALIGNMENT = {"cpu": 64, "cuda": 512}
"""What PyTorch's own allocators give: a kernel must not be judged on better aligned memory than it will get."""

_HEADER = struct.Struct("<I")


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Write one message, with file descriptors riding along."""
    body = json.dumps(message).encode()
    frame = _HEADER.pack(len(body)) + body
    if fds:
        sent = socket.send_fds(sock, [frame[:1]], fds)
        frame = frame[sent:]
    sock.sendall(frame)


def receive(sock: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Read one message and the descriptors that came with it.

    Raises: EOFError when the other side is gone; ValueError when it does not speak the protocol; TimeoutError by the
    socket's own timeout.
    """
    fds: list[int] = []
    if max_fds:
        first, fds, _, _ = socket.recv_fds(sock, 1, max_fds)
    else:
        first = sock.recv(1)
    if not first:
        raise EOFError("the other side closed the connection")
    (length,) = _HEADER.unpack(first + _exactly(sock, _HEADER.size - 1))
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    message = json.loads(_exactly(sock, length))
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")
    return message, fds


def _exactly(sock: socket.socket, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = sock.recv(min(count - len(chunks), 1 << 16))
        if not chunk:
            raise EOFError("the other side closed the connection")
        chunks += chunk
    return bytes(chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one tensor lies in an arena: byte offset of its storage and how to view it."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return {"offset": self.offset, "shape": self.shape, "stride": self.stride, "dtype": self.dtype}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Slot:
        """Inverse of `to_json`."""
        shape, stride = tuple(raw["shape"]), tuple(raw["stride"])
        extent = storage_elements(shape, stride) * DTYPES[raw["dtype"]].itemsize
        return Slot(offset=raw["offset"], nbytes=extent, shape=shape, stride=stride, dtype=raw["dtype"])


def storage_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of storage that a strided tensor spans; 0 when it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def written_once(stride: Sequence[int]) -> tuple[slice, ...]:
    """Index of a view without the dimensions of stride 0, whose elements are one and the same."""
    return tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)


def flat_storage(value: Tensor) -> Tensor:
    """All elements of storage that `value` spans, as a vector; a view."""
    return value.as_strided((storage_elements(value.shape, value.stride()),), (1,))


def slot_for(meta: TensorMeta, offset: int) -> Slot:
    """The slot of a tensor like `meta` at `offset`."""
    stride = meta.stride if meta.stride is not None else contiguous_stride(meta.shape)
    nbytes = storage_elements(meta.shape, stride) * DTYPES[meta.dtype].itemsize
    return Slot(offset=offset, nbytes=nbytes, shape=meta.shape, stride=stride, dtype=meta.dtype)


def next_offset(end: int, device: str) -> int:
    """Where the next storage may begin: behind a red zone, aligned."""
    alignment = ALIGNMENT[device]
    return -(-(end + RED_ZONE_BYTES) // alignment) * alignment


class Arena:
    """Memory that judge and child both see; `bytes` is all of it, flat. The judge creates it, the child attaches.

    On the CPU it is a nameless file, passed as a descriptor; on a GPU an allocation, passed as a handle.
    """

    def __init__(self, memory: Tensor, *, fd: int | None = None) -> None:
        self.bytes, self._fd = memory, fd
        self.size = memory.numel()

    @staticmethod
    def create(size: int, device: str = "cpu") -> Arena:
        """Fresh memory of at least `size` bytes that no path leads to."""
        size = max(mmap.PAGESIZE, size)
        if device != "cpu":
            return Arena(devicememory.allocate(size))
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("autokernel")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        return Arena(_mapped(fd, size), fd=fd)

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        """What tells the child of this arena: fields of a message, and descriptors to ride along."""
        if self._fd is not None:
            return {"arena": {"size": self.size}}, [self._fd]
        return {"arena": {"size": self.size, "handle": devicememory.handle_of(self.bytes)}}, []

    @staticmethod
    def attach(offered: dict[str, Any], fds: Sequence[int]) -> Arena:
        """The child's view of what `offer` described."""
        if fds:
            return Arena(_mapped(fds[0], offered["size"]), fd=fds[0])
        return Arena(devicememory.open_shared(offered["handle"], offered["size"]))

    def tensor(self, slot: Slot) -> Tensor:
        """A view of the tensor in `slot`, not a copy."""
        dtype = DTYPES[slot.dtype]
        if slot.nbytes == 0:
            return torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=self.bytes.device)
        flat = self.bytes[slot.offset : slot.offset + slot.nbytes].view(dtype)
        return flat.as_strided(slot.shape, slot.stride)

    def put(self, slot: Slot, value: Tensor) -> None:
        """Copy `value` into `slot`; dimensions of stride 0 are written once."""
        if slot.nbytes == 0:
            return
        index = written_once(slot.stride)
        self.tensor(slot)[index].copy_(value[index])

    def close(self) -> None:
        """Give it back. Its file lives on as long as views of it do; GPU memory does not."""
        if self._fd is not None:
            os.close(self._fd)
        else:
            devicememory.free(self.bytes)

    def detach(self) -> None:
        """The child's end of `close`."""
        if self._fd is not None:
            os.close(self._fd)
        else:
            devicememory.close_shared(self.bytes)


def _mapped(fd: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
