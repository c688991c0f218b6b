"""What the judge must know about an op: `KernelSpec`, and how a `Case` becomes tensors.

`reference.py` fills one spec per op; nothing here knows any op by name. Values always come from a seed that the
caller chooses, so that the judge can keep them secret.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autokernel.records import Case, Scalar, TensorMeta, Tolerance

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

DEFAULT_TOLERANCES: Mapping[str, Tolerance] = {
    "fp16": Tolerance(atol=1e-2, rtol=1e-2),
    "bf16": Tolerance(atol=2e-2, rtol=2e-2),
    "fp32": Tolerance(atol=1e-4, rtol=1e-4),
}
"""Absolute tolerances by dtype as the project promises them; the judge scales `atol` to the output's magnitude."""

Inputs = dict[str, Any]
"""Arguments of one call in signature order: tensors and scalars by name."""

Fill = Callable[[TensorMeta, torch.Generator, Case], Tensor]
"""(meta, generator, case) -> contiguous tensor of `meta.shape` on the generator's device, in fp64 for floating dtypes.

The case gives scalars and the other tensors' shapes. Fills of one call that must agree on a hidden choice (which
targets are ignored) take it from a side generator seeded with `generator.initial_seed()`.
"""

Adversary = Callable[[Inputs, torch.Generator], Inputs]
"""Turns ordinary inputs into hard ones of the same shapes and dtypes (large equal rows, say)."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one tensor argument of a spelling stands to the op's own (full-width cosines to half-width ones, say).

    `spell` turns the op's inputs into the tensor that the spelling takes, of the given shape; `back` turns that tensor
    into the op's argument of the same name, None where the op has no such argument. `holds` tells whether `back` loses
    nothing for these values (both halves are equal); it is asked on every forward of a model with the kernel in it.
    `dtype` is the spelled tensor's, None where it is the case's.
    """

    spell: Callable[[Inputs, tuple[int, ...]], Tensor]
    back: Callable[[Tensor], Tensor] | None
    holds: Callable[[Tensor], bool]
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One way in which models write an op in PyTorch, to be traced and matched on a captured graph.

    `fn` takes the op's tensor arguments by name, plus the scalars named in `captured`, whose values are read off the
    matched graph (an eps, a scale). `scalars` are the op's scalars that this spelling implies (`causal=True`).
    It is traced with the sizes of the spec's first case, unless `shapes` gives others; with `any_rank` the first tensor
    may have more or fewer leading dimensions. An argument in `adapters` is spelled otherwise than the op takes it;
    one in `dtypes` has another dtype than in the spec's first case.
    """

    name: str
    fn: Callable[..., Tensor]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    any_rank: bool = False
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Everything about one op that judge, profiler and matcher need.

    `oracle` is plain PyTorch and defines signature and meaning; the judge calls it on fp64 copies of the inputs.
    `cases` is the sweep (small, any dtype via `Case.with_dtype`), its first case is the smoke test. `edges` hold sizes
    that are no power of two, size one and empty. `adversarial` maps a name to a transformation of `stress_case`'s
    inputs. `flops` and `bytes_moved` count the useful work of a case. `allowed_aten` lists calls a candidate may make
    beyond allocation and views. `baselines` are PyTorch's own best ways to compute the op, with the oracle's signature.
    `yardstick` is the way whose error in the tested dtype tells what a right kernel may make, where PyTorch's own op is
    none: as it takes fp32 inside for some sizes, say.
    `source` is the text of a captured subgraph's file, for processes that cannot read it where it lies.
    """

    op: str
    oracle: Callable[..., Tensor]
    fills: Mapping[str, Fill]
    cases: tuple[Case, ...]
    edges: tuple[Case, ...]
    stress_case: Case
    adversarial: Mapping[str, Adversary]
    flops: Callable[[Case], int]
    bytes_moved: Callable[[Case], int]
    baselines: Mapping[str, Callable[..., Tensor]]
    spellings: tuple[Spelling, ...] = ()
    allowed_aten: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    yardstick: Callable[..., Tensor] | None = None
    source: str | None = None

    @property
    def signature(self) -> inspect.Signature:
        """The signature that the oracle, the starters and every candidate share."""
        return inspect.signature(self.oracle)

    def arguments(self, case: Case) -> dict[str, TensorMeta | Scalar]:
        """What `case` passes, in signature order."""
        given = {**case.scalars, **case.tensors}
        return {name: given.get(name, each.default) for name, each in self.signature.parameters.items()}

    def make_inputs(self, case: Case, seed: int, device: str = "cpu") -> Inputs:
        """Arguments for `case`, from `seed`, in signature order, with the case's shapes, dtypes and strides."""
        generator = torch.Generator(device).manual_seed(seed)
        return {
            name: place(self.fills[name](value, generator, case), value, device)
            if isinstance(value, TensorMeta)
            else value
            for name, value in self.arguments(case).items()
        }


def place(values: Tensor, meta: TensorMeta, device: str) -> Tensor:
    """`values` copied into a fresh tensor with `meta`'s dtype and strides on `device`."""
    stride = meta.stride if meta.stride is not None else contiguous_stride(meta.shape)
    # A stride of zero (an expanded tensor) makes elements share memory: fill the base, then expand it.
    base_shape = [1 if step == 0 else size for size, step in zip(meta.shape, stride, strict=True)]
    out = torch.empty_strided(base_shape, stride, dtype=DTYPES[meta.dtype], device=device)
    index = tuple(slice(0, size) for size in base_shape)
    out.copy_(values[index])
    return out.expand(meta.shape) if list(meta.shape) != base_shape else out


def unfilled(meta: TensorMeta, device: str = "cpu") -> Tensor:
    """A tensor of `meta`'s shape, dtype and strides with whatever is in memory: on a CPU no page of it is touched."""
    stride = meta.stride or contiguous_stride(meta.shape)
    return torch.empty_strided(meta.shape, stride, dtype=DTYPES[meta.dtype], device=device)


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as PyTorch counts them (a size of 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for size in reversed(list(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe(tensor: Tensor) -> TensorMeta:
    """Shape, dtype and strides of a tensor; a contiguous one gets stride None.

    Raises: KeyError for a dtype that no op of ours takes.
    """
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorMeta(shape=tuple(tensor.shape), dtype=DTYPE_NAMES[tensor.dtype], stride=stride)


def upcast(inputs: Inputs, dtype: torch.dtype = torch.float64) -> Inputs:
    """A copy of `inputs` with floating tensors in `dtype`; other values are passed through."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def build_case(
    op: str, name: str, dtype: str = "fp32", *, scalars: Mapping[str, Scalar] | None = None, **shapes: tuple[int, ...]
) -> Case:
    """A contiguous case with every tensor in `dtype`; `shapes` maps tensor arguments to shapes."""
    tensors = {argument: TensorMeta(shape=shape, dtype=dtype) for argument, shape in shapes.items()}
    return Case(op=op, name=name, dtype=dtype, tensors=tensors, scalars=dict(scalars or {}))


def retype(case: Case, **dtypes: str) -> Case:
    """`case` with the named tensors in other dtypes (integer targets, say)."""
    tensors = {n: replace(m, dtype=dtypes[n]) if n in dtypes else m for n, m in case.tensors.items()}
    return replace(case, tensors=tensors)
