"""A run that is driven from outside: `next` and `submit` are single turns of the loop in `orchestrate.py`.

What is decided, recorded and moved on from is the loop's affair, as in every other run. Here a kernel is put where the
loop's agent finds it, and what somebody outside needs for the next one is gathered. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autokernel.agents.llm import PROMPT_TOKENS
from autokernel.agents.outside import WAITING, OutsideAgent
from autokernel.errors import ConfigError
from autokernel.experience import one_line
from autokernel.history import KernelHistory
from autokernel.kernelfile import parse_kernel
from autokernel.live import PlainView
from autokernel.loading import load_file, toplevel
from autokernel.opening import open_session
from autokernel.prompt import Prompt, build_prompt
from autokernel.records import Experiment, PlannedOp, Proposal
from autokernel.session import THINKING, Session
from autokernel.settings import Settings
from autokernel.view import RunSummary

HYPOTHESIS_CHARS, AGENT_CHARS = 240, 40
CLOSING = (
    "Edit the working copy named above and hand it in with one hypothesis, as said there; what the playbook says about "
    "the form of an answer in text does not concern you."
)
FINISHED = "finished from outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What to work on: `history` and `prompt` of one op, and its working copy; or why nothing is left (`reason`)."""

    run: str
    reason: str
    histories: tuple[KernelHistory, ...]
    settled: Experiment | None = None  # one that a killed step had left unfinished
    history: KernelHistory | None = None
    prompt: Prompt | None = None
    draft: Path | None = None
    edited: bool = False  # the working copy holds edits that were not handed in
    patience: int = 0
    experiments_left: int | None = None
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a kernel that was handed in. `history` includes it; `stopped` says why none may follow on the op."""

    run: str
    branch: str
    experiment: Experiment
    history: KernelHistory
    settled: Experiment | None = None
    stopped: str | None = None


class TurnView(PlainView):
    """Of a run that goes on it leaves out what was told when the run began."""

    def __init__(self, *, begins: bool) -> None:
        super().__init__()
        self._told = self._begins = begins

    def stage(self, name: str) -> None:
        """A step, but for the thinking: that is done elsewhere."""
        if not name.endswith(THINKING):
            super().stage(name)

    def note(self, message: str) -> None:
        """Shown once the plan is known: what comes before is the same every time."""
        if self._told:
            super().note(message)

    def planned(self, plan: Sequence[PlannedOp], wall_us: float, skipped: Sequence[PlannedOp]) -> None:
        """Left out, unless the run begins."""
        self._told = True
        if self._begins:
            super().planned(plan, wall_us, skipped)

    def op_started(self, history: KernelHistory) -> None:
        """Left out for an op with experiments."""
        if not history.experiments:
            super().op_started(history)


class Driven:
    """The steps that somebody outside takes with an open run."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.agent, OutsideAgent), "opened with --agent outside"
        self._session, self._agent = session, session.agent
        self._loop = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
        self._plan: list[PlannedOp] = self._loop.worth_trying(session)

    def next(self, op: str | None = None) -> Turn:
        """What to work on next, by the loop's own choice or on `op`; an op that was not begun is begun.

        Raises: ConfigError when `op` is closed or unknown.
        """
        settled = self._settle()
        why = self._work(self._plan if op is None else [self._planned(op)])
        turn = Turn(run=self._session.run_dir.name, reason=why, histories=self._session.histories, settled=settled)
        history = self._agent.asked
        if history is None:
            if op is not None:
                raise self._closed(op, why)
            return turn
        context = replace(self._agent.options.context(history), closing=CLOSING)
        draft, edited = self._refresh(history)
        experiments_left, seconds_left = self._session.left
        return replace(
            turn,
            history=history,
            prompt=build_prompt(history, context, budget_tokens=PROMPT_TOKENS),
            draft=draft,
            edited=edited,
            patience=self._session.settings.patience,
            experiments_left=experiments_left,
            seconds_left=seconds_left,
        )

    def submit(self, text: str, hypothesis: str, *, op: str | None = None, agent: str | None = None) -> Answer:
        """Judge the kernel against the incumbent of its op, keep or revert it.

        Raises: ConfigError when the text is no kernel.py or no experiment, or its op is closed; nothing is judged then.
        """
        name = op or parse_kernel(text).kernel_type
        planned = self._planned(name)
        proposal = Proposal(hypothesis=_said(hypothesis), kernel_py=text, agent=_called(agent))
        settled = self._settle()
        try:
            self._agent.handed_in = proposal
            why = self._work([planned])
            if self._agent.handed_in is not None:  # the loop did not ask for it
                raise self._closed(name, why)
        except KeyboardInterrupt:
            self._session.view.note("interrupted; the next `autokernel next` or `submit` finishes what was begun")
            raise
        finally:
            self._agent.handed_in = None
        history = next(history for history in self._session.histories if history.op == name)
        self._refresh(history)
        return Answer(
            run=self._session.run_dir.name,
            branch=self._session.branch,
            experiment=history.experiments[-1],
            history=history,
            settled=settled,
            stopped=None if self._agent.asked else self._session.limit_reached() or history.stop_reason,
        )

    def draft(self, op: str | None = None) -> Path:
        """The working copy of `op`, or of the op that is being worked on. Raises: ConfigError when there is none."""
        name = op or self._session.current_op
        if name is None:
            raise ConfigError("no op is being worked on", hint="`autokernel next` names the next one")
        path = self._session.run_dir.draft_path(self._planned(name).op)
        if not path.is_file():
            raise ConfigError(f"there is no working copy of {name}", hint=f"`autokernel next --op {name}` makes one")
        return path

    def finish(self) -> RunSummary:
        """Measure the whole model with the best kernels, and close the run."""
        self._settle()
        summary: RunSummary = self._loop.finish(self._session, FINISHED)
        return summary

    def _work(self, plan: list[PlannedOp]) -> str:
        """One turn of the loop over `plan`: until it waits for the agent, or is done."""
        self._agent.asked = None
        self._session.ask_again()
        why: str = self._loop.work(self._session, plan)
        if why != WAITING:
            self._agent.asked = None
        return why

    def _settle(self) -> Experiment | None:
        history: KernelHistory | None = self._loop.settle(self._session)
        return history.experiments[-1] if history else None

    def _planned(self, op: str) -> PlannedOp:
        for planned in self._plan:
            if planned.op == op:
                return planned
        ops = ", ".join(planned.op for planned in self._plan) or "none"
        raise ConfigError(f"{op!r} is no op of this run", hint=f"its ops: {ops}")

    def _closed(self, op: str, why: str) -> ConfigError:
        if limit := self._session.limit_reached():
            hint = "`autokernel next --experiments N` or `--minutes N` allows more; `autokernel finish` ends the run"
            return ConfigError(f"nothing was judged: {limit}", hint=hint)
        stopped = {history.op: history.stop_reason for history in self._session.histories}
        reason = stopped.get(op) or ("its starter does not pass here" if op not in stopped else why)
        return ConfigError(f"{op} is closed: {reason}", hint="`autokernel next` names the next op")

    def _refresh(self, history: KernelHistory) -> tuple[Path, bool]:
        """The op's working copy, with the incumbent in it unless it holds edits that were not handed in."""
        path = self._session.run_dir.draft_path(history.op)
        there = path.read_text(errors="replace") if path.is_file() else ""
        judged = {history.incumbent, history.starter, *(each.proposal.kernel_py for each in history.experiments)}
        edited = bool(there.strip()) and there not in judged
        if not edited and there != history.incumbent:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(history.incumbent)
        return path, edited


@contextmanager
def open_driven(settings: Settings, run: str | None) -> Iterator[Driven]:
    """A new driven run, or the one called `run`, going on by the clock on which it began. Progress goes to stderr."""
    with open_session(settings, TurnView(begins=run is None), run, same_clock=True) as session:
        yield Driven(session)


def read_kernel(path: Path) -> str:
    """The text of a file that is handed in. Raises: ConfigError when it cannot be read, or is empty."""
    try:
        text = path.read_text(encoding="utf-8").removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}", hint="give the path of a kernel.py") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty", hint="`autokernel next` writes the incumbent into an empty working copy")
    return text


def _said(hypothesis: str) -> str:
    said = one_line(hypothesis, HYPOTHESIS_CHARS)
    if not said:
        raise ConfigError("no hypothesis is given", hint='say what changes, and why: -m "two rows a pass"')
    return said


def _called(agent: str | None) -> str | None:
    if agent is None:
        return None
    if not (name := one_line(agent, AGENT_CHARS)):
        raise ConfigError("--agent is empty", hint="give a name for the log, or leave it out")
    return name
