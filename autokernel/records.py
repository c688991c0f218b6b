"""The records that pass between modules, as frozen dataclasses and enums; no torch here.

A dtype is a short string (`fp32`, `bf16`, `fp16`, `fp64`, `int64`, `bool`); every quantity carries its unit in its
name. `to_json` / `from_json` exist where a record crosses a process or a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from autokernel.kerneltext import KernelText

Scalar = bool | int | float | str | tuple[int, ...] | None
"""What a kernel takes beside tensors: an eps, a dim or several, a flag, a mode."""


class Verdict(StrEnum):
    """What the judge found out about a candidate."""

    PASS = "PASS"  # every stage passed (and, when timed, the timing is trustworthy)
    FAIL = "FAIL"  # a wrong result: value, shape, dtype, device, determinism or a changed input
    CRASH = "CRASH"  # an exception, a compile error or a signal
    TIMEOUT = "TIMEOUT"  # the deadline passed; the process group was killed
    OOM = "OOM"  # out of memory where the oracle's own inputs fit
    DELEGATES = "DELEGATES"  # the work was handed to a library call that the op does not allow
    TAMPER = "TAMPER"  # a report that cannot be true, or a write where none is allowed
    SCREENED = "SCREENED"  # plainly slower than the incumbent after smoke; the other stages were not run


class Decision(StrEnum):
    """What the loop did with an experiment."""

    KEEP = "KEEP"
    REVERT = "REVERT"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Shape, dtype and strides (in elements; None means contiguous) of one tensor argument."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to call an op: tensor arguments by name, scalar arguments by name. Values come from a seed.

    `dtype` is the floating dtype that the case is about; each tensor still carries its own (targets are int64).
    """

    op: str
    name: str
    dtype: str
    tensors: Mapping[str, TensorMeta]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Stable text that is equal for equal calls, whatever the case is named."""
        return json.dumps(
            [self.op, self.dtype, {k: asdict(v) for k, v in self.tensors.items()}, dict(self.scalars)],
            sort_keys=True,
        )

    @property
    def label(self) -> str:
        """Short text for people: `1x512x512 fp32`; the first tensor's shape, or the case's name if it has none."""
        first = next(iter(self.tensors.values()), None)
        shape = "x".join(map(str, first.shape)) if first and first.shape else "scalar"
        return f"{shape} {self.dtype}"

    def with_dtype(self, dtype: str) -> Case:
        """The same call with every floating tensor of this case's dtype in another dtype."""
        tensors = {
            name: replace(meta, dtype=dtype) if meta.dtype == self.dtype else meta
            for name, meta in self.tensors.items()
        }
        return replace(self, dtype=dtype, tensors=tensors)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Case:
        """Inverse of `to_json`."""
        tensors = {
            name: TensorMeta(
                shape=tuple(meta["shape"]),
                dtype=meta["dtype"],
                stride=None if meta.get("stride") is None else tuple(meta["stride"]),
            )
            for name, meta in raw["tensors"].items()
        }
        scalars = {name: tuple(value) if isinstance(value, list) else value for name, value in raw["scalars"].items()}
        return Case(op=raw["op"], name=raw["name"], dtype=raw["dtype"], tensors=tensors, scalars=scalars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted absolute error, for outputs of magnitude one or more, and relative error."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    low: float
    estimate: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """A recorded call of the user's model, with how often one forward makes it."""

    case: Case
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """One op of the plan: the model's calls of it and what PyTorch needs for them.

    `share` is the fraction of the model's wall time in [0, 1]; `headroom` the fraction of the op's own time that the
    roofline leaves, or None where the ceilings are unknown; `potential` the model's speedup if the headroom were used.
    """

    op: str
    cases: tuple[TimedCase, ...]
    time_us: float
    share: float
    headroom: float | None
    potential: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> PlannedOp:
        """Inverse of `to_json`."""
        cases = tuple(TimedCase(case=Case.from_json(item["case"]), calls=item["calls"]) for item in raw["cases"])
        return PlannedOp(**{**raw, "cases": cases})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What one stage saw."""

    stage: str
    verdict: Verdict
    cases: int
    seconds: float
    reason: str = ""

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> StageReport:
        """Inverse of `dataclasses.asdict`; equal names are one string in memory, as a night has thousands."""
        return StageReport(**{**raw, "stage": sys.intern(raw["stage"]), "verdict": Verdict(raw["verdict"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The GPU's multiprocessor clock over a measurement, and what kept it below what was asked for."""

    low_mhz: int
    high_mhz: int
    slowed_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        slowed = f", slowed by {' and '.join(self.slowed_by)}" if self.slowed_by else ""
        span = f"{self.low_mhz}" if self.low_mhz == self.high_mhz else f"{self.low_mhz}-{self.high_mhz}"
        return f"{span} MHz{slowed}"

    @staticmethod
    def joined(clocks: Iterable[Clocks | None]) -> Clocks | None:
        """The span of all that are known; None where none is."""
        known = [each for each in clocks if each is not None]
        if not known:
            return None
        return Clocks(
            low_mhz=min(each.low_mhz for each in known),
            high_mhz=max(each.high_mhz for each in known),
            slowed_by=tuple(sorted({name for each in known for name in each.slowed_by})),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Latency of one forward's worth of calls (sum over timed cases of calls x latency), interleaved A/B.

    `speedup` is incumbent latency / candidate latency. On a GPU latency is device time; `host_us` is what the host
    needs to start the candidate's calls, `graph_us` their time in a replayed CUDA graph (None: not measured).
    """

    candidate_us: float
    incumbent_us: float
    speedup: Interval
    blocks: int
    host_us: float | None = None
    graph_us: float | None = None
    clocks: Clocks | None = None

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Timing:
        """Inverse of `dataclasses.asdict`, also for records that were written before a field existed."""
        clocks = raw.get("clocks")
        if clocks is not None:
            clocks = Clocks(**{**clocks, "slowed_by": tuple(clocks["slowed_by"])})
        return Timing(**{**raw, "speedup": Interval(**raw["speedup"]), "clocks": clocks})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """What a compiled device kernel takes: registers per thread, stack (where spilled registers go), shared memory.

    None is unknown. `shared_bytes` is of one block; what a CUDA launch adds dynamically is not in it. `threads` is the
    block's size where the compiler was told; `blocks_per_sm` how many of them fit on one multiprocessor, `occupancy`
    the share of its threads that they are, in [0, 1].
    """

    kernel: str
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The judge's whole answer on one candidate."""

    verdict: Verdict
    stage: str  # the stage that ended it, or "" when all passed
    reason: str
    stages: tuple[StageReport, ...]
    timing: Timing | None
    peak_memory_mb: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_json`."""
        stages = tuple(StageReport.from_json(stage) for stage in raw["stages"])
        timing = raw["timing"]
        if timing is not None:
            timing = Timing.from_json(timing)
        return Outcome(**{**raw, "verdict": Verdict(raw["verdict"]), "stages": stages, "timing": timing})


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """PyTorch's latency for one forward's worth of calls, by name of the way it was called (`eager`, `compile`...)."""

    latencies_us: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """Name of the fastest way that PyTorch itself offers."""
        return min(self.latencies_us, key=lambda name: self.latencies_us[name])

    @property
    def latency_us(self) -> float:
        """Latency of the fastest."""
        return self.latencies_us[self.fastest]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What an agent wants to try: the full text of kernel.py and the idea in one line.

    `agent` is the member of an ensemble that it is from; `request` and `reply` what a model was asked and said;
    `numbers` what the search for its best configuration found, in words.
    """

    hypothesis: str
    kernel_py: KernelText = KernelText()  # noqa: RUF009 - a descriptor, made once
    tokens: int | None = None
    cost_usd: float | None = None
    agent: str | None = None
    numbers: str = field(default="", repr=False)
    request: str | None = field(default=None, repr=False, compare=False)
    reply: str | None = field(default=None, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Content hash of the proposed file."""
        return KernelText.digest(self, "kernel_py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One edit, judged and decided. `number` counts from 1 within the run (0 is an op's starter)."""

    number: int
    op: str
    proposal: Proposal
    outcome: Outcome
    decision: Decision
    reason: str  # why it was kept or reverted, in one line
    latency_us: float | None  # candidate's latency for one forward's worth of calls
    incumbent_us: float | None  # incumbent's, measured interleaved with it
    commit: str | None
    agent_s: float  # seconds the agent took
    seconds: float  # seconds of the whole experiment
