"""A product with a bias, seen as a product and a sum: F.linear with a bias is one `addmm` in a captured graph.

No op of ours adds a bias to a product, so `split_biases` shows the product alone to whoever looks for ops in the graph,
and `join_biases` puts back what nobody took, so that it runs as the model's author wrote it. So does a place that was
taken, while its kernel is switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

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


class _FromFactors:
    """Products and a place that begins with the sums which were split off them; while its kernel is switched off,
    PyTorch's own `addmm` and the rest of the original.

    Its arguments are both factors of each product, then the place's own without the products.
    """

    def __init__(self, site: Any, products: Sequence[str]) -> None:
        self.__name__ = site.__name__
        self._site = site
        self._original = _with_addmm(site.original, products)
        self._at = sorted(position for name in products for position in site.positions(name))
        self._spelled = len(site.original.graph.find_nodes(op="placeholder")) - len(products)
        self._products = [site.positions(name) for name in products]

    def __call__(self, *arguments: Any) -> Tensor:
        count = 2 * len(self._products)
        factors, rest = arguments[:count], list(arguments[count:])
        if not self._site.enabled:
            result: Tensor = self._original(*factors, *rest[: self._spelled])
            return result
        products = [torch.mm(*factors[i : i + 2]) for i in range(0, count, 2)]
        there = {at: product for product, places in zip(products, self._products, strict=True) for at in places}
        for at in self._at:
            rest.insert(at, there[at])
        total: Tensor = self._site(*rest)
        return total


def put_products_in_sites(gm: GraphModule) -> int:
    """Make each place of a captured subgraph one call with the products whose split-off sums it begins with, in place;
    how many there were. Only products that nobody else uses."""
    count = 0
    for node in list(gm.graph.nodes):
        original = getattr(node.target, "original", None)
        if original is None:
            continue
        found = {}
        for total in original.graph.nodes:
            source = total.args[0] if _SPLIT in total.meta else None
            if not isinstance(source, Node) or source.op != "placeholder" or len(source.users) > 1:
                continue
            product = node.args[node.target.positions(source.target)[0]]
            if product.target is _aten.mm.default and len(product.users) == 1:
                found[str(source.target)] = product
        if found:
            _put_with_products(gm, node, found)
            count += 1
    if count:
        gm.recompile()
    return count


def _put_with_products(gm: GraphModule, node: Node, products: Mapping[str, Node]) -> None:
    factors = [factor for product in products.values() for factor in product.args]
    rest = [value for value in node.args if value not in products.values()]
    with gm.graph.inserting_before(node):
        call = gm.graph.call_function(_FromFactors(node.target, list(products)), (*factors, *rest))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    gm.graph.erase_node(node)
    for product in products.values():
        gm.graph.erase_node(product)


def _with_addmm(original: GraphModule, products: Sequence[str]) -> GraphModule:
    """`original` with both factors for each of the products, its first arguments, and `addmm` for their sums."""
    graph = Graph()
    factors = {name: (graph.placeholder(f"{name}_a"), graph.placeholder(f"{name}_b")) for name in products}
    copies: dict[Node, Node] = {}
    for node in original.graph.nodes:
        if node.op == "placeholder":
            if node.target not in factors:
                copies[node] = graph.placeholder(node.target)
        elif _SPLIT in node.meta and node.args[0].target in factors:
            a, b = factors[node.args[0].target]
            copies[node] = graph.call_function(_aten.addmm.default, (copies[node.args[1]], a, b))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule({}, graph)


def whole(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A node's meta for what stands in its place, and is no split-off sum."""
    return {key: value for key, value in meta.items() if key != _SPLIT}


def _put_for_both(gm: GraphModule, product: Node, total: Node, target: Callable[..., Any]) -> None:
    """Replace the product and the sum after it by one call, of the bias and then the product's arguments."""
    with gm.graph.inserting_before(total):
        call = gm.graph.call_function(target, (total.args[1], *product.args))
    call.meta = whole(total.meta)
    total.replace_all_uses_with(call)
    gm.graph.erase_node(total)
    gm.graph.erase_node(product)


def _plain(node: Node) -> bool:
    """Whether nothing is scaled, and the result has the bias's dtype and the product's size."""
    bias = node.args[0]
    scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    same = isinstance(bias, Node) and bias.meta["val"].dtype == node.meta["val"].dtype
    return same and not scaled and bias.meta["val"].dim() == 1  # type: ignore[union-attr]
