"""Compute once what a captured graph computes anew: from constants alone, or in every layer.

A transformers model that is traced builds its causal mask with a dozen operations in every forward. None of them reads
an input, so their result is stored in the graph; a check of the mask's values then is no device synchronization either.
What is checked of an input, such as the tables of a rotary embedding, is checked once and not for every layer's view of
it: on a GPU each check waits for all work before it.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autokernel.nodes import ancestors, node_value


def fold_constants(gm: GraphModule) -> int:
    """Replace what depends on no input of `gm` by its value, in place; the number of values that are stored.

    Left alone: random numbers, operations with effects, and what the graph returns, which the caller may write to.
    """
    constant = constant_nodes(gm)
    returned = _returned(gm, constant)
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node in constant:
                values[node] = node_value(gm, node, values)
    stored = [
        node
        for node, value in values.items()
        if node.op != "get_attr"
        and node not in returned
        and (value is None or isinstance(value, Tensor))
        and any(user not in constant for user in node.users)
    ]
    for number, node in enumerate(stored):
        _replace(gm, node, values[node], f"_folded_{number}")
    erase_unused(gm, constant)
    gm.recompile()
    return len(stored)


def constant_nodes(gm: GraphModule) -> set[Node]:
    """Nodes without an input of the graph among their ancestors, which give the same value each time."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        known = node.op == "get_attr" or (node.op == "call_function" and _repeatable(node.target))
        if known and all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def erase_unused(gm: GraphModule, nodes: Container[Node]) -> None:
    """Remove those of the nodes that nobody reads any more; the graph is not recompiled."""
    for node in reversed(list(gm.graph.nodes)):
        if node in nodes and not node.users:
            gm.graph.erase_node(node)


def share_repeated(gm: GraphModule) -> int:
    """Compute equal views of one tensor, and repeatable calls on it, once, in place; the number of nodes removed.

    Other operations are left alone: their results have memory of their own, which a caller may write to.
    """
    first: dict[tuple[Any, str, str], Node] = {}
    removed = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not _shareable(node.target):
            continue
        same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)  # names of nodes are unique
        if same is not node:
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
            removed += 1
    gm.recompile()
    return removed


def _shareable(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        aliases = [result.alias_info for result in target._schema.returns]
        return (
            bool(aliases)
            and not target._schema.is_mutable
            and all(alias is not None and not alias.is_write for alias in aliases)
        )
    return _repeatable(target)


def _repeatable(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable
    return target is operator.getitem or bool(getattr(target, "repeatable", False))


def _returned(gm: GraphModule, constant: set[Node]) -> set[Node]:
    """The constant nodes that reach the graph's output through constant nodes only."""
    ends = [node for node in gm.graph.output_node().all_input_nodes if node in constant]
    return set().union(*map(ancestors, ends))  # what a constant is computed from is constant, too


def _replace(gm: GraphModule, node: Node, value: Tensor | None, name: str) -> None:
    """Have the users of `node` read `value`, by the name of an attribute when it is a tensor."""
    if value is None:
        for user in list(node.users):
            user.args = map_arg(user.args, lambda arg: None if arg is node else arg)
        return
    gm.register_buffer(name, value, persistent=False)
    with gm.graph.inserting_before(node):
        read = gm.graph.get_attr(name)
    read.meta = dict(node.meta)
    node.replace_all_uses_with(read)
