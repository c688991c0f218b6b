"""The views of a run: `RichView` for a terminal (drawn by `autokernel.screen`), `PlainView` with one line per event for
logs, `JsonView` with one JSON object per event for programs. None of them decides anything.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TextIO

from autokernel.history import KernelHistory
from autokernel.records import Experiment, PlannedOp
from autokernel.screen import RichView
from autokernel.view import RunSummary, View

__all__ = ["JsonView", "PlainView", "RichView", "View"]


class PlainView:
    """One line per event, each with the time since the start; on stderr if no stream is given."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._start = stream or sys.stderr, time.monotonic()

    def note(self, message: str) -> None:
        """A line for the user."""
        self._line(f"note: {message}")

    def stage(self, name: str) -> None:
        """A long step begins."""
        self._line(f"{name} ...")

    def planned(self, plan: Sequence[PlannedOp], wall_us: float, skipped: Sequence[PlannedOp]) -> None:
        """A line for the model and one per op."""
        self._line(f"plan: one forward takes {wall_us / 1e3:.2f} ms; {len(plan)} ops, most promising first")
        for op in plan:
            headroom = "unknown" if op.headroom is None else f"{op.headroom:.0%}"
            self._line(
                f"  {op.op}: {op.share:.1%} of the time, headroom {headroom}, whole model up to {op.potential:.2f}x"
            )
        for op in skipped:
            self._line(f"  {op.op}: {op.share:.1%} of the time, left alone")

    def op_started(self, history: KernelHistory) -> None:
        """Starter and baselines."""
        ways = ", ".join(f"{name} {us:.1f} us" for name, us in history.baseline.latencies_us.items())
        self._line(
            f"{history.op}: starter {history.incumbent_us:.1f} us ({history.speedup_vs_baseline:.2f}x); PyTorch: {ways}"
        )

    def experiment(self, history: KernelHistory, experiment: Experiment) -> None:
        """Verdict, decision, the reason and the idea."""
        timing = experiment.outcome.timing
        numbers = f"{timing.incumbent_us:.1f} -> {timing.candidate_us:.1f} us, " if timing else ""
        self._line(
            f"#{experiment.number} {experiment.op} {experiment.outcome.verdict} {experiment.decision}: "
            f"{numbers}{experiment.reason} | {experiment.proposal.hypothesis} | {experiment.seconds:.1f} s"
        )

    def op_stopped(self, history: KernelHistory) -> None:
        """Why the loop moves on."""
        self._line(
            f"{history.op}: done after {len(history.experiments)} experiments ({history.stop_reason}); "
            f"{history.incumbent_us:.1f} us, {history.speedup_vs_baseline:.2f}x against {history.baseline.fastest}"
        )

    def finished(self, summary: RunSummary) -> None:
        """The run is over."""
        self._line(f"run {summary.run} is over: {summary.reason}")

    def close(self) -> None:
        """Nothing to give back."""

    def _line(self, text: str) -> None:
        seconds = int(time.monotonic() - self._start)
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not end the run
            print(f"{seconds // 60:3d}:{seconds % 60:02d} {' '.join(text.splitlines())}", file=self._stream, flush=True)


class JsonView:
    """One JSON object per line: `event` says which, `time` is UTC."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, message: str) -> None:
        """`note`: message."""
        self._emit("note", message=message)

    def stage(self, name: str) -> None:
        """`stage`: name."""
        self._emit("stage", name=name)

    def planned(self, plan: Sequence[PlannedOp], wall_us: float, skipped: Sequence[PlannedOp]) -> None:
        """`planned`: wall_us, plan and skipped with op, share, headroom, potential, time_us."""
        self._emit("planned", wall_us=wall_us, plan=[_op(op) for op in plan], skipped=[_op(op) for op in skipped])

    def op_started(self, history: KernelHistory) -> None:
        """`op-started`: op, backend, device, baselines_us, starter_us."""
        self._emit(
            "op-started",
            op=history.op,
            backend=history.backend,
            device=history.device,
            baselines_us=dict(history.baseline.latencies_us),
            starter_us=history.incumbent_us,
        )

    def experiment(self, history: KernelHistory, experiment: Experiment) -> None:
        """`experiment`: the record without the kernel's text."""
        timing = experiment.outcome.timing
        self._emit(
            "experiment",
            number=experiment.number,
            op=experiment.op,
            hypothesis=experiment.proposal.hypothesis,
            verdict=experiment.outcome.verdict,
            stage=experiment.outcome.stage,
            decision=experiment.decision,
            reason=experiment.reason,
            latency_us=experiment.latency_us,
            incumbent_us=experiment.incumbent_us,
            speedup=asdict(timing.speedup) if timing else None,
            speedup_vs_baseline=history.speedup_vs_baseline,
            commit=experiment.commit,
            seconds=experiment.seconds,
        )

    def op_stopped(self, history: KernelHistory) -> None:
        """`op-stopped`: op, reason, latency_us, speedup_vs_baseline, baseline."""
        self._emit(
            "op-stopped",
            op=history.op,
            reason=history.stop_reason,
            latency_us=history.incumbent_us,
            speedup_vs_baseline=history.speedup_vs_baseline,
            baseline=history.baseline.fastest,
        )

    def finished(self, summary: RunSummary) -> None:
        """`finished`: run, branch, reason, seconds."""
        self._emit("finished", run=summary.run, branch=summary.branch, reason=summary.reason, seconds=summary.seconds)

    def close(self) -> None:
        """Nothing to give back."""

    def _emit(self, event: str, **fields: Any) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps({"event": event, "time": stamp, **fields}), file=self._stream, flush=True)


def _op(op: PlannedOp) -> dict[str, Any]:
    return {
        "op": op.op,
        "share": op.share,
        "headroom": op.headroom,
        "potential": op.potential,
        "time_us": op.time_us,
    }
