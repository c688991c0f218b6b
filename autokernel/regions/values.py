"""What the inputs of regions look like in one forward: layout, and the distribution of their values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from autokernel.records import TensorMeta
from autokernel.regions.reference import Written
from autokernel.regions.spec import Recorded

QUANTILES = 17
MOST_CHOICES = 4
"""Different values up to which a floating tensor is taken for a mask, each value being drawn as it is."""

MOST_SAMPLED = 1 << 16
"""Elements of a tensor that are looked at."""

MOST_NUMBERS = 64
"""Different integers that are remembered where a range would not do (an ignored target's -100)."""

DIGITS = 6


def recorded_inputs(written: Written, values: Mapping[Node, Tensor]) -> dict[str, Recorded]:
    """The region's inputs by name, as `values` shows them. Raises: ValueError where one holds no number."""
    return {
        written.names[node]: recorded(values[node], written.metas[written.names[node]], written.reads(node))
        for node in written.region.inputs
    }


def values_of(gm: GraphModule, inputs: Sequence[Any], wanted: Collection[Node]) -> dict[Node, Tensor]:
    """The values of some nodes in one run of the graph; copies, as later nodes may write to them, in any layout."""
    keeping = _Keeping(gm, wanted)
    with torch.no_grad():
        keeping.run(*inputs)
    return keeping.found


class _Keeping(Interpreter):
    def __init__(self, gm: GraphModule, wanted: Collection[Node]) -> None:
        super().__init__(gm)
        self._wanted = set(wanted)
        self.found: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self._wanted:
            self.found[n] = value.detach().clone()
        return value


def recorded(value: Tensor, meta: TensorMeta, reads: int | None = None) -> Recorded:
    """Distribution of one tensor that the region gets in the layout of `meta`. Raises: ValueError where it holds no
    number."""
    fields: dict[str, Any] = {"shape": meta.shape, "dtype": meta.dtype, "stride": meta.stride, "reads": reads}
    flat = _sample(value)
    if not flat.numel():
        raise ValueError("an input is empty")
    if value.dtype is torch.bool:
        share = float(flat.double().mean())
        return Recorded(**fields, choices=((0.0, 1 - share), (1.0, share)))
    if not value.is_floating_point():
        return Recorded(**fields, **_integers(value))
    flat = flat[~flat.isnan()].double()
    if not flat.numel():
        raise ValueError("an input holds no number")
    different, counts = torch.unique(flat, return_counts=True)
    if different.numel() <= MOST_CHOICES:
        shares = (counts.double() / flat.numel()).tolist()
        return Recorded(**fields, choices=tuple(zip(different.tolist(), shares, strict=True)))
    finite = flat[flat.isfinite()]
    levels = torch.quantile(finite, torch.linspace(0, 1, QUANTILES, dtype=torch.float64, device=flat.device))
    quantiles = tuple(float(f"{level:.{DIGITS}g}") for level in levels.tolist())
    return Recorded(**fields, quantiles=quantiles, minus_inf=float((flat == -torch.inf).double().mean()))


def _integers(value: Tensor) -> dict[str, Any]:
    """Indices keep within what was seen; with negative ones among them only what was seen is surely valid."""
    low, high = int(value.min()), int(value.max())
    if low >= 0:
        return {"quantiles": (low, high)}
    different = torch.unique(value)
    if different.numel() > MOST_NUMBERS:
        different = different[torch.linspace(0, different.numel() - 1, MOST_NUMBERS).long()]
    return {"choices": tuple((float(number), 1 / different.numel()) for number in different.tolist())}


def _sample(value: Tensor) -> Tensor:
    """Its elements, or some evenly spread ones of many."""
    flat = value.reshape(-1)
    return flat[:: -(-flat.numel() // MOST_SAMPLED)] if flat.numel() > MOST_SAMPLED else flat
