"""What a node of an FX graph computes, and what it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg


def node_value(gm: GraphModule, node: Node, values: Mapping[Node, Any]) -> Any:
    """Value of one constant or call of `gm`, its inputs having `values`."""
    if node.op == "get_attr":
        return getattr(gm, str(node.target))
    args = map_arg(node.args, values.__getitem__)
    kwargs = map_arg(node.kwargs, values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def ancestors(node: Node) -> set[Node]:
    """The node itself and all that it is computed from."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo += current.all_input_nodes
    return found
