"""What the loop tells the screen. `View` is the contract; the live and the plain one are in `autokernel.live`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autokernel.history import KernelHistory
from autokernel.records import Experiment, PlannedOp
from autokernel.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended. `integration` is the whole-model measurement (see `autokernel.integrate`), None without one.

    `settings` are those that it had: the backend is the one that "auto" stood for, a resumed run's are its own.
    """

    run: str
    settings: Settings
    branch: str
    reason: str
    histories: tuple[KernelHistory, ...]
    integration: dict[str, Any] | None
    seconds: float
    sandbox: str = ""  # one line: what of the judge's sandbox was enforced


class View(Protocol):
    """Told of everything that happens, in order; it never decides and never raises."""

    def note(self, message: str) -> None:
        """One line that the user should see (what was guessed, what is missing)."""

    def stage(self, name: str) -> None:
        """A long step begins: loading, profiling, measuring the baseline, judging, measuring the whole model."""

    def planned(self, plan: Sequence[PlannedOp], wall_us: float, skipped: Sequence[PlannedOp]) -> None:
        """The ranked plan, the model's latency per forward, and the ops that promise too little."""

    def op_started(self, history: KernelHistory) -> None:
        """An op's starter passed and its baseline is known."""

    def experiment(self, history: KernelHistory, experiment: Experiment) -> None:
        """An experiment was decided; `history` includes it."""

    def op_stopped(self, history: KernelHistory) -> None:
        """The loop moves on; `history.stop_reason` says why."""

    def finished(self, summary: RunSummary) -> None:
        """The run is over."""

    def close(self) -> None:
        """Give the terminal back."""
