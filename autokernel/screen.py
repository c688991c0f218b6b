"""`RichView`: the run as one screen that redraws itself; fits 80 columns and follows the terminal's size.

The screen takes little: it is redrawn twice a second and on each event, as its thread competes with what is measured.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autokernel.history import KernelHistory
from autokernel.records import Decision, Experiment, PlannedOp, Verdict
from autokernel.view import RunSummary

REDRAWS_PER_S = 2
SHOWN_EXPERIMENTS = 8
SHOWN_LATENCIES = 40
FIXED_LINES = 9  # header, stage, sparkline, two table heads and the space between them
BARS = "▁▂▃▄▅▆▇█"
COLORS = {Verdict.PASS: "green", Verdict.SCREENED: "yellow"}


class RichView:
    """The live view. Notes stay above the screen; the last state stays on the terminal after `close`."""

    def __init__(self, *, model: str, budget_s: float, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._model, self._budget_s, self._start = model, budget_s, time.monotonic()
        self._device, self._wall_us = "", 0.0
        self._plan: tuple[PlannedOp, ...] = ()
        self._skipped: tuple[PlannedOp, ...] = ()
        self._histories: dict[str, KernelHistory] = {}
        self._experiments: tuple[Experiment, ...] = ()
        self._latencies_us = defaultdict[str, deque[float]](lambda: deque(maxlen=SHOWN_LATENCIES))
        self._current: str | None = None
        self._spinner = Spinner("dots", text="starting")
        self._ended = ""
        self._live = Live(
            get_renderable=lambda: self,
            console=self._console,
            refresh_per_second=REDRAWS_PER_S,
            vertical_overflow="crop",
        )
        self._live.start()

    # -- events

    def note(self, message: str) -> None:
        """A line that scrolls up above the screen."""
        self._console.print(Text(message, style="bold yellow"))

    def stage(self, name: str) -> None:
        """Shown beside the spinner."""
        self._spinner = Spinner("dots", text=Text(name, overflow="ellipsis", no_wrap=True))
        self._live.refresh()

    def planned(self, plan: Sequence[PlannedOp], wall_us: float, skipped: Sequence[PlannedOp]) -> None:
        """Fills the plan's table."""
        self._plan, self._wall_us, self._skipped = tuple(plan), wall_us, tuple(skipped)
        self._live.refresh()

    def op_started(self, history: KernelHistory) -> None:
        """The op's row gets its numbers."""
        self._current, self._device = history.op, history.device
        self._histories[history.op] = history
        self._latencies_us[history.op].extend(e.latency_us for e in history.experiments if e.latency_us)
        self._live.refresh()

    def experiment(self, history: KernelHistory, experiment: Experiment) -> None:
        """One more row below."""
        self._histories[history.op] = history
        self._experiments = (*self._experiments, experiment)[-SHOWN_EXPERIMENTS:]
        if experiment.latency_us:
            self._latencies_us[history.op].append(experiment.latency_us)
        self._live.refresh()

    def op_stopped(self, history: KernelHistory) -> None:
        """The op's row is closed."""
        self._histories[history.op] = history
        self._current = None
        self._live.refresh()

    def finished(self, summary: RunSummary) -> None:
        """The spinner gives way to the reason why the run ended."""
        self._ended, self._current = f"run {summary.run} is over: {summary.reason}", None
        self._live.refresh()

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        self._live.stop()

    # -- drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._header()
        yield Text(self._ended, style="bold") if self._ended else self._spinner
        room = max(2, console.height - FIXED_LINES)
        if self._plan:
            yield Text()
            yield self._plan_table(max(1, room - 3))
            if self._skipped:
                yield _left_alone(self._skipped)
        if self._experiments:
            left = room - len(self._plan) - bool(self._skipped)
            yield Text()
            yield self._experiment_table(max(1, min(SHOWN_EXPERIMENTS, left)))
        history = self._histories.get(self._current or "")
        if history is not None and history.experiments:
            yield _progress(history, self._latencies_us[history.op])

    def _header(self) -> Text:
        elapsed = time.monotonic() - self._start
        parts = [self._model]
        if self._device:
            parts.append(self._device)
        if self._wall_us:
            parts.append(f"{self._wall_us / 1e3:.2f} ms per forward")
        parts.append(f"{_clock(elapsed)} of {_clock(self._budget_s)}")
        if not self._ended:
            parts.append(f"ends in {_clock(max(0.0, self._budget_s - elapsed))}")
        return Text.assemble(("autokernel ", "bold"), " · ".join(parts), overflow="fold")

    def _plan_table(self, rows: int) -> Table:
        table = _table("op", ">share", ">headroom", "state", ">kept", ">best us", "vs PyTorch")
        for op in self._plan[:rows]:
            history = self._histories.get(op.op)
            table.add_row(
                op.op,
                f"{op.share:.1%}",
                "?" if op.headroom is None else f"{op.headroom:.0%}",
                self._state(op, history),
                *(_numbers(history) if history else ("", "", "")),
                style="bold" if op.op == self._current else "",
            )
        return table

    def _state(self, op: PlannedOp, history: KernelHistory | None) -> str:
        if op.op == self._current:
            return "now"
        if history is None:
            return "waiting"
        return "done" if history.stop_reason is not None else "paused"

    def _experiment_table(self, rows: int) -> Table:
        table = _table(">#", "op", "verdict", "decision", "speedup [95 %]", "reason")
        for experiment in self._experiments[-rows:]:
            timing = experiment.outcome.timing
            verdict = experiment.outcome.verdict
            kept = experiment.decision is Decision.KEEP
            table.add_row(
                str(experiment.number),
                experiment.op,
                Text(verdict, style=COLORS.get(verdict, "red")),
                Text(experiment.decision, style="bold green" if kept else "dim"),
                str(timing.speedup) if timing else "",
                _one_line(experiment.proposal.hypothesis if kept or timing else experiment.reason),
            )
        return table


def _left_alone(ops: Sequence[PlannedOp]) -> Text:
    names, share = ", ".join(op.op for op in ops), sum(op.share for op in ops)
    return Text(f"left alone ({share:.1%}): {names}", style="dim", no_wrap=True, overflow="ellipsis")


def _table(*columns: str) -> Table:
    """A table whose last column takes what is left; `>` in front aligns a column to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    for index, name in enumerate(columns):
        options: dict[str, Any] = {"justify": "right" if name.startswith(">") else "left"}
        if index == len(columns) - 1:
            options["ratio"] = 1
        table.add_column(name.removeprefix(">"), no_wrap=True, overflow="ellipsis", **options)
    return table


def _numbers(history: KernelHistory) -> tuple[str, str, str]:
    return (
        f"{history.kept}/{len(history.experiments)}",
        f"{history.incumbent_us:.1f}",
        f"{history.speedup_vs_baseline:.2f}x {history.baseline.fastest}",
    )


def _progress(history: KernelHistory, latencies_us: Sequence[float]) -> Text:
    """The newest measured latencies of the op's experiments as bars, and the best."""
    return Text.assemble(
        (f"{history.op} ", "dim"),
        (sparkline(latencies_us), "cyan"),
        f" best {history.incumbent_us:.1f} us",
        no_wrap=True,
        overflow="ellipsis",
    )


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, from the lowest to the highest of them; "" without values."""
    if not values:
        return ""
    low, high = math.log(min(values)), math.log(max(values))
    span = high - low
    if span == 0:
        return BARS[0] * len(values)
    return "".join(BARS[round((math.log(value) - low) / span * (len(BARS) - 1))] for value in values)


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
