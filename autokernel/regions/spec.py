"""A captured subgraph as a `KernelSpec`: what a region's `reference.py` calls to describe itself.

The subgraph's own ATen calls are the oracle, run in fp64; the layouts of one forward are its only case, as shapes are
part of the calls. Values are drawn anew from the distribution that the forward showed. No region is known here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autokernel.records import Case, TensorMeta
from autokernel.spec import DTYPES, Fill, Inputs, KernelSpec, Spelling, describe, place

SPREAD = 0.25
"""An input that was one number throughout (a fresh norm's weight) varies by this much: whether it is read must show."""

SMALL = 2.0**-12
LARGE = 64.0
RARE = 0.02
"""Share of the elements that the hard inputs replace."""

SHOWN_AT_LEAST = 0.05
"""Each value of a mask is drawn at least this often, also where the forward showed only one."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One input as a forward passed it: layout and values.

    `quantiles` of the finite values, least to greatest and evenly spaced (of integers the first and the last count);
    `choices` where there are only a few different values, with their shares. `minus_inf` is the share of -inf, `reads`
    how many elements the calls read, where that is not all.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    quantiles: tuple[float, ...] = ()
    choices: tuple[tuple[float, float], ...] = ()
    minus_inf: float = 0.0
    reads: int | None = None

    @property
    def meta(self) -> TensorMeta:
        """The layout alone."""
        return TensorMeta(shape=self.shape, dtype=self.dtype, stride=self.stride)

    @property
    def nbytes(self) -> int:
        """Bytes that the calls read."""
        count = self.meta.numel if self.reads is None else min(self.reads, self.meta.numel)
        return count * DTYPES[self.dtype].itemsize


def region_spec(
    op: str,
    captured: Callable[..., Tensor],
    inputs: Mapping[str, Recorded],
    *,
    result: TensorMeta,
    flops: int,
    hard: tuple[str, ...] = (),
) -> KernelSpec:
    """The spec of a subgraph whose ATen calls `captured` makes.

    Args:
        result: of one call; floating.
        hard: which of `ADVERSARIES` PyTorch itself can compute in this dtype.
    """
    case = Case(op=op, name="recorded", dtype=result.dtype, tensors={n: item.meta for n, item in inputs.items()})
    nbytes = sum(item.nbytes for item in inputs.values()) + result.numel * DTYPES[result.dtype].itemsize
    return KernelSpec(
        op=op,
        oracle=_oracle(captured),
        fills={name: _fill(item) for name, item in inputs.items()},
        cases=(case,),
        edges=tuple(replace(case, name=name) for name in ("extremes", "again") if name in hard or name == "again"),
        stress_case=replace(case, name="stress"),
        adversarial={name: ADVERSARIES[name] for name in hard if name in ADVERSARIES},
        flops=lambda _case: flops,
        bytes_moved=lambda _case: nbytes,
        baselines={"eager": captured},
        spellings=(Spelling(name="captured", fn=captured),),
        dtypes=(result.dtype,),
    )


# --- the oracle ------------------------------------------------------------------------------------------------------


def _oracle(captured: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`captured`, which computes in fp64 throughout when its floating inputs are."""

    @functools.wraps(captured)
    def oracle(*args: Any, **kwargs: Any) -> Tensor:
        if not any(isinstance(v, Tensor) and v.dtype is torch.float64 for v in (*args, *kwargs.values())):
            return captured(*args, **kwargs)
        with _Wide():  # type: ignore[no-untyped-call]
            return captured(*args, **kwargs)

    return oracle


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has every call that names a floating dtype (a cast, a sum, a constant) use fp64 instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.ops.aten._softmax.default or func is torch.ops.aten._log_softmax.default:
            args = (*args[:2], False)  # its third argument asks for fp32 results of 16-bit inputs
        return func(*args, **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


# --- values ----------------------------------------------------------------------------------------------------------


def _fill(item: Recorded) -> Fill:
    def fill(meta: TensorMeta, generator: torch.Generator, case: Case) -> Tensor:
        return draw(replace(item, shape=meta.shape), generator, extreme=case.name == "extremes")

    return fill


def draw(item: Recorded, generator: torch.Generator, *, extreme: bool = False) -> Tensor:
    """Random values as `item` shows them, in fp64 or as integers; with `extreme` from both ends of their range."""
    unit = torch.rand(item.shape, generator=generator, dtype=torch.float64, device=generator.device)
    floating = DTYPES[item.dtype].is_floating_point
    if item.choices:
        values = _chosen(item, unit)
    elif extreme:
        values = torch.where(unit < 0.5, item.quantiles[0], item.quantiles[-1])
    elif floating:
        values = _interpolated(item.quantiles, unit)
        if item.minus_inf:
            masked = torch.rand(item.shape, generator=generator, device=generator.device) < item.minus_inf
            values = values.masked_fill(masked, -math.inf)
    else:
        low, high = item.quantiles[0], item.quantiles[-1]
        values = (low + torch.floor(unit * (high - low + 1))).clamp(max=high)
    return values if floating else values.to(DTYPES[item.dtype])


def _chosen(item: Recorded, unit: Tensor) -> Tensor:
    """One of the few values each; where there was one number only, numbers near it, or both truth values."""
    values = [value for value, _ in item.choices]
    shares = [share for _, share in item.choices]
    if item.dtype == "bool":
        share = min(max(dict(item.choices).get(1.0, 0.0), SHOWN_AT_LEAST), 1 - SHOWN_AT_LEAST)
        return (unit < share).to(torch.float64)
    if len(values) == 1 and DTYPES[item.dtype].is_floating_point and math.isfinite(values[0]):
        step = SPREAD * (abs(values[0]) or 1.0)
        return values[0] + step * (2 * unit - 1)
    bounds = torch.tensor(shares, dtype=torch.float64, device=unit.device).cumsum(0)[:-1]
    table = torch.tensor(values, dtype=torch.float64, device=unit.device)
    drawn: Tensor = table[torch.bucketize(unit, bounds)]
    return drawn


def _interpolated(quantiles: tuple[float, ...], unit: Tensor) -> Tensor:
    table = torch.tensor(quantiles, dtype=torch.float64, device=unit.device)
    position = unit * (len(quantiles) - 1)
    low = position.floor().clamp(max=len(quantiles) - 2).long()
    values: Tensor = torch.lerp(table[low], table[low + 1], position - low)
    return values


# --- hard inputs -----------------------------------------------------------------------------------------------------


def _each_float(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """`inputs` with every floating tensor changed, in its own dtype and layout."""
    return {
        name: place(change(value.double()), describe(value), str(value.device))
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def _some(value: Tensor, generator: torch.Generator, number: float) -> Tensor:
    """`value` with a few random elements, at least one, replaced."""
    if not value.numel():
        return value
    mask = (torch.rand(value.shape, generator=generator) < RARE).to(value.device)
    mask.view(-1)[int(torch.randint(value.numel(), (1,), generator=generator))] = True
    return value.masked_fill(mask, number)


def _special(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """A few NaN and infinities in the first floating input: they must come out where PyTorch has them."""
    first = next(n for n, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point())
    value = inputs[first].double()
    for number in (math.nan, math.inf, -math.inf):
        value = _some(value, generator, number)
    return {**inputs, first: place(value, describe(inputs[first]), str(inputs[first].device))}


ADVERSARIES: Mapping[str, Callable[[Inputs, torch.Generator], Inputs]] = {
    "large": lambda inputs, _generator: _each_float(inputs, lambda value: value * LARGE),
    "small": lambda inputs, _generator: _each_float(inputs, lambda value: value * SMALL),
    "negated": lambda inputs, _generator: _each_float(inputs, torch.neg),
    "zeros_among": lambda inputs, generator: _each_float(inputs, lambda value: _some(value, generator, 0.0)),
    "outliers": lambda inputs, generator: _each_float(inputs, lambda value: _some(value, generator, 1e3)),
    "special": _special,
}
"""Hard inputs by name; a region's file lists those that PyTorch itself gets right in the region's dtype."""
