"""A product with a bias, seen as a product and a sum: F.linear with a bias is one `addmm` in a captured graph.

No op of ours adds a bias to a product, so `split_biases` shows the product alone to whoever looks for ops in the graph,
and `join_biases` puts back what nobody took, so that it runs as the model's author wrote it.
"""

from __future__ import annotations

import torch
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
        product, bias = total.args
        if product.target is not _aten.mm.default or len(product.users) > 1:
            continue
        with gm.graph.inserting_before(total):
            joined = gm.graph.call_function(_aten.addmm.default, (bias, *product.args))
        joined.meta = {key: value for key, value in total.meta.items() if key != _SPLIT}
        total.replace_all_uses_with(joined)
        gm.graph.erase_node(total)
        gm.graph.erase_node(product)
        count += 1
    if count:
        gm.recompile()
    return count


def _plain(node: Node) -> bool:
    """Whether nothing is scaled, and the result has the bias's dtype and the product's size."""
    bias = node.args[0]
    scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    same = isinstance(bias, Node) and bias.meta["val"].dtype == node.meta["val"].dtype
    return same and not scaled and bias.meta["val"].dim() == 1  # type: ignore[union-attr]
