"""Which regions of a model are worth a kernel, and the files that make ops of them: for `autokernel.plan`.

Equal regions are one op, however many layers have it. A region enters the plan when its places take a worthwhile share
of the forward, PyTorch's own run of it is exact enough to be judged by, and there is a first kernel for the backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.fx import Node

from autokernel.applied import load_kernel
from autokernel.capture import CapturedGraph
from autokernel.errors import AutokernelError, OracleError
from autokernel.judge.compare import mismatch
from autokernel.judge.trial import truth_of
from autokernel.loading import STARTER, load_file
from autokernel.pattern import value_of
from autokernel.records import Case
from autokernel.regions import cppstarter, tritonstarter
from autokernel.regions.find import calls_of
from autokernel.regions.inductor import NotGenerated
from autokernel.regions.partition import partition
from autokernel.regions.reference import Written, reference_text
from autokernel.regions.spec import ADVERSARIES
from autokernel.regions.values import recorded_inputs, values_of
from autokernel.spec import DTYPE_NAMES, Inputs, KernelSpec, unfilled
from autokernel.usercode import first_line

log = logging.getLogger(__name__)

LEAST_SHARE = 0.01
"""Of one forward's time: less is not worth an op of its own."""

MOST_REGIONS = 4
PROBES = 3
"""How often PyTorch is tried on each kind of hard input."""

PROBE_SEED = 20250719

FAULTS = (ValueError, TypeError, IndexError, RuntimeError, AutokernelError)
"""What the calls of a region may raise on inputs that are drawn anew (an index beyond another input's size, say)."""

STARTERS = {"cpp": cppstarter.starter_text, "triton": tritonstarter.starter_text}
"""What makes a first kernel, by backend."""


@dataclass(kw_only=True)
class Found:
    """Equal regions of a model's graphs. `time_us` is that of all `calls` in one forward, node by node."""

    written: Written
    graph: CapturedGraph
    time_us: float = 0.0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class RegionOp:
    """A region that is an op: its spec, the texts of its files, its calls in one forward and their time."""

    spec: KernelSpec
    reference: str
    starter: str
    calls: int
    time_us: float

    @property
    def case(self) -> Case:
        """The one call of it that exists."""
        return self.spec.cases[0]


@dataclass(kw_only=True)
class Regions:
    """Collects the regions of one model, graph by graph; `notes` say why some are left out."""

    model: str
    found: dict[str, Found] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, graph: CapturedGraph, taken: Collection[Node], times: Mapping[str, float]) -> None:
        """Cut `graph` into regions outside of `taken`; `times` are of its nodes by name, in us."""
        for region in partition(graph.gm, taken):
            try:
                written = Written(region)
            except ValueError as error:
                log.debug("a region at %s is left out: %s", region.output, error)
                continue
            known = self.found.setdefault(written.op, Found(written=written, graph=graph))
            known.calls += graph.calls
            known.time_us += graph.calls * sum(times.get(node.name, 0.0) for node in region.nodes)

    def chosen(self, total_us: float, backend: str, only: Collection[str] | None = None) -> list[RegionOp]:
        """The regions that are worth an op each, those that take the most time first.

        Args:
            only: of these names, however little time they take; None means any.
        """
        ranked = sorted(self.found.items(), key=lambda item: -item[1].time_us)
        least_us = LEAST_SHARE * total_us
        worth = [(op, item) for op, item in ranked if (item.time_us >= least_us if only is None else op in only)]
        chosen: list[RegionOp] = []
        for op, item in worth:
            if len(chosen) == MOST_REGIONS:
                break
            try:
                chosen.append(_made(op, item, self.model, backend))
            except FAULTS as error:
                share = item.time_us / total_us
                self.notes.append(f"{op} ({share:.0%} of the time) is left alone: {first_line(error)}")
        return chosen


def _made(op: str, item: Found, model: str, backend: str) -> RegionOp:
    """Raises: NotGenerated, ValueError with what speaks against it."""
    if backend not in STARTERS:
        known = " and ".join(STARTERS)
        raise NotGenerated(f"no first kernel is generated for backend {backend}, only for {known}")
    about = f"{model}: {item.calls} calls in one forward, which take {item.time_us:.0f} us of PyTorch"
    wanted = set(item.written.region.inputs)
    inputs = recorded_inputs(item.written, values_of(item.graph.gm, item.graph.inputs, wanted))
    text = reference_text(item.written, inputs, hard=(*ADVERSARIES, "extremes"), about=about)
    device = str(value_of(item.written.region.output).device)
    hard = _computable(spec_of(op, text), device)
    text = reference_text(item.written, inputs, hard=hard, about=about)
    spec = spec_of(op, text)
    captured = spec.spellings[0].fn
    examples = [unfilled(meta, device) for meta in spec.cases[0].tensors.values()]
    starter = STARTERS[backend](op, calls_of(captured), examples, about=about, layouts=str(captured.__doc__))
    _check_starter(spec, starter, device)
    return RegionOp(spec=spec, reference=text, starter=starter, calls=item.calls, time_us=item.time_us)


def _check_starter(spec: KernelSpec, text: str, device: str) -> None:
    """Build the first kernel and call it once: what does not work here shall not take a place in the plan.

    Raises: NotGenerated.
    """
    with TemporaryDirectory(prefix="autokernel-region-") as folder:
        path = Path(folder) / STARTER
        path.write_text(text)
        try:
            kernel = load_kernel(path, op=spec.op, cases=spec.cases, builds=Path(folder)).kernel_fn
            reason = _compared(spec, spec.make_inputs(spec.cases[0], PROBE_SEED, device), kernel)
        except Exception as error:
            raise NotGenerated(f"Inductor's code cannot be used: {first_line(error)}") from None
    if reason:
        raise NotGenerated(f"Inductor's code is not exact enough: {reason}")


def spec_of(op: str, text: str) -> KernelSpec:
    """The spec that a region's file describes. Raises: whatever the file raises."""
    with TemporaryDirectory(prefix="autokernel-region-") as folder:
        path = Path(folder) / "reference.py"
        path.write_text(text)
        spec: KernelSpec = load_file(path, f"autokernel_region_{op}").SPEC
        return spec


def _computable(spec: KernelSpec, device: str) -> tuple[str, ...]:
    """Names of the hard inputs on which PyTorch itself, in the region's dtype, is as exact as a kernel must be.

    Raises: ValueError when it is not even on ordinary ones.
    """
    if reason := _own_error(spec, "recorded", device):
        raise ValueError(f"PyTorch's own result is no yardstick: {reason}")
    names = [name for name in (*ADVERSARIES, "extremes") if _own_error(spec, name, device) is None]
    return tuple(names)


def _own_error(spec: KernelSpec, name: str, device: str) -> str | None:
    """What a judge would say of PyTorch's own result on inputs of this kind; None when it is right each time."""
    case = spec.cases[0]
    for number in range(PROBES):
        seed = PROBE_SEED + number
        inputs = spec.make_inputs(replace(case, name=name), seed, device)
        if name in ADVERSARIES:
            inputs = ADVERSARIES[name](inputs, torch.Generator().manual_seed(seed))
        try:
            reason = _compared(spec, inputs, spec.baselines["eager"])
        except OracleError as error:
            return str(error)
        if reason:
            return reason
    return None


def _compared(spec: KernelSpec, inputs: Inputs, kernel: Callable[..., Tensor]) -> str | None:
    """What a judge would say of one call."""
    truth, meta = truth_of(spec, inputs)
    with torch.no_grad():
        result = kernel(*inputs.values())
    if (tuple(result.shape), DTYPE_NAMES[result.dtype]) != (meta.shape, meta.dtype):
        return f"its result is {list(result.shape)} {result.dtype}"
    return mismatch(result, truth, meta.dtype, spec.tolerances[meta.dtype])
