"""`Session`: one run's resources (directory, journal, git branch, judge, agent) and the steps that the loop is made of.

Every step writes what it did to the journal before the next begins, and each can be repeated after a crash: an
experiment that was only proposed is judged again, one that was judged is recorded again, and nothing counts twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autokernel import recording, wholemodel
from autokernel.agenthost import AgentHost
from autokernel.agents import Agent
from autokernel.agents.host import LimitReached
from autokernel.facts import Facts
from autokernel.history import KernelHistory
from autokernel.journal import write_whole
from autokernel.kerneltext import ShelvedText, text_digest
from autokernel.loading import starter_path
from autokernel.measuring import Measuring, UnusableOp
from autokernel.records import Decision, Outcome, PlannedOp, Proposal
from autokernel.roofline import Ceilings
from autokernel.rules import Rule, first_reason_to_stop
from autokernel.searching import Searching
from autokernel.state import Pending, judged_json, proposed_json, started_json
from autokernel.view import RunSummary, View

if TYPE_CHECKING:
    from autokernel.opening import OpenRun

NOTHING_LEFT = "the agent has nothing left to try"
THINKING = "agent is thinking"
INTEGRATE_MIN_S = 60.0


class Session:
    """One run, open: `autokernel.opening.open_session` makes it, and the loop calls the steps."""

    def __init__(self, run: OpenRun, view: View, secrets: Mapping[str, str]) -> None:
        """Raises: ConfigError when the agent cannot work."""
        state = run.state
        self.settings, self.view, self.run_dir = run.settings, view, run.run_dir
        self.wall_us = 0.0
        self._journal, self._repo, self._budget, self._sandbox = run.journal, run.repo, run.budget, run.sandbox
        self._plan_fields = run.plan
        self._histories = dict(state.histories) if state else {}
        self._pending = state.pending if state else None
        self.current_op = state.current_op if state else None
        self._integration: dict[str, Any] | None = None
        self._unusable = set(state.unusable) if state else set()
        self._measuring = Measuring(self.settings, run.run_dir, run.journal, view)
        bench_of, searched = self._measuring.bench_of, state.searched if state else {}
        self._searching = Searching(self.settings, view, run.run_dir, run.journal, run.budget, bench_of, searched)
        self._shown: set[str] = set()
        self._agent_limit: str | None = None  # why the agent may not go on: money, tokens, time
        self._tip = run.repo.head()  # the branch as the journal knows it: whatever a crash left beyond it is undone
        self._host = AgentHost(
            self.settings,
            view,
            self._journal,
            self._budget.time_left_s,
            state,
            lambda: self._histories.values(),
            Facts(builds=run.run_dir.builds, ceilings=self._ceilings),
        )
        self.agent: Agent = self._host.build(secrets)
        self._rows = recording.Rows(self.settings, self.run_dir.name, self.agent.name)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.view.close()
        self._measuring.close()

    def finish(self, reason: str) -> RunSummary:
        """Write the end of the run and sum it up."""
        self._journal.append("run-ended", reason=reason)
        summary = RunSummary(
            run=self.run_dir.name,
            settings=self.settings,
            branch=self._repo.branch,
            reason=reason,
            histories=tuple(self._histories.values()),
            integration=self._integration,
            seconds=self._budget.elapsed_s(),
            sandbox=self._sandbox,
        )
        self.view.finished(summary)
        return summary

    # -- the plan

    @property
    def histories(self) -> tuple[KernelHistory, ...]:
        """Of the ops that were begun, in that order."""
        return tuple(self._histories.values())

    @property
    def branch(self) -> str:
        """The git branch of the run."""
        return self._repo.branch

    @property
    def left(self) -> tuple[int | None, float]:
        """How many more experiments (None: no limit) and how many more seconds the run may take."""
        return self._budget.experiments_left(self._done()), self._budget.time_left_s()

    def plan(self) -> list[PlannedOp]:
        """The ranked ops of the model."""
        plan = self._plan_fields
        self.wall_us = plan["profile"]["wall_us"]
        for note in plan["notes"]:
            self.view.note(note)
        return [PlannedOp.from_json(raw) for raw in plan["plan"]["ops"]]

    def has_starter(self, planned: PlannedOp) -> bool:
        """Whether this backend has a first kernel for the op."""
        return self._starter(planned.op) is not None

    def is_closed(self, planned: PlannedOp, rules: tuple[Rule, ...]) -> bool:
        """Whether there is nothing more to do on the op under these rules."""
        history = self._histories.get(planned.op)
        if history is None:
            return planned.op in self._unusable
        return history.stop_reason == NOTHING_LEFT or first_reason_to_stop(rules, history) is not None

    def remaining_potential(self, planned: PlannedOp) -> float:
        """End-to-end speedup if the headroom that is left were used: measured anew by every experiment."""
        history = self._histories.get(planned.op)
        return planned.potential if history is None else history.remaining_potential

    # -- the steps of one op

    def start(self, planned: PlannedOp) -> KernelHistory | None:
        """Judge the starter and measure PyTorch's own ways; None when the starter does not pass on this machine."""
        self.current_op = planned.op
        if planned.op in self._histories:
            return self._show(self._histories[planned.op])
        path = self._starter(planned.op)
        assert path is not None, "the loop asks has_starter first"
        starter = path.read_text()
        try:
            history = self._measuring.begun(planned, starter, self._ceilings())
        except UnusableOp as reason:
            self._skip(planned.op, str(reason))
            return None
        self._write_kernel(planned.op, 0, starter)
        self._tip = self._repo.commit_kernel(
            starter,
            subject=f"{planned.op}: starter for {self.settings.backend}",
            trailers={"Starter": f"{self.run_dir.name}/{planned.op}", "Latency-us": f"{history.incumbent_us:.2f}"},
        )
        self._journal.append(
            "op-started", op=planned.op, digest=text_digest(starter), history=started_json(history), tip=self._tip
        )
        self._histories[planned.op] = history
        return self._show(history)

    def _skip(self, op: str, reason: str) -> None:
        """Leave an op alone for the rest of the run."""
        self.view.note(f"{op}: {reason}; skipped")
        self._journal.append("op-skipped", op=op, reason=reason)
        self._unusable.add(op)

    def unfinished(self) -> tuple[KernelHistory, Proposal] | None:
        """What a killed run has proposed and perhaps judged, but not recorded."""
        if self._pending is None:
            return None
        return self._show(self._histories[self._pending.op]), self._pending.proposal

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The agent's next idea; None when it has none."""
        assert self._pending is None, "finish the last experiment first"
        begin = time.perf_counter()
        self.view.stage(f"{history.op}: the {self.agent.name} {THINKING}")
        waited_s = self._host.waited_s
        try:
            proposal = self.agent.propose(history)
        except LimitReached as limit:
            self._agent_limit = limit.reason
            return None
        if proposal is None:
            return None
        agent_s = time.perf_counter() - begin - (self._host.waited_s - waited_s)
        return self._begin(history, proposal, agent_s)

    def _begin(self, history: KernelHistory, proposal: Proposal, agent_s: float) -> Proposal:
        """Journal the proposal as the next experiment."""
        number = self._done() + 1
        file = self._write_kernel(history.op, number, proposal.kernel_py)
        if proposal.request is not None and proposal.reply is not None:
            write_whole(self.run_dir.request_path(history.op, number), proposal.request)
            write_whole(self.run_dir.reply_path(history.op, number), proposal.reply)
        kept = replace(proposal, kernel_py=file, request=None, reply=None)  # the texts stay on disk
        pending = Pending(number=number, op=history.op, proposal=kept, file=file, agent_s=agent_s)
        self._journal.append("proposed", **proposed_json(pending))
        self._pending = pending
        return kept

    def tune_starter(self, history: KernelHistory) -> Proposal | None:
        """The starter with better numbers, as the op's first experiment; None where there is nothing better."""
        found = self._searching.of_starter(history)
        return None if found is None else self._begin(history, *found)

    def tune(self, history: KernelHistory, proposal: Proposal) -> Proposal:
        """The proposal with the best configuration that a short search finds, where its structure is new."""
        pending = self._pending
        assert pending is not None, "propose first"
        if pending.tuned_s is not None or pending.judged is not None:
            return proposal
        numbers = self._searching.of_edit(history, proposal.kernel_py, pending.number)
        if numbers is None:
            return proposal
        self._pending = pending.tuned(numbers)
        return self._pending.proposal

    def judge(self, history: KernelHistory, proposal: Proposal) -> Outcome:
        """The judge's answer on the proposal, timed against the incumbent."""
        assert self._pending is not None, "propose first"
        if self._pending.judged is not None:
            return self._pending.judged.outcome
        self.view.stage(f"{history.op}: judging experiment {self._pending.number}: {proposal.hypothesis}")
        return self._measuring.verdict(history.planned, proposal.kernel_py, history.incumbent)

    def record(
        self, history: KernelHistory, proposal: Proposal, outcome: Outcome, decision: Decision, why: str
    ) -> KernelHistory:
        """Journal, commit and log the decided experiment; the history with it."""
        pending = self._pending
        assert pending is not None, "propose first"
        experiment = pending.judged
        if experiment is None:
            experiment = pending.decided(outcome, decision, why, outcome.seconds + pending.spent_s)
            self._journal.append("judged", **judged_json(experiment))
        work = self._measuring.bench_of(history.planned).work
        commit = recording.commit(self._repo, self.run_dir.name, history, experiment, work, self._tip)
        experiment = replace(experiment, commit=commit)
        self._tip = self._repo.head()
        self._journal.append("recorded", number=experiment.number, op=history.op, commit=commit, tip=self._tip)
        self._pending = None
        self._rows.add(history, experiment, work)
        self._budget.took(experiment.seconds)
        before, history = history.incumbent_us, history.add(experiment)
        history = self._measuring.up_to_date(history, before, experiment.incumbent_us)
        self._histories[history.op] = history
        self.view.experiment(history, experiment)
        return history

    def mend_results(self) -> None:
        """Add the rows of results.tsv that a crash, a full disk or somebody's edit took from this run."""
        for history in self._histories.values():
            for experiment in self._rows.missing(history):
                self._rows.add(history, experiment, self._measuring.bench_of(history.planned).work)

    def move_on(self, history: KernelHistory, reason: str) -> None:
        """Close the op: its best kernel is committed under `optimized/`."""
        self._journal.append("op-stopped", op=history.op, reason=reason)
        self.current_op = None
        history = history.stopped(reason)
        self._histories[history.op] = history
        self.view.op_stopped(history)

    # -- limits

    def limit_reached(self) -> str | None:
        """The run's own reason to stop: its experiments or its time (less what the end needs) are used up."""
        return self._agent_limit or self._budget.used_up(self._done())

    def ask_again(self) -> None:
        """Let the agent be asked once more, although it had no answer the last time."""
        self._agent_limit = None

    # -- the end

    def integrate(self) -> None:
        """Export each op's best kernel and measure the whole model with them, in a child process."""
        if not self._histories:
            return
        for history in self._histories.values():
            wholemodel.export(self.run_dir, history)
            self._tip = wholemodel.commit(self._repo, self.run_dir, history)
        self._journal.append("exported", tip=self._tip)
        self.view.stage("measuring the whole model")
        budget_s = max(INTEGRATE_MIN_S, self.settings.budget_s - self._budget.elapsed_s())
        self._integration = wholemodel.measure(self.settings, self.run_dir, self._histories.values(), budget_s)
        self._journal.append("integrated", result=self._integration)

    # -- small parts

    def _show(self, history: KernelHistory) -> KernelHistory:
        if history.op not in self._shown:  # a second pass goes on where the first stopped
            self._shown.add(history.op)
            self.view.op_started(history)
        return history

    def _starter(self, op: str) -> Path | None:
        own = self.settings.starters / f"{op}.py" if self.settings.starters else None
        return own if own is not None and own.is_file() else starter_path(op, self.settings.backend)

    def _ceilings(self) -> Ceilings:
        return Ceilings.from_json(self._plan_fields["ceilings"])

    def _done(self) -> int:
        return sum(len(history.experiments) for history in self._histories.values())

    def _write_kernel(self, op: str, number: int, text: str) -> ShelvedText:
        file = ShelvedText(path=str(self.run_dir.kernel_path(op, number)), digest=text_digest(text))
        write_whole(Path(file.path), text)
        return file
