"""Find a region's places in any captured graph: the same calls on tensors of the same layouts, node by node.

Equal calls on equal layouts compute the same, so there is nothing to prove by numbers here.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.utils import _pytree as pytree

from autokernel.occurrence import Match, static
from autokernel.pattern import value_of
from autokernel.regions.partition import CONSTANTS, is_view
from autokernel.spec import DTYPE_NAMES, KernelSpec, describe


def find_regions(gm: GraphModule, specs: Iterable[KernelSpec], taken: Collection[Node]) -> Iterator[Match]:
    """The places of captured subgraphs in `gm`, those of the largest first: a small one may be a part of a large one.

    None shares a computing node with `taken` or with another.
    """
    used = set(taken)
    for spec in sorted(specs, key=lambda spec: -len(_pattern(spec.spellings[0].fn).nodes)):
        yield from _places(gm, spec, used)


def _places(gm: GraphModule, spec: KernelSpec, used: set[Node]) -> Iterator[Match]:
    """The places of one, in graph order; their nodes are added to `used`."""
    pattern = _pattern(spec.spellings[0].fn)
    (end,) = pattern.output_node().all_input_nodes
    for node in list(gm.graph.nodes):
        if node.target != end.target:
            continue
        match = _match(spec, pattern, end, node)
        if match is None:
            continue
        core = {inner for inner in match.nodes if not is_view(inner) and inner.target not in CONSTANTS}
        if not core & used:
            used |= core
            yield match


def calls_of(captured: Callable[..., Tensor]) -> GraphModule:
    """The ATen calls of a region's function as a graph; those that take no tensor among them."""
    graph = Graph()
    arguments = [Proxy(graph.placeholder(name)) for name in inspect.signature(captured).parameters]
    names = {**captured.__globals__, "aten": _Recorder(graph, torch.ops.aten)}
    recording = types.FunctionType(captured.__code__, names, captured.__name__, None, captured.__closure__)
    graph.output(recording(*arguments).node)
    return GraphModule({}, graph)


class _Recorder:
    """`aten`, whose operators are written down and not called."""

    def __init__(self, graph: Graph, namespace: Any) -> None:
        self._graph, self._namespace = graph, namespace

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._namespace, name)
        return self._call(found) if isinstance(found, torch._ops.OpOverload) else _Recorder(self._graph, found)

    def _call(self, target: torch._ops.OpOverload) -> Callable[..., Proxy]:
        def call(*args: Any, **kwargs: Any) -> Proxy:
            node = self._graph.call_function(target, *pytree.tree_map(_as_node, (args, kwargs)))
            return Proxy(node)

        return call


def _as_node(value: Any) -> Any:
    return value.node if isinstance(value, Proxy) else value


@functools.cache
def _pattern(captured: Callable[..., Tensor]) -> Graph:
    return calls_of(captured).graph


def _match(spec: KernelSpec, pattern: Graph, end: Node, node: Node) -> Match | None:
    bound = _bind(end, node)
    if bound is None:
        return None
    inputs = {str(ours.target): theirs for ours, theirs in bound.items() if ours.op == "placeholder"}
    inner = {theirs for ours, theirs in bound.items() if ours.op == "call_function"}
    case = spec.cases[0]
    for name, meta in case.tensors.items():
        value = value_of(inputs[name]) if name in inputs else None
        if not (isinstance(value, Tensor) and static(value) and value.dtype in DTYPE_NAMES and describe(value) == meta):
            return None
    if inner & set(inputs.values()) or any(_escapes(each, node, inner) for each in inner):
        return None
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    return Match(
        op=spec.op,
        spelling=spec.spellings[0],
        nodes=tuple(sorted(inner, key=order.__getitem__)),
        inputs={name: inputs[name] for name in case.tensors},
        scalars={},
        case=case,
    )


def _escapes(node: Node, output: Node, inside: Collection[Node]) -> bool:
    """Whether an inner value is needed elsewhere; a view or a constant can be made there as well."""
    if node is output or is_view(node) or node.target in CONSTANTS:
        return False
    return any(user not in inside for user in node.users)


def _bind(end: Node, node: Node) -> dict[Node, Node] | None:
    """The pattern's nodes with those of the graph that they stand for, when the pattern ends in `node`."""
    bound: dict[Node, Node] = {}
    todo: list[tuple[Any, Any]] = [(end, node)]
    while todo:
        ours, theirs = todo.pop()
        if isinstance(ours, Node):
            if not isinstance(theirs, Node) or bound.get(ours, theirs) is not theirs:
                return None
            if ours in bound:
                continue
            bound[ours] = theirs
            if ours.op != "placeholder":
                if not _alike(ours, theirs):
                    return None
                todo += zip(ours.args, theirs.args, strict=True)
                todo += [(value, theirs.kwargs[name]) for name, value in ours.kwargs.items()]
        elif isinstance(ours, (list, tuple)):
            if not isinstance(theirs, (list, tuple)) or len(ours) != len(theirs):
                return None
            todo += zip(ours, theirs, strict=True)
        elif isinstance(theirs, Node) or not _same(ours, theirs):
            return None
    return bound


def _alike(ours: Node, theirs: Node) -> bool:
    """Whether both are the same call, whatever its arguments are."""
    same = theirs.op == "call_function" and theirs.target == ours.target
    return same and len(theirs.args) == len(ours.args) and set(theirs.kwargs) == set(ours.kwargs)


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.device) and isinstance(theirs, torch.device):
        return ours.type == theirs.type
    if isinstance(ours, float) and isinstance(theirs, float) and ours != ours:
        return theirs != theirs
    return type(ours) is type(theirs) and bool(ours == theirs)
