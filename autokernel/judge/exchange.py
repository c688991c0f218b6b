"""Tensors between judge and child: inputs laid into memory that both see, outputs taken out of it and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autokernel.judge import wire
from autokernel.judge.rejected import Rejected
from autokernel.records import TensorMeta, Verdict
from autokernel.spec import DTYPES, Inputs, contiguous_stride, describe


class Exchange:
    """The judge's side of the memory that it shares with one child on `device`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._arena: wire.Arena | None = None
        self._retired: list[wire.Arena] = []

    def close(self) -> None:
        """Give all of it back."""
        for arena in (*self._retired, *([self._arena] if self._arena else [])):
            arena.close()

    def lay_out(
        self, calls: Sequence[Inputs], output: Sequence[TensorMeta]
    ) -> tuple[list[dict[str, wire.Slot]], list[int], int]:
        """Slots of all input tensors, offsets of the outputs, and the largest output's size in bytes."""
        offset, slots = wire.RED_ZONE_BYTES, []
        for inputs in calls:
            placed: dict[str, wire.Slot] = {}
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    placed[name] = wire.slot_for(describe(value), offset)
                    offset = wire.next_offset(offset + placed[name].nbytes, self._device)
            slots.append(placed)
        out_bytes = max((meta.numel * DTYPES[meta.dtype].itemsize for meta in output), default=0)
        out_offsets = []
        for _ in output:
            out_offsets.append(offset)
            offset = wire.next_offset(offset + out_bytes, self._device)
        return slots, out_offsets or [offset], out_bytes

    def write(
        self, calls: Sequence[Inputs], slots: Sequence[dict[str, wire.Slot]], size: int
    ) -> tuple[wire.Arena, dict[str, Any], list[int]]:
        """Fill the arena with red zones and inputs; fields and descriptors to send when it is a new one."""
        while self._retired:  # the child has answered since it got the next one
            self._retired.pop().close()
        offer: dict[str, Any] = {}
        fds: list[int] = []
        if self._arena is None or self._arena.size < size:
            if self._arena is not None:
                self._retired.append(self._arena)  # the child still has it open
            self._arena = wire.Arena.create(size + size // 4, self._device)
            offer, fds = self._arena.offer()
        arena = self._arena
        arena.bytes[:size].fill_(wire.RED_ZONE_VALUE)
        for inputs, placed in zip(calls, slots, strict=True):
            for name, slot in placed.items():
                arena.put(slot, inputs[name])
        if self._device != "cpu":
            torch.cuda.synchronize()  # the child must not see half of it
        return arena, offer, fds

    def check_inputs(self, arena: wire.Arena, before: Tensor, slots: Sequence[dict[str, wire.Slot]]) -> None:
        """Raises: Rejected when the inputs or the red zones round them are not as they were `before`."""
        after = arena.bytes[: before.numel()]
        if torch.equal(after, before):
            return
        at = int((after != before).nonzero()[0])
        for placed in slots:
            for name, slot in placed.items():
                if slot.offset <= at < slot.offset + slot.nbytes:
                    raise Rejected(Verdict.FAIL, f"the kernel changed its input {name!r} (byte {at - slot.offset})")
        raise Rejected(Verdict.FAIL, "the kernel wrote outside its input buffers")

    def collect(self, described: dict[str, Any], offset: int, expected: TensorMeta) -> Tensor:
        """The output as a tensor of the judge's own. Raises: Rejected when it is not what `expected` says."""
        if described.get("type") != "Tensor":
            raise Rejected(Verdict.FAIL, f"returned {described.get('type')}, not a plain tensor")
        got = (tuple(described["shape"]), described["dtype"], described["device"])
        want = (expected.shape, expected.dtype, self._device)
        if got != want:
            raise Rejected(Verdict.FAIL, f"returned shape, dtype, device {got}; should be {want}")
        if described["grad"]:
            raise Rejected(Verdict.FAIL, "returned a tensor that requires grad")
        stride = tuple(described["stride"])
        if expected.numel and not any(_same_layout(expected.shape, stride, good) for good in _accepted(expected)):
            raise Rejected(Verdict.FAIL, f"returned strides {stride}; should be {_accepted(expected)[0]}")
        nbytes = expected.numel * DTYPES[expected.dtype].itemsize
        if described["storage_bytes"] > nbytes + 2 * wire.RED_ZONE_BYTES:
            raise Rejected(
                Verdict.FAIL, f"returned a view of {described['storage_bytes']} bytes for an output of {nbytes}"
            )
        assert self._arena is not None
        raw = self._arena.bytes[offset : offset + nbytes].clone()
        return raw.view(DTYPES[expected.dtype]).reshape(expected.shape)


def encode(calls: Sequence[Inputs], slots: Sequence[dict[str, wire.Slot]]) -> list[list[Any]]:
    """The calls' arguments for a message, tensors as their slots."""
    return [
        [placed[name].to_json() if name in placed else value for name, value in inputs.items()]
        for inputs, placed in zip(calls, slots, strict=True)
    ]


def _accepted(expected: TensorMeta) -> list[tuple[int, ...]]:
    """The oracle's own strides, or contiguous ones."""
    contiguous = contiguous_stride(expected.shape)
    return [expected.stride, contiguous] if expected.stride is not None else [contiguous]


def _same_layout(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Equal strides, but for dimensions of size one, whose stride means nothing."""
    return len(stride) == len(other) and all(
        size == 1 or mine == theirs for size, mine, theirs in zip(shape, stride, other, strict=True)
    )
