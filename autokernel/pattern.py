"""Match one small ATen graph inside another, from its output upwards; no op is known here by name, no number is run.

`loose` ignores literals (sizes, dims, scalars), as the pattern was traced at other sizes; `strict` wants every literal,
shape and dtype equal, as the pattern was traced again at exactly the sizes that the loose match found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from autokernel.records import Scalar

_aten = torch.ops.aten
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
_COPY = _aten.clone.default
_COMMUTATIVE = frozenset({_aten.add.Tensor, _aten.mul.Tensor})
VIEWS = _RESHAPES | {
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.alias.default,
}
_IGNORED = frozenset({"device", "layout", "pin_memory", "non_blocking", "memory_format"})
_SIZES = frozenset({"size", "end", "shape"})  # settled by comparing the results' shapes
_DIMS = frozenset({"dim", "dim0", "dim1"})
_FP32_ROUNDING = 1e-6  # some ops keep a scalar as fp32

Pair = tuple[Any, Any, Node | None, str]
"""(pattern side, graph side, the pattern's node whose argument this is, the argument's name)."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A traced spelling: its output, its placeholders with their argument names, the marks of captured scalars."""

    output: Node
    arguments: Mapping[Node, str]
    slots: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[Any]:
        """What kinds of operation it is made of."""
        return frozenset(kind_of(node) for node in self.output.graph.nodes if node.op == "call_function")


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Where a pattern was found: its nodes, its arguments, its captured scalars."""

    nodes: Mapping[Node, Node] = field(default_factory=dict)
    inputs: Mapping[str, Node] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)


def as_pattern(gm: GraphModule, names: Sequence[str], slots: Mapping[str, float | int] | None = None) -> Pattern | None:
    """The traced graph as a pattern; None unless it has exactly one output, computed by it."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (returned,) = gm.graph.output_node().args
    outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(outputs) != 1 or not isinstance(outputs[0], Node) or outputs[0].op != "call_function":
        return None
    return Pattern(output=outputs[0], arguments=dict(zip(placeholders, names, strict=True)), slots=slots or {})


def kind_of(node: Node) -> Any:
    """The node's operation; the ways to reshape count as one."""
    return _aten.view.default if node.target in _RESHAPES else node.target


def value_of(node: Node) -> Any:
    """What the node yields: a fake tensor, as the trace recorded it."""
    return node.meta.get("val")


def loose(pattern: Pattern, node: Node) -> Binding | None:
    """Where `pattern` ends in `node`, whatever the literals are, and whatever is copied on the way."""
    return next(_solve(((pattern.output, node, None, ""),), Binding(), pattern, False), None)


def strict(pattern: Pattern, node: Node) -> Binding | None:
    """Where `pattern` ends in `node`, every literal, shape and dtype being equal."""
    return next(_solve(((pattern.output, node, None, ""),), Binding(), pattern, True), None)


def _solve(pairs: tuple[Pair, ...], binding: Binding, pattern: Pattern, exact: bool) -> Iterator[Binding]:
    """All ways to make every pair equal; commutative operations are tried both ways round."""
    if not pairs:
        yield binding
        return
    (ours, theirs, parent, name), *rest = pairs
    others = tuple(rest)
    if isinstance(ours, Node):
        if isinstance(theirs, Node):
            yield from _solve_node(ours, theirs, others, binding, pattern, exact)
    elif isinstance(ours, (list, tuple)) and any(isinstance(item, Node) for item in ours):
        if isinstance(theirs, (list, tuple)) and len(theirs) == len(ours):
            items = tuple((a, b, parent, name) for a, b in zip(ours, theirs, strict=True))
            yield from _solve(items + others, binding, pattern, exact)
    elif not _holds_node(theirs):
        slot = next((key for key, mark in pattern.slots.items() if _same_number(ours, mark)), None)
        if slot is not None:
            if slot not in binding.scalars or binding.scalars[slot] == theirs:
                bound = replace(binding, scalars={**binding.scalars, slot: theirs})
                yield from _solve(others, bound, pattern, exact)
        elif not exact or _same_literal(ours, theirs, parent, name):
            yield from _solve(others, binding, pattern, exact)


def _solve_node(
    ours: Node, theirs: Node, others: tuple[Pair, ...], binding: Binding, pattern: Pattern, exact: bool
) -> Iterator[Binding]:
    if ours in pattern.arguments:
        name = pattern.arguments[ours]
        if binding.inputs.get(name, theirs) is theirs and isinstance(value_of(theirs), Tensor):
            yield from _solve(others, replace(binding, inputs={**binding.inputs, name: theirs}), pattern, exact)
        return
    if ours in binding.nodes:
        if binding.nodes[ours] is theirs:
            yield from _solve(others, binding, pattern, exact)
        return
    if theirs.op != "call_function":
        return
    if not exact and (ours.target is _COPY) != (theirs.target is _COPY):  # which strides need one is settled exactly
        past = (ours.args[0], theirs) if ours.target is _COPY else (ours, theirs.args[0])
        yield from _solve(((*past, None, ""), *others), binding, pattern, exact)
        return
    if kind_of(ours) != kind_of(theirs) or (exact and not _same_result(ours, theirs)):
        return
    bound = replace(binding, nodes={**binding.nodes, ours: theirs})
    for arguments in _arrangements(ours, theirs):
        yield from _solve(arguments + others, bound, pattern, exact)


def _arrangements(ours: Node, theirs: Node) -> Iterator[tuple[Pair, ...]]:
    mine, its = _arguments(ours), _arguments(theirs)
    names = [name for name in mine if name not in _IGNORED and (name not in _SIZES or name in its)]
    yield tuple((mine[name], its.get(name), ours, name) for name in names)
    if ours.target in _COMMUTATIVE and mine.get("alpha", 1) == 1 and its.get("alpha", 1) == 1:
        yield (mine["self"], its["other"], ours, "other"), (mine["other"], its["self"], ours, "self")


def _arguments(node: Node) -> dict[str, Any]:
    """The node's arguments by name, defaults filled in; by position where there is no schema."""
    if not isinstance(node.target, OpOverload):
        return {str(i): value for i, value in enumerate(node.args)}
    found: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if not argument.kwarg_only and i < len(node.args):
            found[argument.name] = node.args[i]
        else:
            found[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return found


def _holds_node(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, (list, tuple)) and any(isinstance(v, Node) for v in value))


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return False
    return math.isclose(a, b, rel_tol=_FP32_ROUNDING)


def _same_literal(ours: Any, theirs: Any, parent: Node | None, name: str) -> bool:
    if name in _SIZES:
        return True
    if name in _DIMS and parent is not None:
        rank = _rank(parent)
        return bool(_positive(ours, rank) == _positive(theirs, rank))
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return list(ours) == list(theirs)
    return bool(ours == theirs) or _same_number(ours, theirs)


def _rank(node: Node) -> int:
    """The larger of the ranks of the node's result and its tensors: what a negative dim counts from."""
    values = [value_of(node), *(value_of(source) for source in node.all_input_nodes)]
    return max((value.dim() for value in values if isinstance(value, Tensor)), default=1)


def _positive(dims: Any, rank: int) -> Any:
    if isinstance(dims, (list, tuple)):
        return [_positive(dim, rank) for dim in dims]
    return dims + rank if isinstance(dims, int) and dims < 0 else dims


def _same_result(ours: Node, theirs: Node) -> bool:
    a, b = value_of(ours), value_of(theirs)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.device == b.device)
