"""A product with a bias, seen as a product and a sum: F.linear with a bias is one `addmm` in a captured graph.

No op of ours adds a bias to a product, so `split_biases` shows the product alone to whoever looks for ops in the graph,
and `join_biases` puts back what nobody took, so that it runs as the model's author wrote it. So does a place that was
taken, while its kernel is switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
_SPLIT = "autokernel_split"


def split_biases(gm: GraphModule) -> int:
    """Replace each plain `addmm` by `mm` and `add`, in place; how many there were."""
    found = [node for node in gm.graph.nodes if node.target is _aten.addmm.default and _plain(node)]
    for node in found:
        bias, a, b = node.args
        with gm.graph.inserting_before(node):
            product = gm.graph.call_function(_aten.mm.default, (a, b))
            total = gm.graph.call_function(_aten.add.Tensor, (product, bias))
        product.meta = dict(node.meta)  # of the same shape, dtype and strides
        total.meta = {**node.meta, _SPLIT: True}
        node.replace_all_uses_with(total)
        gm.graph.erase_node(node)
    if found:
        gm.recompile()
    return len(found)


def join_biases(gm: GraphModule) -> int:
    """Undo `split_biases` in place where the product is still there and used for the sum alone; how often that was."""
    count = 0
    for total in list(gm.graph.nodes):
        if _SPLIT not in total.meta or not isinstance(total.args[0], Node):
            continue
        product = total.args[0]
        if product.target is not _aten.mm.default or len(product.users) > 1:
            continue
        _put_for_both(gm, product, total, _aten.addmm.default)
        count += 1
    if count:
        gm.recompile()
    return count


class _WithBias:
    """A product's place and the sum after it; while the kernel is switched off, PyTorch's own `addmm`.

    Without it, a kernel would be compared with a product and a sum, which the model never ran.
    """

    def __init__(self, site: Any) -> None:
        self.__name__ = site.__name__
        self._site = site
        self._a, self._b = site.position("a"), site.position("b")

    def __call__(self, bias: Tensor, *arguments: Any) -> Tensor:
        if not self._site.enabled:
            return torch.addmm(bias, arguments[self._a], arguments[self._b])
        total: Tensor = self._site(*arguments) + bias
        return total


def add_biases_in_sites(gm: GraphModule) -> int:
    """Make each place of a kernel (`replace.Site`) and the sum that was split off it one call, in place; how many."""
    count = 0
    for total in list(gm.graph.nodes):
        product = total.args[0] if _SPLIT in total.meta else None
        if not isinstance(product, Node) or not hasattr(product.target, "position") or len(product.users) > 1:
            continue
        _put_for_both(gm, product, total, _WithBias(product.target))
        count += 1
    if count:
        gm.recompile()
    return count


def _put_for_both(gm: GraphModule, product: Node, total: Node, target: Callable[..., Any]) -> None:
    """Replace the product and the sum after it by one call, of the bias and then the product's arguments."""
    with gm.graph.inserting_before(total):
        call = gm.graph.call_function(target, (total.args[1], *product.args))
    call.meta = {key: value for key, value in total.meta.items() if key != _SPLIT}
    total.replace_all_uses_with(call)
    gm.graph.erase_node(total)
    gm.graph.erase_node(product)


def _plain(node: Node) -> bool:
    """Whether nothing is scaled, and the result has the bias's dtype and the product's size."""
    bias = node.args[0]
    scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    same = isinstance(bias, Node) and bias.meta["val"].dtype == node.meta["val"].dtype
    return same and not scaled and bias.meta["val"].dim() == 1  # type: ignore[union-attr]
