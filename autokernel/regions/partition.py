"""Cut a captured ATen graph into fusible regions: pointwise operations, reductions, copies and the views between them.

A region is the cone of what only its result needs: it has one result, no inner value is used elsewhere, and so no path
leaves it and comes back. Products, convolutions, attention, random numbers, writes and whatever waits for the device
stay outside, as does what depends on no input of the model (`fold` computes that once).
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.nodes import ancestors
from autokernel.occurrence import static
from autokernel.pattern import VIEWS, value_of
from autokernel.spec import DEFAULT_TOLERANCES, DTYPE_NAMES

_aten = torch.ops.aten

REGION_VIEWS = VIEWS | {
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.squeeze.default,
    _aten.squeeze.dims,
    _aten.detach.default,
}
REDUCTIONS_AND_COPIES = frozenset(
    {
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.amax.default,
        _aten.amin.default,
        _aten.var.correction,
        _aten.var_mean.correction,
        _aten.linalg_vector_norm.default,
        _aten._softmax.default,
        _aten._log_softmax.default,
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten._native_batch_norm_legit_no_training.default,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.cat.default,
        _aten.stack.default,
        _aten.repeat.default,
        _aten.constant_pad_nd.default,
        _aten.avg_pool2d.default,
        _aten.upsample_nearest2d.default,
        _aten.floor_divide.default,
        _aten.embedding.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.gather.default,
        _aten.slice_scatter.default,
        _aten.select_scatter.default,
        _aten.tril.default,
        _aten.triu.default,
        _aten.copy.default,
        _aten.fill.Scalar,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
    }
)
"""What fuses and has no pointwise tag: reductions, normalizations, copies, reads by index."""

CONSTANTS = frozenset(
    {
        _aten.full.default,
        _aten.scalar_tensor.default,
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.zeros.default,
        _aten.ones.default,
    }
)
"""Made from numbers alone: each region makes its own, whoever else uses them."""

CUTS = frozenset(
    {
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.unbind.int,
    }
)
"""Views of a piece."""

MOST_NODES = 96
MOST_INPUTS = 16
LEAST_STEPS = 2
"""Operations that compute or copy: one alone is no fusion."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """`nodes` in graph order, the last of which yields the result; `inputs` in the order in which it needs them;
    `steps` are the operations that compute or copy."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    steps: int = field(default=0)

    @property
    def output(self) -> Node:
        """The node whose value the region yields."""
        return self.nodes[-1]


def partition(gm: GraphModule, taken: Collection[Node] = ()) -> list[Region]:
    """The regions of `gm` outside of `taken`, in graph order; none shares a node with another but for constants."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    fusible = _fusible_nodes(gm, set(taken))
    claimed: set[Node] = set()
    found: list[Region] = []
    for root in reversed(list(gm.graph.nodes)):
        if root not in fusible or root in claimed or not _may_end(root):
            continue
        inside = _cone(root, order, fusible - claimed)
        claimed |= inside
        region = _region(inside, order)
        if region.steps >= LEAST_STEPS and _takes_tensors(region):
            found.append(region)
    return found[::-1]


def is_view(node: Node) -> bool:
    """Whether the node only looks at its source in another way."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return node.target in REGION_VIEWS


def region_inputs(output: Node, inside: Collection[Node]) -> tuple[Node, ...]:
    """Sources outside of `inside`, in the order of a walk upwards from the output, which equal regions share."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    todo = [output]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in inside:
            found[node] = None
        else:
            todo += reversed(node.all_input_nodes)
    return tuple(found)


def _region(inside: set[Node], order: Mapping[Node, int]) -> Region:
    nodes = tuple(sorted(inside, key=order.__getitem__))
    steps = sum(not is_view(n) and n.target is not operator.getitem and n.target not in CONSTANTS for n in nodes)
    return Region(nodes=nodes, inputs=region_inputs(nodes[-1], inside), steps=steps)


def _fusible_nodes(gm: GraphModule, taken: set[Node]) -> set[Node]:
    varying: set[Node] = set()
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
        if node in taken or not (node in varying or node.target in CONSTANTS):
            continue
        if node.op == "call_function" and _known(node.target) and _values_known(node):
            found.add(node)
    return found


def _known(target: Any) -> bool:
    if target is operator.getitem or target in REGION_VIEWS or target in REDUCTIONS_AND_COPIES or target in CONSTANTS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    tags = target.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _values_known(node: Node) -> bool:
    """Whether everything that goes in and out is a plain tensor of known sizes and a dtype that ops take."""
    values = [value_of(node), *(value_of(source) for source in node.all_input_nodes)]
    tensors = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return all(item is None or (static(item) and item.dtype in DTYPE_NAMES) for item in tensors)


def _may_end(node: Node) -> bool:
    """Whether the node can be a region's result: new memory, of a dtype that can be compared."""
    value = value_of(node)
    if is_view(node) or node.target in CONSTANTS or not isinstance(value, Tensor) or not value.numel():
        return False
    return DTYPE_NAMES[value.dtype] in DEFAULT_TOLERANCES


def _cone(root: Node, order: Mapping[Node, int], free: Collection[Node]) -> set[Node]:
    """The root and what only it needs. Later nodes come first, so that all users of a node are decided before it."""
    inside = {root}
    todo = [(-order[source], source) for source in root.all_input_nodes]
    heapq.heapify(todo)
    while todo and len(inside) < MOST_NODES:
        node = heapq.heappop(todo)[1]
        if node in inside or node not in free:
            continue
        if node.target not in CONSTANTS and any(user not in inside for user in node.users):
            continue
        larger = inside | {node}
        if len(region_inputs(root, larger)) > MOST_INPUTS:
            continue
        inside = larger
        for source in node.all_input_nodes:
            heapq.heappush(todo, (-order[source], source))
    inside -= _cuts_of_inputs(inside, order)
    # One of several results is no input to pass: whoever takes it then is outside, too.
    return {n for n in inside if n is root or n.target is not operator.getitem or n.all_input_nodes[0] in inside}


def _cuts_of_inputs(inside: set[Node], order: Mapping[Node, int]) -> set[Node]:
    """Slices and selections that come first, with the views before them: a kernel gets the piece itself, so that the
    steps of a scan, which take one piece after the other, are equal regions."""
    views: set[Node] = set()
    cuts: set[Node] = set()
    for node in sorted(inside, key=order.__getitem__):
        if is_view(node) and all(source in views or source not in inside for source in node.all_input_nodes):
            views.add(node)
            if node.target in CUTS or node.target is operator.getitem:
                cuts |= {node, *(ancestors(node) & views)}
    return cuts


def _takes_tensors(region: Region) -> bool:
    """Whether its inputs are tensors on the result's device, one of them floating (from which fp64 can start)."""
    values = [value_of(node) for node in region.inputs]
    if not values or not all(isinstance(v, Tensor) and static(v) and v.dtype in DTYPE_NAMES for v in values):
        return False
    device = value_of(region.output).device
    return all(v.device == device for v in values) and any(v.is_floating_point() for v in values)
