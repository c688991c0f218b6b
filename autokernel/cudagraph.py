"""What runs a graph with kernels in it, recorded once as a CUDA graph and replayed: no launch waits for the host then.

For models whose kernels are shorter than their launches. The model's own tensors are read where they lie; other inputs
are copied into the recording's memory, and results out of it, so that a call gives new tensors as ever. What cannot be
recorded (it waits for the device, or reads memory of the host) runs as it is. Conditions that adapters ask of the
model's own tensors are asked when it is recorded, and anew when such a tensor was written to (not through `.data`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.nodes import ancestors
from autokernel.sites import Check, Replacement
from autokernel.usercode import first_line

_log = logging.getLogger(__name__)

WARM_CALLS = 2
"""Before a recording: Triton compiles, and libraries choose kernels and take memory, in a first call."""

Run = Callable[..., Any]


def unrecordable(gm: GraphModule) -> str | None:
    """Why the graph cannot be recorded, as far as that shows in it; None when it may be."""
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if not any(value.device.type == "cuda" for value in tensors):
        return "it is not on a GPU"
    if not all(value.device.type == "cuda" for value in tensors):
        return "one of its inputs is in the host's memory"
    return None


def conditions(gm: GraphModule) -> tuple[list[Check], frozenset[int]]:
    """The adapters' conditions in the graph, and the numbers of the inputs on which their answers depend."""
    asked = [node for node in gm.graph.nodes if isinstance(node.target, Check)]
    needed = set[Node]().union(*map(ancestors, asked))
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [node.target for node in asked], frozenset(i for i, node in enumerate(placeholders) if node in needed)


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A CUDA graph with the inputs that it reads, its outputs, and the calls and fallbacks that one replay stands for.

    `statics` are the numbers of the inputs that are read where they lie, with the addresses that they had; `versions`
    those on which conditions depend, with PyTorch's count of writes to them.
    """

    graph: Any
    inputs: Sequence[Any]
    statics: dict[int, int]
    versions: dict[int, int]
    outputs: Any
    counted: Sequence[tuple[int, int]]

    def fits(self, inputs: Sequence[Any]) -> bool:
        still = all(inputs[number].data_ptr() == address for number, address in self.statics.items())
        return still and all(inputs[number]._version == version for number, version in self.versions.items())

    def replay(self, inputs: Sequence[Any], counters: Sequence[Replacement]) -> Any:
        for number, (ours, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if number not in self.statics and isinstance(ours, Tensor):
                _flat(ours).copy_(_flat(given))  # of one layout, by Dynamo's guards
        self.graph.replay()
        for counter, (calls, fallbacks) in zip(counters, self.counted, strict=True):
            counter.calls += calls
            counter.fallbacks += fallbacks
        if isinstance(self.outputs, (list, tuple)):
            return [_copied(value) for value in self.outputs]
        return _copied(self.outputs)


class Recorded:
    """`run` of one graph, recorded at its first call, and again whenever other kernels are enabled or the model's
    tensors have moved; `wanted` is asked at each call. `asked` are the graph's `conditions`."""

    def __init__(
        self,
        run: Run,
        counters: Sequence[Replacement],
        wanted: Callable[[], bool],
        asked: tuple[Sequence[Check], frozenset[int]],
    ) -> None:
        self._run, self._counters, self._wanted = run, counters, wanted
        self._checks, self._deciding = asked
        self._recordings: dict[tuple[bool, ...], _Recording] = {}
        self.refused: str | None = None
        """Why it is not recorded, once that was tried."""

    def __call__(self, *inputs: Any) -> Any:
        if self.refused or not self._wanted() or torch.cuda.is_current_stream_capturing():
            return self._run(*inputs)
        key = tuple(counter.enabled for counter in self._counters)
        recording = self._recordings.get(key)
        if recording is None or not recording.fits(inputs):
            self._recordings.pop(key, None)  # its memory first
            recording = self._try_to_record(inputs)
            if recording is None:
                return self._run(*inputs)
            self._recordings[key] = recording
        return recording.replay(inputs, self._counters)

    def release(self) -> None:
        """Free the recordings."""
        self._recordings.clear()

    def _try_to_record(self, inputs: Sequence[Any]) -> _Recording | None:
        before = self._counts()
        try:
            return self._record(inputs)
        except Exception as error:  # what a stream that is captured does not allow has no common class
            self.refused = f"{type(error).__name__}: {first_line(error)}"
            _log.warning("a graph is not recorded as a CUDA graph: %s", self.refused)
            torch.cuda.synchronize()
            return None
        finally:  # none of these calls was the model's
            for counter, (calls, fallbacks) in zip(self._counters, before, strict=True):
                counter.calls, counter.fallbacks = calls, fallbacks

    def _counts(self) -> list[tuple[int, int]]:
        return [(counter.calls, counter.fallbacks) for counter in self._counters]

    def _record(self, inputs: Sequence[Any]) -> _Recording:
        statics = {number: value.data_ptr() for number, value in enumerate(inputs) if _lies_still(value)}
        if not self._deciding <= statics.keys():
            raise RuntimeError("a condition on its inputs is asked in every forward")
        own = [value if number in statics else _copied(value) for number, value in enumerate(inputs)]
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_CALLS):
                self._run(*own)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        before = self._counts()
        with _frozen(self._checks), torch.cuda.graph(graph):
            outputs = self._run(*own)
        counted = [(now[0] - then[0], now[1] - then[1]) for now, then in zip(self._counts(), before, strict=True)]
        versions = {number: inputs[number]._version for number in self._deciding}
        return _Recording(graph=graph, inputs=own, statics=statics, versions=versions, outputs=outputs, counted=counted)


@contextlib.contextmanager
def _frozen(checks: Sequence[Check]) -> Iterator[None]:
    for check in checks:
        check.frozen = True
    try:
        yield
    finally:
        for check in checks:
            check.frozen = False


def _lies_still(value: Any) -> bool:
    """Whether an input is a tensor of the model's: Dynamo marks those that a module holds."""
    marked = isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None
    return isinstance(value, Tensor) and marked


def _copied(value: Any) -> Any:
    """A tensor in memory of its own, with the same strides; other values as they are."""
    return _flat(value).clone().as_strided(value.shape, value.stride()) if isinstance(value, Tensor) else value


def _flat(value: Tensor) -> Tensor:
    """All that the tensor covers of its memory as one dimension, also where its elements overlap."""
    spans = [(size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)]
    return value.as_strided((1 + sum(spans) if value.numel() else 0,), (1,))
