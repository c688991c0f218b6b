"""When a run searches the numbers of a kernel: its starter's once, and those of every edit of the structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from autokernel.budget import Budget
from autokernel.history import KernelHistory
from autokernel.journal import Journal
from autokernel.numbers import (
    Numbers,
    has_knobs,
    improved,
    is_new_structure,
    may_take_s,
    parents_trials,
    searches_starters,
)
from autokernel.records import PlannedOp, Proposal
from autokernel.rundir import RunDir
from autokernel.settings import Settings
from autokernel.view import View

if TYPE_CHECKING:
    from autokernel.bench import Bench


class Searching:
    """The searches of one run. `found` is what those of starters have found, by op, as the journal has it."""

    def __init__(
        self,
        settings: Settings,
        view: View,
        run_dir: RunDir,
        journal: Journal,
        budget: Budget,
        bench_of: Callable[[PlannedOp], Bench],
        found: Mapping[str, Numbers],
    ) -> None:
        self._settings, self._view, self._run_dir = settings, view, run_dir
        self._journal, self._budget, self._bench_of = journal, budget, bench_of
        self._found = dict(found)

    def of_starter(self, history: KernelHistory) -> tuple[Proposal, float] | None:
        """The starter with better numbers as a proposal, and the seconds it took; None where a search finds none.

        It is searched before the first experiment, once.
        """
        if history.experiments or not searches_starters(self._settings.agent):
            return None
        if history.op not in self._found:
            numbers = self._search(history, history.incumbent, 0)
            if numbers is None:
                return None
            self._found[history.op] = numbers
        numbers = self._found[history.op]
        proposal = improved(history.incumbent, numbers)
        return None if proposal is None else (proposal, numbers.seconds)

    def of_edit(self, history: KernelHistory, kernel_py: str, number: int) -> Numbers | None:
        """What a search finds for experiment `number`; None where its structure is not new, or it is not searched."""
        return self._search(history, kernel_py, number) if is_new_structure(history, kernel_py) else None

    def _search(self, history: KernelHistory, kernel_py: str, number: int) -> Numbers | None:
        """Search and journal; None where there is no time for it, or nothing to search."""
        seconds = may_take_s(self._settings.tune_s, self._budget.time_left_s())
        if not seconds or not has_knobs(kernel_py):
            return None
        what = f"of experiment {number}" if number else "of the starter"
        self._view.stage(f"{history.op}: searching the best configuration {what}")
        numbers = self._bench_of(history.planned).tune(
            kernel_py,
            seconds,
            seed=self._settings.seed,
            journal=self._run_dir.tuning_path(history.op, number),
            parent=parents_trials(self._run_dir, history, kernel_py),
        )
        if numbers is not None:
            self._journal.append("tuned", number=number, op=history.op, numbers=numbers.to_json())
            self._view.note(f"{history.op}: {numbers.gain}")
        return numbers
