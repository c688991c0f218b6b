"""A run's judge, turned to the op in hand: verdicts, where an op begins, and PyTorch's latencies when they change."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from autokernel.diskspace import require_space
from autokernel.errors import MeasurementError
from autokernel.history import KernelHistory
from autokernel.journal import Journal
from autokernel.records import Outcome, PlannedOp, Verdict
from autokernel.roofline import Ceilings
from autokernel.rundir import RunDir
from autokernel.settings import Settings
from autokernel.view import View

if TYPE_CHECKING:
    from autokernel.bench import Bench

DRIFT = 1.3
"""When an incumbent's latency changes by this factor between two experiments, the baseline is out of date."""


class UnusableOp(Exception):
    """Why an op cannot be worked on here."""


class Measuring:
    """Its processes are started for the first op that needs them, and end with `close`."""

    def __init__(self, settings: Settings, run_dir: RunDir, journal: Journal, view: View) -> None:
        self._settings, self._run_dir, self._journal, self._view = settings, run_dir, journal, view
        self._stack = ExitStack()
        self._bench: Bench | None = None

    def bench_of(self, planned: PlannedOp) -> Bench:
        """The judge, turned to this op."""
        if self._bench is None:
            from autokernel.bench import Bench  # with torch: seconds, which a step that judges nothing does not spend

            bench = Bench(self._run_dir.builds, self._settings.backend, self._settings.sandbox)
            self._bench = self._stack.enter_context(bench)
            # What is imported stays: without PyTorch's objects to go through, cycles are collected hours sooner.
            gc.freeze()
        self._bench.turn_to(planned)
        return self._bench

    def verdict(self, planned: PlannedOp, kernel_py: str, incumbent: str | None) -> Outcome:
        """The judge's answer, unless there is no room on the disk: that is not the kernel's fault."""
        bench = self.bench_of(planned)
        require_space(self._run_dir.path)
        outcome = bench.judge(kernel_py, incumbent)
        if outcome.verdict is not Verdict.PASS:
            require_space(self._run_dir.path)
        return outcome

    def begun(self, planned: PlannedOp, starter: str, ceilings: Ceilings) -> KernelHistory:
        """Where an op begins: its starter, judged, beside PyTorch's own ways. Raises: UnusableOp."""
        begin = time.perf_counter()
        self._view.stage(f"{planned.op}: judging the starter")
        outcome = self.verdict(planned, starter, None)
        if outcome.verdict is not Verdict.PASS:
            raise UnusableOp(f"the starter gets {outcome.verdict} here ({outcome.reason})")
        self._view.stage(f"{planned.op}: measuring PyTorch's own ways")
        bench = self.bench_of(planned)
        try:
            baseline, starter_us = bench.baseline(starter, compiled=self._settings.compile_baseline)
        except MeasurementError as error:
            raise UnusableOp(str(error)) from error
        return KernelHistory(
            planned=planned,
            backend=self._settings.backend,
            device=ceilings.device,
            baseline=baseline,
            incumbent=starter,
            incumbent_us=starter_us,
            floor_us=bench.floor_us(ceilings),
            active_s=time.perf_counter() - begin,
            flops=bench.work.flops,
            nbytes=bench.work.nbytes,
        )

    def up_to_date(self, history: KernelHistory, before_us: float, now_us: float | None) -> KernelHistory:
        """`history`, with PyTorch's latencies anew where the same incumbent's went from `before_us` to `now_us` by more
        than noise: the machine has changed."""
        if not now_us or 1 / DRIFT < now_us / before_us < DRIFT:
            return history
        self._view.note(
            f"{history.op}: the incumbent went from {before_us:.1f} to {now_us:.1f} us; measuring PyTorch again"
        )
        bench = self.bench_of(history.planned)
        try:
            baseline, incumbent_us = bench.baseline(history.incumbent, compiled=self._settings.compile_baseline)
        except MeasurementError as error:
            self._view.note(f"{history.op}: {error}; PyTorch's earlier latencies stand")
            return history
        self._journal.append(
            "baseline", op=history.op, latencies_us=dict(baseline.latencies_us), incumbent_us=incumbent_us
        )
        return replace(history, baseline=baseline, incumbent_us=incumbent_us)

    def close(self) -> None:
        """End the judge's processes."""
        self._stack.close()
