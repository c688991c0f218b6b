"""A kernel's place in a captured graph: the call that stands for the original nodes, which stay as the way back.

A kernel is called only for the exact calls it was verified on (shapes, dtypes, strides, scalars); everything else runs
what the model's author wrote. Calls and fallbacks are counted. Files and run directories are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autokernel.biases import whole
from autokernel.loading import get_spec, is_captured
from autokernel.match import Match
from autokernel.records import Case
from autokernel.spec import Adapter

T = TypeVar("T")

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(kw_only=True)
class Replacement:
    """A kernel for one op, and what became of it.

    `calls` counts runs of the kernel, `fallbacks` occurrences of the op that ran the original instead: another shape
    than those verified, a guard that did not hold. A disabled one always runs the original and counts nothing.
    """

    op: str
    kernel_fn: Callable[..., Tensor]
    cases: Sequence[Case]
    enabled: bool = True
    calls: int = 0
    fallbacks: int = 0
    _keys: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._keys = frozenset(case.key for case in self.cases)

    def verified(self, case: Case) -> bool:
        """Whether exactly this call was verified."""
        return case.key in self._keys


class Site:
    """One place in a graph where a kernel stands for the original nodes."""

    def __init__(self, match: Match, replacement: Replacement) -> None:
        self.__name__ = f"autokernel_{match.op}"  # the name of its node in the graph
        self._replacement = replacement
        self._original = _original(match)
        self._spelled = tuple(match.inputs)
        self._layouts = tuple(_layout(node.meta["val"]) for node in match.inputs.values())
        self._result = _layout(match.output.meta["val"])
        self._device = match.output.meta["val"].device
        self._guard = _device_guard(self._device)
        names = list(get_spec(match.op).signature.parameters)
        self._own = [name for name in names if name in match.case.tensors]
        self.arity = len(self._own)
        self._scalars = tuple(match.case.scalars[name] for name in names if name not in match.case.tensors)

    @property
    def text(self) -> str:
        """What a caller can tell of it before it runs: places of equal text take and return tensors of one layout."""
        return repr((self._layouts, self._result, str(self._device), self._scalars))

    def split(self, arguments: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """The spelling's arguments; the op's own and then those only to be checked."""
        return arguments[: len(self._spelled)], arguments[len(self._spelled) :]

    @property
    def enabled(self) -> bool:
        """Whether the kernel is to be called at all."""
        return self._replacement.enabled

    def position(self, name: str) -> int:
        """Which of the arguments of a call is this one of the spelling."""
        return self._spelled.index(name)

    def positions(self, name: str) -> tuple[int, ...]:
        """Which of the arguments of a call are this one: as the spelling takes it, and where that is known, the op."""
        own = self._own.index(name) if name in self._own else None
        return (self.position(name), *(() if own is None else (len(self._spelled) + own,)))

    @property
    def original(self) -> GraphModule | None:
        """What the model's author wrote for a captured subgraph, from the spelling's arguments."""
        return self._original if is_captured(self._replacement.op) else None

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """The op's result; `tensors` are the spelling's arguments, then the op's own, then those only to be checked."""
        spelled, adapted = self.split(tensors)
        held = [value for value in adapted if value is not None]
        return self.run(spelled, held[: self.arity] if len(held) == len(adapted) else None)

    def run(self, spelled: Sequence[Tensor | None], own: Sequence[Tensor] | None) -> Tensor:
        """The op's result from its own arguments; from the spelling's where those are None, as a check failed."""
        if not self._replacement.enabled:
            return self._run_original(spelled)
        if own is None or any(
            _layout(value) != layout for value, layout in zip(spelled, self._layouts, strict=True) if value is not None
        ):
            self._replacement.fallbacks += 1
            return self._run_original(spelled)
        self._replacement.calls += 1
        with self._guard():
            result = self._replacement.kernel_fn(*own, *self._scalars)
        shape, _, dtype = self._result
        if result.shape != shape or result.dtype is not dtype:
            raise RuntimeError(
                f"the kernel for {self._replacement.op} returned {tuple(result.shape)} {result.dtype}, "
                f"not {tuple(shape)} {dtype}"
            )
        return self.laid_out(result)

    def laid_out(self, result: Tensor) -> Tensor:
        """`result` with the strides that the rest of the graph relies on."""
        if result.stride() == self._result[1] or result.numel() == 0:
            return result
        return self.empty().copy_(result)

    def empty(self) -> Tensor:
        """A tensor like the result, of any values."""
        shape, stride, dtype = self._result
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)

    def _run_original(self, spelled: Sequence[Tensor | None]) -> Tensor:
        result: Tensor = self._original(*spelled)
        return result


class Check:
    """Turns a spelled argument into the op's own, or passes one that the op has not; None when the adapter's condition
    does not hold for these values."""

    repeatable = True  # a constant is checked once, and one tensor once a forward

    def __init__(self, name: str, adapter: Adapter) -> None:
        self.__name__ = f"autokernel_{name}"
        self._adapter = adapter
        self.back = adapter.back
        self.frozen = False
        """Answer as the last time: what is asked for waits for the device."""
        self._held = False
        self.text = ""  # its result is one truth value, whatever it checks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Check) and self._adapter is other._adapter

    def __hash__(self) -> int:
        return id(self._adapter)

    def holds(self, value: Tensor) -> bool:
        """Whether the adapter's condition holds."""
        if not self.frozen:
            self._held = self._adapter.holds(value)
        return self._held

    def __call__(self, value: Tensor) -> Tensor | None:
        if not self.holds(value):
            return None
        return self.back(value) if self.back else value


def insert(graph: Graph, match: Match, replacement: Replacement, adapted: dict[tuple[int, Node], Node]) -> Node:
    """Replace the matched nodes by one call, and return it; arguments that several matches adapt are computed once."""
    output = match.output
    own = [name for name in get_spec(match.op).signature.parameters if name in match.case.tensors]
    checked = [name for name in match.spelling.adapters if name not in own]
    with graph.inserting_before(output):
        arguments = [_adapted(graph, name, match, adapted) for name in (*own, *checked)]
        site = graph.call_function(Site(match, replacement), (*match.inputs.values(), *arguments))
    site.meta = whole(output.meta)
    output.replace_all_uses_with(site)
    for node in reversed(match.nodes):
        if not node.users:
            graph.erase_node(node)
    return site


def _adapted(graph: Graph, name: str, match: Match, adapted: dict[tuple[int, Node], Node]) -> Node:
    node = match.inputs[name]
    adapter = match.spelling.adapters.get(name)
    if adapter is None:
        return node
    if (id(adapter), node) not in adapted:
        check = graph.call_function(Check(name, adapter), (node,))
        check.meta = dict(node.meta)
        adapted[id(adapter), node] = check
    return adapted[id(adapter), node]


def _original(match: Match) -> GraphModule:
    """The matched nodes as a graph of their own, from the spelling's arguments to the op's result."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for name, node in match.inputs.items():
        placeholder = graph.placeholder(name)
        copies.setdefault(node, placeholder)  # two arguments may be one tensor
    for node in match.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[match.output])
    return GraphModule({}, graph)


def _layout(value: Tensor) -> Layout:
    return value.shape, value.stride(), value.dtype


def _device_guard(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if device.type == "cuda":
        return lambda: torch.cuda.device(device)
    return nullcontext
