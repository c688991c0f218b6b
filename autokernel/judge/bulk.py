"""Many calls in one go, each on inputs of its own, all outputs kept: what the judge times with its own clock.

A candidate's process can forge any clock in it, and skip whatever else it is asked to do between calls. Here it is
asked for nothing but results: the judge divides its own time by the number of calls and then wants to see one of the
outputs, without having said which. On a GPU the calls can also be captured, so that no host time hides in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autokernel.judge.refresh import private_copy
from autokernel.judge.wire import written_once


class Bulk:
    """The calls of one case in the candidate's process."""

    def __init__(self) -> None:
        self._sets: list[list[Any]] = []
        self._graph: Any = None
        self.outputs: list[Any] = []

    def load(self, base: Sequence[Any], steps: Sequence[int]) -> None:
        """Fill a set of arguments for each of `steps` with what `base` holds, moved on by so many steps.

        The second time the values go into the same memory, where a captured graph reads them.
        """
        fresh = [[private_copy(value, step) for value in base] for step in steps]
        if len(self._sets) != len(fresh) or not _same_kind(self._sets, fresh):
            self._sets, self._graph = fresh, None
            return
        for old, new in zip(self._sets, fresh, strict=True):
            for target, value in zip(old, new, strict=True):
                if isinstance(value, Tensor) and value.numel():
                    index = written_once(value.stride())
                    target[index].copy_(value[index])

    def run(self, kernel: Callable[..., Any]) -> None:
        """Call the kernel on every set, or replay the graph of these calls when there is one."""
        if self._graph is not None:
            self._graph.replay()
            return
        self.outputs = []  # their memory is used again
        self.outputs = [kernel(*arguments) for arguments in self._sets]

    def capture(self, kernel: Callable[..., Any]) -> None:
        """Make a CUDA graph of the calls. Raises: RuntimeError when they cannot be; the last outputs are kept then."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [kernel(*arguments) for arguments in self._sets]
        self._graph, self.outputs = graph, outputs


def _same_kind(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> bool:
    """Whether the sets hold tensors of the same kind at the same places."""
    return [_kinds(one) for one in old] == [_kinds(one) for one in new]


def _kinds(arguments: Sequence[Any]) -> list[Any]:
    return [(value.shape, value.stride(), value.dtype) for value in arguments if isinstance(value, Tensor)]
