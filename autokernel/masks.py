"""Attention whose mask is a constant that hides nothing, or only the future, says so without a mask.

Models of transformers leave such masks out when they run, and build them when they are traced. PyTorch's fastest
attention takes none, so that a captured graph with them can be several times slower than the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.fold import constant_nodes, erase_unused
from autokernel.nodes import ancestors, node_value

_attention = torch.ops.aten.scaled_dot_product_attention.default
_MASK = 3  # among its arguments


def drop_plain_masks(gm: GraphModule) -> int:
    """Rewrite those calls in place; how many there were. A mask that depends on an input of `gm` is left alone."""
    constant = constant_nodes(gm)
    found = [node for node in gm.graph.nodes if node.target is _attention and _mask(node) in constant]
    needed = set().union(*(ancestors(node.args[_MASK]) for node in found))
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node in needed:
                values[node] = node_value(gm, node, values)
    dropped = sum(_drop(node, values[node.args[_MASK]]) for node in found)
    if dropped:
        erase_unused(gm, constant)
        gm.recompile()
    return dropped


def _mask(node: Node) -> Any:
    return node.args[_MASK] if len(node.args) == _MASK + 1 else None  # neither dropout nor causal beside it


def _drop(node: Node, mask: Tensor) -> bool:
    """Whether the call can do without its mask; then it does."""
    query, key, value, *_ = node.args
    seen = seen_keys(mask)
    if seen is None:
        return False
    if bool(seen.all()):
        node.args = (query, key, value)
        return True
    lengths = [argument.meta["val"].shape[-2] for argument in (query, key)]  # type: ignore[union-attr]
    if list(seen.shape[-2:]) != lengths or not is_causal(seen):
        return False
    node.args = (query, key, value, None, 0.0, True)
    return True


def lower_triangle(shape: Sequence[int], device: torch.device) -> Tensor:
    """The mask [seq, seq] of a `shape` that ends so: true where a query sees a key, which is not after it."""
    return torch.ones(shape[-2:], dtype=torch.bool, device=device).tril()


def is_causal(seen: Tensor) -> bool:
    """Whether [..., seq, seq] is true exactly on and below the diagonal, for all batches and heads."""
    square = seen.dim() >= 2 and seen.shape[-1] == seen.shape[-2]
    return square and torch.equal(seen, lower_triangle(seen.shape, seen.device).expand_as(seen))


def seen_keys(mask: Tensor) -> Tensor | None:
    """True where a key is seen, one layer of what is repeated; None where an additive mask does more than hide."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    return seen if bool((seen | hidden).all()) else None
