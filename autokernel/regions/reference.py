"""A region as a Python file: its ATen calls spelled out, its inputs' layouts and values, its name from all of that.

Equal regions (calls, literals, shapes, strides, dtypes) give equal calls and so one name, whichever layer they are of.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autokernel.loading import ANY_CAPTURED
from autokernel.pattern import value_of
from autokernel.records import TensorMeta
from autokernel.regions.partition import CONSTANTS, Region, is_view
from autokernel.regions.spec import Recorded
from autokernel.spec import describe

_aten = torch.ops.aten
DIGEST_CHARS = 8
NAMED_STEPS = 3
"""How many of a region's operations its name tells; the digest tells the rest."""

_PLAIN = frozenset({"_to_copy", "clone", "add", "mul"})
"""Operations that are in most regions: a name tells others first."""

_PARTIAL_READS = frozenset(
    {
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.embedding.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.gather.default,
    }
)


class Written:
    """The text of one region's calls, with the names that it gave to nodes."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.names = {node: f"{_letter(value_of(node))}{i}" for i, node in enumerate(region.inputs)}
        self._inside = set(region.nodes)
        self._counts: Counter[str] = Counter()
        lines: list[str] = []
        for node in _by_need(region.output, self._inside):
            call = self._call(node)
            self.names[node] = self._new_name(node)
            lines.append(f"    {self.names[node]} = {call}")
        lines.append(f"    return {self.names[region.output]}")
        self.body = "\n".join(lines)
        self.metas = {self.names[node]: describe(value_of(node)) for node in region.inputs}
        self.result = describe(value_of(region.output))

    @property
    def op(self) -> str:
        """The region's name as an op: what it does, and a digest of all that it is."""
        text = "\n".join([self.body, *(f"{name} {meta}" for name, meta in self.metas.items())])
        return f"{ANY_CAPTURED}_{'_'.join(self._telling())}_{hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]}"

    @property
    def flops(self) -> int:
        """One for each element that an operation yields, or that it takes where it takes more (a reduction)."""
        steps = [n for n in self.region.nodes if not is_view(n) and n.target not in CONSTANTS]
        return sum(max(_elements(value_of(s)) for s in (node, *node.all_input_nodes)) for node in steps)

    def reads(self, node: Node) -> int | None:
        """How many elements of an input are read, where slices and reads by index do not need them all."""
        users = [user for user in node.users if user in self._inside]
        if not users or not all(user.target in _PARTIAL_READS and user.args[0] is node for user in users):
            return None
        read = sum(_elements(value_of(user)) for user in users)
        return read if read < _elements(value_of(node)) else None

    def _telling(self) -> list[str]:
        steps = [_base(n) for n in _by_need(self.region.output, self._inside) if not is_view(n)]
        steps = list(dict.fromkeys(step for step in steps if step not in ("getitem", "full", "scalar_tensor")))
        first = [step for step in steps if step not in _PLAIN] or steps
        return [step.strip("_") for step in first[:NAMED_STEPS]]

    def _new_name(self, node: Node) -> str:
        base = _base(node)
        self._counts[base] += 1
        return f"{base}_{self._counts[base]}"

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            source, index = node.args
            return f"{self._text(source)}[{index!r}]"
        parts = [self._text(value) for value in node.args]
        parts += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        return f"{_path(node.target)}({', '.join(parts)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if isinstance(value, torch.device):
            return f"torch.device({value.type!r})"  # whichever of several the model is on
        if isinstance(value, float):
            return repr(value) if value - value == 0 else f"float({str(value)!r})"
        if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.memory_format, torch.layout)):
            return str(value) if not isinstance(value, str) else repr(value)
        raise ValueError(f"an argument of type {type(value).__name__} cannot be written down")


def reference_text(written: Written, inputs: Mapping[str, Recorded], *, hard: Sequence[str], about: str) -> str:
    """The whole file. `about` says in a few words where the region is from."""
    arguments = "\n".join(f"        {name!r}: {_recorded(item)}," for name, item in inputs.items())
    layouts = ", ".join(f"{name}: {_shown(meta)}" for name, meta in written.metas.items())
    return f'''"""A captured subgraph of {about}.

Written by autokernel. `captured` is what the model computes, call by call; its fp64 run is the oracle.
"""

import torch

from autokernel.records import TensorMeta
from autokernel.regions.spec import Recorded, region_spec

aten = torch.ops.aten


def captured({", ".join(inputs)}):
    """{layouts} -> {_shown(written.result)}"""
{written.body}


SPEC = region_spec(
    {written.op!r},
    captured,
    {{
{arguments}
    }},
    result={_meta(written.result)},
    flops={written.flops},
    hard={tuple(hard)!r},
)
'''


def _by_need(output: Node, inside: Collection[Node]) -> list[Node]:
    """The inner nodes, each after its sources, in an order that depends on the calls alone."""
    done: dict[Node, None] = {}
    todo = [(output, False)]
    while todo:
        node, sources_done = todo.pop()
        if node in done or node not in inside:
            continue
        if sources_done:
            done[node] = None
        else:
            todo.append((node, True))
            todo += [(source, False) for source in reversed(node.all_input_nodes)]
    return list(done)


def _base(node: Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    return re.sub(r"\W", "_", str(node.target).removeprefix("aten.").split(".")[0])


def _path(target: Any) -> str:
    packet, _, overload = str(target).removeprefix("aten.").partition(".")
    return f"aten.{packet}.{overload}"


def _letter(value: Tensor) -> str:
    """`x` for numbers, `i` for integers, `m` for masks."""
    if value.dtype is torch.bool:
        return "m"
    return "x" if value.is_floating_point() else "i"


def _elements(value: Any) -> int:
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(item.numel() for item in values if isinstance(item, Tensor))


def _recorded(item: Recorded) -> str:
    fields = [f"shape={item.shape!r}", f"dtype={item.dtype!r}"]
    for name in ("stride", "quantiles", "choices", "minus_inf", "reads"):
        if value := getattr(item, name):
            fields.append(f"{name}={_literal(value)}")
    return f"Recorded({', '.join(fields)})"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_literal(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    return repr(value)


def _meta(meta: TensorMeta) -> str:
    stride = f", stride={meta.stride!r}" if meta.stride else ""
    return f"TensorMeta(shape={meta.shape!r}, dtype={meta.dtype!r}{stride})"


def _shown(meta: TensorMeta) -> str:
    strides = f" with strides {list(meta.stride)}" if meta.stride else ""
    return f"{list(meta.shape)} {meta.dtype}{strides}"
