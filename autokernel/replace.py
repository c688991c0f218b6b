"""Put kernels in the place of matched ops in a captured graph, with the original beside each as the way back.

A kernel is called only for the exact calls it was verified on (shapes, dtypes, strides, scalars); everything else runs
what the model's author wrote. Calls and fallbacks are counted. Files and run directories are not known here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autokernel.biases import add_biases_in_sites, join_biases
from autokernel.capture import Backend, inference_backend
from autokernel.fold import fold_constants, share_repeated
from autokernel.loading import get_spec
from autokernel.match import Match, Matcher
from autokernel.records import Case
from autokernel.spec import Adapter

_log = logging.getLogger(__name__)

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


@dataclass(kw_only=True)
class Replacer:
    """A torch.compile backend's state: the kernels by op, and how the graphs that it saw were treated."""

    replacements: Mapping[str, Replacement]
    inference_graphs: int = 0
    training_graphs: int = 0
    matcher: Matcher = field(init=False)

    def __post_init__(self) -> None:
        self.matcher = Matcher(ops=tuple(self.replacements))

    @property
    def backend(self) -> Backend:
        """What to give to `compile_call`."""
        return inference_backend(self._compile, on_training=self._saw_training)

    def _compile(self, gm: GraphModule) -> Callable[..., Any]:
        self.inference_graphs += 1
        left: Counter[str] = Counter()
        adapted: dict[tuple[int, Node], Node] = {}
        moved: dict[Node, Node] = {}
        for match in self.matcher.find(gm):
            replacement = self.replacements[match.op]
            if replacement.verified(match.case):
                inputs = {name: moved.get(node, node) for name, node in match.inputs.items()}
                moved[match.output] = _insert(gm.graph, replace(match, inputs=inputs), replacement, adapted)
            else:
                left[match.op] += 1
        join_biases(gm)
        add_biases_in_sites(gm)
        fold_constants(gm)
        share_repeated(gm)
        gm.graph.lint()
        return self._counting(gm.forward, left) if left else gm.forward

    def _counting(self, run: Callable[..., Any], left: Mapping[str, int]) -> Callable[..., Any]:
        def counted(*inputs: Any) -> Any:
            for op, count in left.items():
                if self.replacements[op].enabled:
                    self.replacements[op].fallbacks += count
            return run(*inputs)

        return counted

    def _saw_training(self) -> None:
        if not self.training_graphs:
            _log.warning(
                "the model runs with gradients: kernels have no backward and are not used; use torch.no_grad()"
            )
        self.training_graphs += 1


class Site:
    """One place in a graph where a kernel stands for the original nodes."""

    def __init__(self, match: Match, replacement: Replacement) -> None:
        self.__name__ = f"autokernel_{match.op}"  # the name of its node in the graph
        self._replacement = replacement
        self._original = _original(match)
        self._spelled = tuple(match.inputs)
        self._layouts = tuple(_layout(node.meta["val"]) for node in match.inputs.values())
        self._result = _layout(match.output.meta["val"])
        self._guard = _device_guard(match.output.meta["val"].device)
        names = list(get_spec(match.op).signature.parameters)
        self._arity = len(match.case.tensors)
        self._scalars = tuple(match.case.scalars[name] for name in names if name not in match.case.tensors)

    @property
    def enabled(self) -> bool:
        """Whether the kernel is to be called at all."""
        return self._replacement.enabled

    def position(self, name: str) -> int:
        """Which of the arguments of a call is this one of the spelling."""
        return self._spelled.index(name)

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """The op's result; `tensors` are the spelling's arguments, then the op's own, then those only to be checked."""
        count = len(self._spelled)
        spelled, adapted = tensors[:count], tensors[count:]
        if not self._replacement.enabled:
            return self._run_original(spelled)
        if any(value is None for value in adapted) or any(
            _layout(value) != layout for value, layout in zip(spelled, self._layouts, strict=True) if value is not None
        ):
            self._replacement.fallbacks += 1
            return self._run_original(spelled)
        self._replacement.calls += 1
        with self._guard():
            result = self._replacement.kernel_fn(*adapted[: self._arity], *self._scalars)
        return self._checked(result)

    def _run_original(self, spelled: Sequence[Tensor | None]) -> Tensor:
        result: Tensor = self._original(*spelled)
        return result

    def _checked(self, result: Tensor) -> Tensor:
        """The kernel's result with the strides that the rest of the graph relies on."""
        shape, stride, dtype = self._result
        if result.shape != shape or result.dtype is not dtype:
            raise RuntimeError(
                f"the kernel for {self._replacement.op} returned {tuple(result.shape)} {result.dtype}, "
                f"not {tuple(shape)} {dtype}"
            )
        if result.stride() == stride or result.numel() == 0:
            return result
        out = torch.empty_strided(shape, stride, dtype=dtype, device=result.device)
        return out.copy_(result)


class _Checked:
    """Turns a spelled argument into the op's own, or passes one that the op has not; None when the adapter's condition
    does not hold for these values."""

    repeatable = True  # a constant is checked once, and one tensor once a forward

    def __init__(self, name: str, adapter: Adapter) -> None:
        self.__name__ = f"autokernel_{name}"
        self._adapter = adapter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Checked) and self._adapter is other._adapter

    def __hash__(self) -> int:
        return id(self._adapter)

    def __call__(self, value: Tensor) -> Tensor | None:
        if not self._adapter.holds(value):
            return None
        return self._adapter.back(value) if self._adapter.back else value


def _insert(graph: Graph, match: Match, replacement: Replacement, adapted: dict[tuple[int, Node], Node]) -> Node:
    """Replace the matched nodes by one call, and return it; arguments that several matches adapt are computed once."""
    output = match.output
    own = [name for name in get_spec(match.op).signature.parameters if name in match.case.tensors]
    checked = [name for name in match.spelling.adapters if name not in own]
    with graph.inserting_before(output):
        arguments = [_adapted(graph, name, match, adapted) for name in (*own, *checked)]
        site = graph.call_function(Site(match, replacement), (*match.inputs.values(), *arguments))
    site.meta = dict(output.meta)
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
        adapted[id(adapter), node] = graph.call_function(_Checked(name, adapter), (node,))
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
