"""What a run of this directory is doing now, from its journal and the lock; nothing is written, no torch.

The journal tells what was completed; what is under way is what the loop does next after the newest event.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autokernel.experimentlog import entries
from autokernel.journal import Event, Journal
from autokernel.kernelplots import summary_of
from autokernel.markup import one_line
from autokernel.rundir import Holder, find_run, holder
from autokernel.settings import OUTSIDE
from autokernel.state import RunState, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`lines` for a person; `is_over` when nothing more will happen unless somebody starts it."""

    lines: tuple[str, ...]
    is_over: bool


def status_of(workdir: Path, name: str, now: datetime | None = None) -> Status:
    """The status of the run called `name`.

    With "latest", a run that is just beginning and has no journal yet counts as the latest.
    Raises: ConfigError when there is no run; LogError for a damaged journal.
    """
    now = now or datetime.now(UTC)
    held = holder(workdir)
    if held is not None and not held.run and name == "latest":
        return Status(lines=(f"a run begins in {workdir.name}: {held}", "now: profiling the model"), is_over=False)
    run_dir = find_run(workdir, name)
    events = Journal(run_dir.journal_path).events()
    if not events:
        return Status(lines=(f"run {run_dir.name}: it ended before its journal began",), is_over=held is None)
    state = replay(events, run_dir)
    is_held = held is not None and held.run == run_dir.name
    lines = [
        f"run {run_dir.name}: {_standing(state, held if is_held else None)}",
        f"model: {one_line(state.settings.shown_model)}",
        *([f"now: {_doing(state, events)}, for {_span(_since(events[-1], now))}"] if is_held else []),
        *_counts(state, events, now, is_held=is_held),
    ]
    return Status(lines=tuple(lines), is_over=not is_held)


def _standing(state: RunState, held: Holder | None) -> str:
    if held is not None:
        return f"working, {held}"
    if state.ended is not None:
        return f"ended: {state.ended}"
    if state.settings.agent == OUTSIDE:
        return "open, driven from outside (autokernel next, submit, finish)"
    return "not ended, and nobody works on it: `autokernel run --resume` goes on with it"


def _doing(state: RunState, events: list[Event]) -> str:
    """What the loop does after the newest event that is one of its steps."""
    newest = next((event for event in reversed(events) if event.kind != "called"), events[-1])
    fields = newest.fields
    if newest.kind == "proposed":
        return f"judging experiment {fields['number']} on {fields['op']}: {one_line(fields['hypothesis'])}"
    if newest.kind in ("op-started", "recorded", "baseline"):
        return f"{fields['op']}: the agent ({state.settings.agent.partition(':')[0]}) thinks of the next experiment"
    return {
        "run-started": "opening the run",
        "planned": "judging the starter of the first op",
        "judged": "recording an experiment",
        "op-stopped": f"{fields.get('op')} is done; beginning the next op, or measuring the whole model",
        "op-skipped": "judging the starter of the next op",
        "exported": "measuring the whole model",
        "integrated": "ending the run",
        "run-ended": "ending the run",
    }.get(newest.kind, newest.kind)


def _counts(state: RunState, events: list[Event], now: datetime, *, is_held: bool) -> list[str]:
    found = entries(state)
    kept = sum(entry.kept for entry in found)
    end = now if is_held else datetime.fromisoformat(events[-1].time_utc)
    used_s = (end - datetime.fromisoformat(state.started_utc)).total_seconds()
    limit = state.settings.max_experiments
    experiments = f"{len(found)}{f' of {limit}' if limit else ''} experiments, {kept} kept"
    spent = [f"{state.tokens} tokens"] if state.tokens else []
    spent += [f"{state.cost_usd:.2f} USD"] if state.cost_usd else []
    return [
        ", ".join([f"{experiments}; {_span(used_s)} of {_span(state.settings.budget_s)} used", *spent]),
        *(_op_line(state, op) for op in state.histories),
        *([f"last: {summary_of(found[-1])}"] if found else []),
    ]


def _op_line(state: RunState, op: str) -> str:
    history = state.histories[op]
    stopped = f"; {one_line(history.stop_reason)}" if history.stop_reason else ""
    return (
        f"{op}: {history.incumbent_us:.1f} us, {history.speedup_vs_baseline:.2f}x against PyTorch "
        f"{history.baseline.fastest}, {len(history.experiments)} experiments{stopped}"
    )


def _since(event: Event, now: datetime) -> float:
    return (now - datetime.fromisoformat(event.time_utc)).total_seconds()


def _span(seconds: float) -> str:
    """`8 s`, `3.5 min`, `7.2 h`."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
