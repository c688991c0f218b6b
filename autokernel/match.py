"""Find an op's occurrences in a captured graph: by structure first, then proven by numbers against the op's oracle.

Each spelling of a `KernelSpec` is traced down the path that the model took and searched for twice: loosely, to learn
which nodes would be its arguments, then traced again at exactly their sizes and compared literal by literal. What is
left runs on random inputs beside the oracle, and a look-alike is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.capture import trace
from autokernel.loading import get_spec, is_captured, specs
from autokernel.occurrence import Match as Match
from autokernel.occurrence import as_match, static
from autokernel.pattern import VIEWS, Binding, Pattern, as_pattern, kind_of, loose, strict, value_of
from autokernel.proof import disproof
from autokernel.records import Scalar
from autokernel.regions.find import find_regions
from autokernel.spec import DTYPE_NAMES, DTYPES, KernelSpec, Spelling

_log = logging.getLogger(__name__)

_EXTRA_RANK = 2  # how many leading dimensions more or fewer than in `Spelling.shapes` are tried
_FLOAT_MARK = 0.0123456789
_INT_MARK = -86421
_STEP = 0.0010203  # marks of several captured scalars differ

_first_traces: dict[Any, tuple[Spelling, Pattern | None]] = {}
"""Spellings at small sizes, which depend on no model, traced once a process; the id is that of the spelling kept."""


@dataclass(kw_only=True)
class Matcher:
    """Matches ops on graphs; remembers traces and proofs, so that equal layers cost once.

    Captured subgraphs are matched where they are among `ops`, after all others.
    `refused` collects, as (op, reason), what looked like an op and was proven not to be it.
    """

    ops: Sequence[str] | None = None
    refused: list[tuple[str, str]] = field(default_factory=list)
    _patterns: dict[Any, Pattern | None] = field(default_factory=dict)
    _proofs: dict[str, str | None] = field(default_factory=dict)

    def find(
        self,
        gm: GraphModule,
        within: Container[Node] | None = None,
        prefer: Callable[[Match], bool] = lambda _match: True,
    ) -> list[Match]:
        """Proven matches that do not overlap, in graph order: the larger ones, and of equal ones those to prefer.

        Args:
            within: look at these nodes only, and let the others use inner values of a match.
        """
        order = {node: i for i, node in enumerate(gm.graph.nodes) if within is None or node in within}
        candidates = [m for spec in self._specs() for s in spec.spellings for m in self._candidates(gm, order, spec, s)]
        taken: set[Node] = set()
        found: list[Match] = []
        for match in sorted(candidates, key=lambda m: (-m.size, not prefer(m), order[m.output])):
            core = {node for node in match.nodes if kind_of(node) not in VIEWS}
            if not core & taken and self._proven(gm, match):
                taken |= core
                found.append(match)
        found += find_regions(gm, [get_spec(op) for op in self.ops or () if is_captured(op)], taken)
        return sorted(found, key=lambda m: order[m.output])

    def _specs(self) -> list[KernelSpec]:
        return [spec for op, spec in specs().items() if self.ops is None or op in self.ops]

    def _candidates(
        self, gm: GraphModule, order: Mapping[Node, int], spec: KernelSpec, spelling: Spelling
    ) -> Iterator[Match]:
        kinds = {kind_of(node) for node in gm.graph.nodes if node.op == "call_function"}
        for node in order:
            value = value_of(node)
            if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES:
                continue
            pattern = self._example(spec, spelling, value, node, kinds)
            binding = loose(pattern, node) if pattern else None
            if pattern and binding and (match := self._exact(spec, spelling, node, binding, order)):
                yield match

    def _example(
        self, spec: KernelSpec, spelling: Spelling, value: Tensor, node: Node, kinds: set[Any]
    ) -> Pattern | None:
        """The spelling traced at small sizes with the node's rank, dtype and device, if it could end in this node."""
        base = self._traced(spec, spelling, 0, torch.float32, value.device)
        if base is None or not base.kinds <= kinds:
            return None
        extra = value.dim() - value_of(base.output).dim()
        if abs(extra) > (_EXTRA_RANK if spelling.any_rank else 0) or not value.is_floating_point():
            return None
        pattern = self._traced(spec, spelling, extra, value.dtype, value.device)
        return pattern if pattern and kind_of(pattern.output) == kind_of(node) else None

    def _traced(
        self, spec: KernelSpec, spelling: Spelling, extra: int, dtype: torch.dtype, device: torch.device
    ) -> Pattern | None:
        key = (id(spelling), extra, dtype, device.type)
        if key not in _first_traces:
            inputs = _example_inputs(spec, spelling, extra, dtype, device)
            pattern = _first_trace(spelling, inputs, _marks(spec, spelling)) if inputs else None
            _first_traces[key] = (spelling, pattern)
        return _first_traces[key][1]

    def _exact(
        self, spec: KernelSpec, spelling: Spelling, node: Node, binding: Binding, order: Mapping[Node, int]
    ) -> Match | None:
        values = {name: value_of(source) for name, source in binding.inputs.items()}
        if set(values) != set(_shapes(spec, spelling)) or not all(static(value) for value in values.values()):
            return None
        for scalars in _scalar_choices(spec, spelling, binding):
            metas = [(name, v.shape, v.stride(), v.dtype, v.device) for name, v in values.items()]
            key = repr((spec.op, spelling.name, metas, scalars))
            if key not in self._patterns:
                self._patterns[key] = _trace(spelling, values, scalars)
            pattern = self._patterns[key]
            exact = strict(pattern, node) if pattern else None
            if exact and exact.inputs == binding.inputs:
                nodes = tuple(sorted(set(exact.nodes.values()), key=order.__getitem__))
                return as_match(spec, spelling, nodes, exact, scalars, order)
        return None

    def _proven(self, gm: GraphModule, match: Match) -> bool:
        shapes = {name: tuple(value_of(node).shape) for name, node in match.inputs.items()}
        distinct = len(set(match.inputs.values()))  # arguments that are one tensor get the same values in the proof
        key = f"{match.spelling.name} {shapes} {distinct} {match.case.key}"
        if key not in self._proofs:
            try:
                reason = disproof(specs()[match.op], match.spelling, match.case, match.inputs, match.nodes, gm)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:  # torch's out-of-memory is the first
                reason = f"it could not be checked: {str(error).splitlines()[0]}"
            self._proofs[key] = reason
            if reason:
                self.refused.append((match.op, reason))
                _log.info("%s is no %s: %s", match.output.name, match.op, reason)
        return self._proofs[key] is None


# --- tracing a spelling ----------------------------------------------------------------------------------------------


def _example_inputs(
    spec: KernelSpec, spelling: Spelling, extra: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor] | None:
    """Meta-sized stand-ins for the spelling's arguments; None when the first has too few dimensions to drop."""
    inputs: dict[str, Tensor] = {}
    for i, (name, shape) in enumerate(_shapes(spec, spelling).items()):
        sizes = shape
        if i == 0 and extra:
            if len(shape) + extra < 1:
                return None
            sizes = (2,) * extra + shape if extra > 0 else shape[-extra:]
        meta, adapter = spec.cases[0].tensors.get(name), spelling.adapters.get(name)
        named = spelling.dtypes.get(name) or (adapter.dtype if adapter else None) or (meta.dtype if meta else None)
        fixed = DTYPES[named] if named else dtype
        inputs[name] = torch.empty(sizes, dtype=dtype if fixed.is_floating_point else fixed, device="meta")
    return {name: _on(value, device) for name, value in inputs.items()}


def _shapes(spec: KernelSpec, spelling: Spelling) -> Mapping[str, tuple[int, ...]]:
    """Sizes to trace a spelling with, by tensor argument."""
    own = {name: meta.shape for name, meta in spec.cases[0].tensors.items() if name not in spelling.scalars}
    return {**own, **spelling.shapes}


def _on(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _marks(spec: KernelSpec, spelling: Spelling) -> dict[str, float | int]:
    """A value for each captured scalar that occurs nowhere else, so that its place in the trace can be seen."""
    marks: dict[str, float | int] = {}
    for i, name in enumerate(spelling.captured):
        default = spec.signature.parameters[name].default
        marks[name] = _INT_MARK - i if isinstance(default, int) else _FLOAT_MARK + i * _STEP
    return marks


def _first_trace(spelling: Spelling, inputs: Mapping[str, Tensor], marks: Mapping[str, float | int]) -> Pattern | None:
    """The spelling traced with marks; a dim cannot be marked and is -1, its place being unknown."""
    unmarkable = {name: -1 for name in spelling.captured if name == "dim"}
    return _trace(spelling, inputs, {**marks, **unmarkable}, {k: v for k, v in marks.items() if k not in unmarkable})


def _trace(
    spelling: Spelling,
    inputs: Mapping[str, Tensor],
    scalars: Mapping[str, Scalar],
    slots: Mapping[str, float | int] | None = None,
) -> Pattern | None:
    captured = {name: scalars[name] for name in spelling.captured}
    try:
        gm = trace(lambda **tensors: spelling.fn(**tensors, **captured), inputs)
    except Exception as error:
        # Sizes that the spelling cannot take (an odd head size, a rank too low) are no match, whatever it raises.
        _log.debug("spelling %s not traced: %s", spelling.name, error)
        return None
    return as_pattern(gm, list(inputs), slots)


def _scalar_choices(spec: KernelSpec, spelling: Spelling, binding: Binding) -> Iterator[dict[str, Scalar]]:
    """The scalars that the loose match may stand for; more than one where a dim could not be read off."""
    known = {**spelling.scalars, **binding.scalars}
    missing = [name for name in spelling.captured if name not in known]
    if not missing:
        yield known
        return
    if len(missing) == 1:
        for value in _dims(binding.nodes.values()):
            yield {**known, missing[0]: value}


def _dims(nodes: Iterable[Node]) -> list[Scalar]:
    """Each integer, and each list of several, among the nodes' arguments."""
    found: dict[Any, None] = {}
    for node in nodes:
        for value in (*node.args, *node.kwargs.values()):
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
                found[items[0] if len(items) == 1 else tuple(items)] = None
    return list(found)
