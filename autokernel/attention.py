"""Keep `scaled_dot_product_attention` one node of a captured graph, so that ops are matched on what the model wrote.

Traced as PyTorch does it, attention becomes what the device, the dtype and the sizes make it choose at that moment
(cuDNN for a long sequence, another for a short one), and no pattern traced at small sizes would be found at the
model's. This module changes the one operator of PyTorch while a graph is traced, and puts it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.fx import Graph, Node

_attention = torch.ops.aten.scaled_dot_product_attention.default
_GRADIENT_KEYS = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradXPU, DispatchKey.AutogradMPS)


def whole_attention() -> contextlib.AbstractContextManager[None]:
    """One node while a graph without gradients is traced; it chooses its way when it runs."""
    from torch.export.exported_program import _override_composite_implicit_decomp

    keep: contextlib.AbstractContextManager[None] = _override_composite_implicit_decomp(
        {_attention: lambda *_args, **_kwargs: NotImplemented}
    )
    return keep


@contextlib.contextmanager
def whole_attention_in_training(apart: Container[Hashable]) -> Iterator[None]:
    """One node in the forward of a joint graph, and in its backward what PyTorch makes of it, computed anew.

    That pays only where a kernel takes the node's place. Calls whose `attention_layout` is in `apart`, and those with
    dropout, are traced as PyTorch does it.
    """

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (q, k, v, mask, dropout, causal, scale, enable_gqa)
        if dropout > 0 or _layout(*given) in apart:
            return _taken_apart(*given)
        result: Tensor = _Whole.apply(*given)  # type: ignore[no-untyped-call]
        return result

    with whole_attention():
        for key in _GRADIENT_KEYS:
            _attention.py_kernels.pop(key, None)
            _attention.py_impl(key)(call)
        _attention._dispatch_cache.clear()  # a key's kernel is looked up once
        yield


def whole_layouts(graph: Graph) -> set[Hashable]:
    """The layouts of the calls of attention that are one node in `graph`."""
    return {_layout_of_node(node) for node in graph.nodes if node.target is _attention}


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, *options: Any
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = (dropout, causal, *options)
        scale, enable_gqa = options
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = _attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            own = [
                None if value is None else value.detach().requires_grad_(needed)
                for value, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            ]
            result = _taken_apart(*own, *ctx.options)
            wanted = [value for value in own if value is not None and value.requires_grad]
            found = iter(torch.autograd.grad(result, wanted, grads))
        inputs = [next(found) if value is not None and value.requires_grad else None for value in own]
        return (*inputs, *(None for _ in ctx.options))


def _taken_apart(*given: Any) -> Tensor:
    *positional, scale, enable_gqa = given
    way: Callable[..., Tensor] = _attention._op_dk
    return way(DispatchKey.CompositeImplicitAutograd, *positional, scale=scale, enable_gqa=enable_gqa)


def _layout(*given: Any) -> Hashable:
    return tuple(
        (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value for value in given
    )


def _layout_of_node(node: Node) -> Hashable:
    values = [value.meta["val"] if isinstance(value, Node) else value for value in node.args]
    values += (None, 0.0, False)[len(values) - 3 :]
    return _layout(*values, node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False))
