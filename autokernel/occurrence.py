"""One occurrence of an op in a captured graph, and the op's call that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autokernel.pattern import VIEWS, Binding, kind_of, value_of
from autokernel.records import Case, Scalar, TensorMeta
from autokernel.spec import DTYPE_NAMES, DTYPES, KernelSpec, Spelling, describe

PARAMETERS = frozenset({"weight", "bias"})
"""Arguments that must be tensors of the model as they stand: `1 + weight` is another op's spelling."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One occurrence of an op in a graph.

    `inputs` maps the spelling's tensor arguments to the nodes that yield them, `scalars` are the op's; `nodes` are
    the matched nodes in graph order, the last of which yields the op's result. `case` is the op's call with the
    shapes, dtypes and strides that the graph recorded.
    """

    op: str
    spelling: Spelling
    nodes: tuple[Node, ...]
    inputs: Mapping[str, Node]
    scalars: Mapping[str, Scalar]
    case: Case

    @property
    def output(self) -> Node:
        """The node whose value the op yields."""
        return self.nodes[-1]

    @property
    def size(self) -> int:
        """Number of matched nodes that do something."""
        return sum(kind_of(node) not in VIEWS for node in self.nodes)


def static(value: Any) -> bool:
    """Whether the value is a tensor whose sizes and strides are all known."""
    return isinstance(value, Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def as_match(
    spec: KernelSpec,
    spelling: Spelling,
    nodes: tuple[Node, ...],
    binding: Binding,
    scalars: Mapping[str, Scalar],
    searched: Container[Node],
) -> Match | None:
    """The match, unless an inner value is used elsewhere in `searched`, a parameter is computed, or the op takes no
    such tensors."""
    inside = set(nodes)
    for node in nodes[:-1]:
        if kind_of(node) not in VIEWS and any(user in searched and user not in inside for user in node.users):
            return None
    if any(name in PARAMETERS and not _is_model_tensor(source) for name, source in binding.inputs.items()):
        return None
    case = _case(spec, spelling, binding, scalars)
    if case is None:
        return None
    return Match(
        op=spec.op, spelling=spelling, nodes=nodes, inputs=dict(binding.inputs), scalars=case.scalars, case=case
    )


def _is_model_tensor(node: Node) -> bool:
    while node.op == "call_function" and kind_of(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def _case(spec: KernelSpec, spelling: Spelling, binding: Binding, scalars: Mapping[str, Scalar]) -> Case | None:
    tensors: dict[str, TensorMeta] = {}
    for name in spec.signature.parameters:
        if name in binding.inputs:
            value = value_of(binding.inputs[name])
            adapter = spelling.adapters.get(name)
            try:
                tensors[name] = describe(adapter.back(_meta(value)) if adapter and adapter.back else value)
            except (KeyError, RuntimeError):  # a dtype that no op takes, or a shape that cannot be adapted
                return None
    floats = {meta.dtype for meta in tensors.values() if DTYPES[meta.dtype].is_floating_point}
    if len(floats) != 1:
        return None  # no op of ours mixes floating dtypes
    (dtype,) = floats
    if not _spelled_in(spelling, binding, dtype):
        return None
    rank = len(next(iter(tensors.values())).shape)
    if scalars.get("dim") == rank - 1:
        scalars = {**scalars, "dim": -1}
    full = {n: scalars.get(n, p.default) for n, p in spec.signature.parameters.items() if n not in tensors}
    if any(value is inspect.Parameter.empty for value in full.values()):
        return None
    return Case(op=spec.op, name="recorded", dtype=dtype, tensors=tensors, scalars=full)


def _spelled_in(spelling: Spelling, binding: Binding, dtype: str) -> bool:
    """Whether adapted arguments have the dtypes that the spelling means: a boolean mask is no additive one."""
    return all(
        DTYPE_NAMES.get(value_of(binding.inputs[name]).dtype) == (adapter.dtype or dtype)
        for name, adapter in spelling.adapters.items()
    )


def _meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
