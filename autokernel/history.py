"""`KernelHistory`: all that has happened to one op in a run. Rules, agents, live view and report read it; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autokernel.amdahl import potential
from autokernel.experiments import Experiments
from autokernel.records import Baseline, Decision, Experiment, PlannedOp

SHORTER = 0.90
"""An equally fast kernel becomes the incumbent when its text is at most this fraction of the incumbent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelHistory:
    """The experiments on one op so far and its incumbent.

    `incumbent_us` is the incumbent's latency for one forward's worth of the op's calls, from the newest measurement.
    `floor_us` is the time the measured ceilings of the device allow at best (None: unknown); `flops` and `nbytes` are
    the work that it is for. `active_s` counts only time spent on this op, over all sessions of the run. `stop_reason`
    is set once the loop has moved on. `add` counts the `kept` experiments and those reverted since the last of them,
    and notes the first incumbent's text as the `starter`; None before, when `incumbent` is the starter.
    """

    planned: PlannedOp
    backend: str
    device: str
    baseline: Baseline
    incumbent: str
    incumbent_us: float
    floor_us: float | None = None
    experiments: Experiments = field(default_factory=Experiments)
    kept: int = 0
    reverts_in_a_row: int = 0
    active_s: float = 0.0
    stop_reason: str | None = None
    starter: str | None = None
    flops: int | None = None
    nbytes: int | None = None

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.planned.op

    @property
    def cases(self) -> str:
        """The calls that the latencies are of: `17 x 4x2048x2048 bf16`."""
        return ", ".join(f"{item.calls} x {item.case.label}" for item in self.planned.cases)

    @property
    def speedup_vs_baseline(self) -> float:
        """Latency of PyTorch's fastest way / latency of the incumbent."""
        return self.baseline.latency_us / self.incumbent_us

    @property
    def starter_us(self) -> float:
        """The starter's latency: what the first kept kernel was measured against, or the incumbent's when none was."""
        first = next((e for e in self.experiments if e.decision is Decision.KEEP), None)
        return self.incumbent_us if first is None or first.incumbent_us is None else first.incumbent_us

    @property
    def roofline_fraction(self) -> float | None:
        """Share of the measured ceilings that the incumbent reaches, in [0, 1]; None where they are unknown."""
        return None if self.floor_us is None else min(1.0, self.floor_us / self.incumbent_us)

    @property
    def remaining_potential(self) -> float:
        """End-to-end speedup if the headroom that the incumbent leaves were used; the plan's where that is unknown."""
        if self.roofline_fraction is None:
            return self.planned.potential
        eager_us = self.baseline.latencies_us.get("eager", self.baseline.latency_us)
        share = min(1.0, self.planned.share * self.incumbent_us / eager_us)
        return potential(share, 1 - self.roofline_fraction)

    def add(self, experiment: Experiment) -> KernelHistory:
        """The history with one more experiment; a kept one becomes the incumbent."""
        kept = experiment.decision is Decision.KEEP
        newest_us = experiment.latency_us if kept else experiment.incumbent_us
        return replace(
            self,
            incumbent=experiment.proposal.kernel_py if kept else self.incumbent,
            incumbent_us=newest_us or self.incumbent_us,
            experiments=self.experiments.with_one(experiment),
            kept=self.kept + kept,
            reverts_in_a_row=0 if kept else self.reverts_in_a_row + 1,
            active_s=self.active_s + experiment.seconds,
            starter=self.incumbent if self.starter is None else self.starter,
        )

    def stopped(self, reason: str) -> KernelHistory:
        """The history, closed with the reason why the loop moved on."""
        return replace(self, stop_reason=reason)
