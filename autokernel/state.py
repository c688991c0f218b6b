"""The state of a run, rebuilt from its journal; no torch.

The journal is the truth: after `kill -9` the loop goes on from what this module reads, and the report shows the same.
Event kinds, in the order in which a run writes them:

    run-started  settings, version, sandbox,    op-started  op, history (without its text), digest, tip
                 environment                    proposed    number, op, hypothesis, digest, agent_s, tokens, cost_usd,
    planned      profile, plan, ceilings                    agent (of an ensemble)
    op-stopped   op, reason                     tuned       number (0: the starter), op, numbers (that a search found)
                                                judged      number, op, outcome, decision, reason, seconds
    exported     tip                            recorded    number, op, commit, tip
    baseline     op, latencies_us, incumbent_us    op-skipped  op, reason (its starter does not pass here)
    integrated   result                         run-ended   reason
    called       op, agent, model, outcome, reason, tokens, cost_usd  (one call of a language model, journaled at once)

Every event has elapsed_s, the seconds of the run's time budget that were used by then: of a clock that nobody sets.
Kernel texts lie in `experiments/<op>-<number>/kernel.py` (number 0 is the starter); their digests are in the journal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autokernel.errors import IntegrityError
from autokernel.history import KernelHistory
from autokernel.journal import Event, Journal
from autokernel.kernelfile import with_config
from autokernel.kerneltext import ShelvedText
from autokernel.numbers import Numbers
from autokernel.records import Baseline, Decision, Experiment, Outcome, PlannedOp, Proposal
from autokernel.rundir import RunDir
from autokernel.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An experiment that a killed run left unfinished: proposed only, or judged but not yet recorded in git."""

    number: int
    op: str
    proposal: Proposal
    file: ShelvedText  # where the proposal's text lies
    agent_s: float
    tuned_s: float | None = None  # seconds of the search for its numbers; None before it
    judged: Experiment | None = None

    def tuned(self, numbers: Numbers) -> Pending:
        """With the configuration that its search found."""
        revise = None if numbers.config is None else functools.partial(with_config, config=numbers.config)
        file = replace(self.file, revise=revise)
        proposal = replace(self.proposal, kernel_py=file, numbers=numbers.words)
        return replace(self, proposal=proposal, file=file, tuned_s=numbers.seconds)

    @property
    def spent_s(self) -> float:
        """Seconds of the agent and of the search."""
        return self.agent_s + (self.tuned_s or 0.0)

    def decided(self, outcome: Outcome, decision: Decision, reason: str, seconds: float) -> Experiment:
        """The experiment that this becomes once it is judged; its commit comes later."""
        timing = outcome.timing
        return Experiment(
            number=self.number,
            op=self.op,
            proposal=self.proposal,
            outcome=outcome,
            decision=decision,
            reason=reason,
            latency_us=timing.candidate_us if timing else None,
            incumbent_us=timing.incumbent_us if timing else None,
            commit=None,
            agent_s=self.agent_s,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All that the journal tells. `histories` keeps the order in which ops were started."""

    settings: Settings
    sandbox: str = ""  # what of the judge's sandbox was enforced when the run last started
    environment: Mapping[str, str] = field(default_factory=dict)  # versions of what it ran with, then
    plan: Mapping[str, Any] | None = None
    histories: Mapping[str, KernelHistory] = field(default_factory=dict)
    pending: Pending | None = None
    tip: str | None = None  # the run's branch after the last completed step
    integration: Mapping[str, Any] | None = None
    ended: str | None = None
    tokens: int = 0  # of all calls of language models, those without a proposal included
    cost_usd: float = 0.0  # of those whose price was known
    elapsed_s: float = 0.0  # of its time budget, as of the last event
    started_utc: str = ""  # when the run was last started, on which its clock began
    searched: Mapping[str, Numbers] = field(default_factory=dict)  # of each op, what the search over its starter found
    unusable: frozenset[str] = frozenset()  # ops whose starter did not pass since then
    current_op: str | None = None  # that is being worked on; None once it was closed


def load_state(run_dir: RunDir) -> RunState:
    """The state of the run in `run_dir`.

    Raises: LogError for a damaged journal; IntegrityError when the text of an incumbent is not the one that was judged
    (that of another kernel is looked at when it is asked for).
    """
    return replay(Journal(run_dir.journal_path).events(), run_dir)


def replay(events: Iterable[Event], run_dir: RunDir) -> RunState:
    """Fold the events into a state."""
    state: RunState | None = None
    # What most events change is put into the records at the end: ten thousand experiments are read in a second.
    tip, elapsed_s = None, 0.0
    for event in events:
        fields = event.fields
        if event.kind == "run-started":
            settings, sandbox = Settings.from_json(fields["settings"]), fields.get("sandbox", "")
            state = state or RunState(settings=settings)  # else resumed with other limits, perhaps after its end
            state = replace(state, settings=settings, sandbox=sandbox, ended=None, unusable=frozenset())
            state = replace(state, started_utc=event.time_utc, environment=_environment(fields))
            elapsed_s = fields.get("elapsed_s", 0.0)  # journals did not always say
        elif state is not None:
            state = _fold(state, event.kind, fields, run_dir)
            tip, elapsed_s = fields.get("tip", tip), fields.get("elapsed_s", elapsed_s)
    if state is None:
        raise IntegrityError(f"{run_dir.journal_path} holds no run", hint="start a new run without --resume")
    return replace(state, tip=tip, elapsed_s=elapsed_s)


def _environment(fields: Mapping[str, Any]) -> dict[str, str]:
    """As journaled; of a run from before it was, only autokernel's own version is known."""
    known = {"autokernel": fields["version"]} if "version" in fields else {}
    return dict(fields.get("environment", known))


def _fold(state: RunState, kind: str, fields: Mapping[str, Any], run_dir: RunDir) -> RunState:
    """The state after an event."""
    if kind == "planned":
        return replace(state, plan=fields)
    if kind == "op-started":
        return _with_history(replace(state, current_op=fields["op"]), _started(fields, run_dir))
    if kind == "baseline":
        history = state.histories[fields["op"]]
        baseline = Baseline(latencies_us=fields["latencies_us"])
        return _with_history(state, replace(history, baseline=baseline, incumbent_us=fields["incumbent_us"]))
    if kind == "op-stopped":
        state = replace(state, current_op=None)
        return _with_history(state, state.histories[fields["op"]].stopped(fields["reason"]))
    if kind == "proposed":
        return replace(state, pending=_proposed(fields, run_dir), current_op=fields["op"])
    if kind == "tuned" and not fields["number"]:
        return replace(state, searched={**state.searched, fields["op"]: Numbers(**fields["numbers"])})
    if kind == "tuned" and state.pending is not None:
        return replace(state, pending=state.pending.tuned(Numbers(**fields["numbers"])))
    if kind == "judged" and state.pending is not None:
        outcome, decision = Outcome.from_json(fields["outcome"]), Decision(fields["decision"])
        judged = state.pending.decided(outcome, decision, fields["reason"], fields["seconds"])
        return replace(state, pending=replace(state.pending, judged=judged))
    if kind == "recorded" and state.pending is not None and state.pending.judged is not None:
        experiment = replace(state.pending.judged, commit=fields["commit"])
        return _with_history(state, state.histories[experiment.op].add(experiment), pending=None)
    return _fold_run(state, kind, fields)


def _fold_run(state: RunState, kind: str, fields: Mapping[str, Any]) -> RunState:
    """Events that are about no single op."""
    if kind == "called":
        tokens, cost_usd = fields["tokens"] or 0, fields["cost_usd"] or 0.0
        return replace(state, tokens=state.tokens + tokens, cost_usd=state.cost_usd + cost_usd)
    if kind == "op-skipped":
        return replace(state, unusable=state.unusable | {fields["op"]})
    if kind == "integrated":
        return replace(state, integration=fields["result"])
    if kind == "run-ended":
        return replace(state, ended=fields["reason"])
    return state


def _with_history(state: RunState, history: KernelHistory, **changes: Any) -> RunState:
    return replace(state, histories={**state.histories, history.op: history}, **changes)


def _started(fields: Mapping[str, Any], run_dir: RunDir) -> KernelHistory:
    raw = fields["history"]
    return KernelHistory(
        planned=PlannedOp.from_json(raw["planned"]),
        backend=raw["backend"],
        device=raw["device"],
        baseline=Baseline(latencies_us=raw["baseline"]),
        incumbent=ShelvedText(path=str(run_dir.kernel_path(fields["op"], 0)), digest=fields["digest"]).read(),
        incumbent_us=raw["incumbent_us"],
        floor_us=raw["floor_us"],
        active_s=raw["active_s"],
        flops=raw.get("flops"),  # unknown in journals from before they were written
        nbytes=raw.get("nbytes"),
    )


def started_json(history: KernelHistory) -> dict[str, Any]:
    """The `history` field of an op-started event."""
    return {
        "planned": history.planned.to_json(),
        "backend": history.backend,
        "device": history.device,
        "baseline": dict(history.baseline.latencies_us),
        "incumbent_us": history.incumbent_us,
        "floor_us": history.floor_us,
        "active_s": history.active_s,
        "flops": history.flops,
        "nbytes": history.nbytes,
    }


def proposed_json(pending: Pending) -> dict[str, Any]:
    """The fields of a proposed event; the kernel's text lies beside the journal."""
    proposal = pending.proposal
    return {
        "number": pending.number,
        "op": pending.op,
        "hypothesis": proposal.hypothesis,
        "digest": proposal.digest,
        "agent_s": pending.agent_s,
        "tokens": proposal.tokens,
        "cost_usd": proposal.cost_usd,
        "agent": proposal.agent,
        "numbers": proposal.numbers,
    }


def judged_json(experiment: Experiment) -> dict[str, Any]:
    """The fields of a judged event."""
    return {
        "number": experiment.number,
        "op": experiment.op,
        "outcome": experiment.outcome.to_json(),
        "decision": experiment.decision.value,
        "reason": experiment.reason,
        "seconds": experiment.seconds,
    }


def _proposed(fields: Mapping[str, Any], run_dir: RunDir) -> Pending:
    number, op = fields["number"], fields["op"]
    file = ShelvedText(path=str(run_dir.kernel_path(op, number)), digest=fields["digest"])
    proposal = Proposal(
        hypothesis=fields["hypothesis"],
        kernel_py=file,
        tokens=fields["tokens"],
        cost_usd=fields["cost_usd"],
        agent=fields.get("agent"),
        numbers=fields.get("numbers", ""),
    )
    return Pending(number=number, op=op, proposal=proposal, file=file, agent_s=fields["agent_s"])
