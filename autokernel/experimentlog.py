"""A run's experiments as people read them, kept and rejected alike, for `log`, `show` and the HTML report; no torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.markup import one_line, visible
from autokernel.records import Decision, Experiment, Interval, StageReport, Timing, Verdict
from autokernel.rundir import RunDir
from autokernel.state import RunState

SUSPICIOUS = frozenset({Verdict.TAMPER, Verdict.DELEGATES})
"""Verdicts on a candidate that did not do the op's work itself, or did more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An experiment with the text of the incumbent that it had to beat."""

    experiment: Experiment
    incumbent: str

    @property
    def kept(self) -> bool:
        """Whether it became the incumbent."""
        return self.experiment.decision is Decision.KEEP

    @property
    def suspicious(self) -> bool:
        """Whether a person should look at what it tried."""
        return self.experiment.outcome.verdict in SUSPICIOUS

    @property
    def speedup(self) -> Interval | None:
        """Against the incumbent of then; None when it was not timed."""
        timing = self.experiment.outcome.timing
        return timing.speedup if timing else None

    @property
    def hypothesis(self) -> str:
        """What was tried, on one line."""
        return one_line(self.experiment.proposal.hypothesis)

    @property
    def reason(self) -> str:
        """Why it was kept or reverted, on one line."""
        return one_line(self.experiment.reason)

    def diff(self) -> list[str]:
        """What it changed of the incumbent, as lines of a unified diff; none when the texts are equal."""
        lines = difflib.unified_diff(
            self.incumbent.splitlines(),
            self.experiment.proposal.kernel_py.splitlines(),
            "incumbent/kernel.py",
            f"experiment-{self.experiment.number}/kernel.py",
            lineterm="",
        )
        return [visible(line, keep="\t") for line in lines]

    def to_json(self) -> dict[str, Any]:
        """The record without the kernel's text; unknown values are null."""
        experiment, proposal = self.experiment, self.experiment.proposal
        return {
            "number": experiment.number,
            "op": experiment.op,
            "hypothesis": proposal.hypothesis,
            "agent": proposal.agent,
            "verdict": experiment.outcome.verdict,
            "stage": experiment.outcome.stage,
            "decision": experiment.decision,
            "reason": experiment.reason,
            "suspicious": self.suspicious,
            "latency_us": experiment.latency_us,
            "incumbent_us": experiment.incumbent_us,
            "speedup": asdict(self.speedup) if self.speedup else None,
            "commit": experiment.commit,
            "tokens": proposal.tokens,
            "cost_usd": proposal.cost_usd,
            "seconds": experiment.seconds,
        }


def entries(state: RunState, op: str | None = None) -> list[Entry]:
    """The experiments of the run, or of one op, in the order in which they were made.

    Raises: ConfigError for an op that the run has not begun.
    """
    if op is not None and op not in state.histories:
        known = ", ".join(state.histories) or "none yet"
        raise ConfigError(f"the run has no op {op!r}", hint=f"ops that it has begun: {known}")
    chosen = [history for name, history in state.histories.items() if op in (None, name)]
    return sorted((entry for history in chosen for entry in _of(history)), key=lambda entry: entry.experiment.number)


def _of(history: KernelHistory) -> list[Entry]:
    incumbent = history.incumbent if history.starter is None else history.starter
    found = []
    for experiment in history.experiments:
        found.append(Entry(experiment=experiment, incumbent=incumbent))
        if experiment.decision is Decision.KEEP:
            incumbent = experiment.proposal.kernel_py
    return found


def find_entry(state: RunState, number: int) -> Entry:
    """The experiment with this number. Raises: ConfigError naming those that there are."""
    found = entries(state)
    for entry in found:
        if entry.experiment.number == number:
            return entry
    if state.pending is not None and state.pending.number == number:
        raise ConfigError(f"experiment {number} is not decided yet", hint="look again when it was judged")
    there_are = f"1 to {len(found)}" if found else "none yet"
    raise ConfigError(f"there is no experiment {number}", hint=f"experiments of this run: {there_are}")


def render_log(found: Sequence[Entry]) -> str:
    """One line per experiment: number, op, verdict, decision, latency, speedup with its interval, hypothesis."""
    rows = [_cells(entry) for entry in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return "\n".join(lines) or "no experiment yet"


def _cells(entry: Entry) -> tuple[str, ...]:
    experiment = entry.experiment
    return (
        f"#{experiment.number}",
        experiment.op,
        experiment.outcome.verdict.value,
        experiment.decision.value,
        "-" if experiment.latency_us is None else f"{experiment.latency_us:.1f} us",
        "-" if entry.speedup is None else str(entry.speedup),
        entry.hypothesis,
    )


def render_entry(entry: Entry, run_dir: RunDir) -> str:
    """All that is known of one experiment: verdict, stages, measurements, the agent's words, and the diff."""
    experiment = entry.experiment
    stage = f" in {experiment.outcome.stage}" if experiment.outcome.stage else ""
    blocks = [
        f"#{experiment.number} {experiment.op}: {entry.hypothesis}\n"
        f"  {experiment.outcome.verdict}{stage}, {experiment.decision}: {entry.reason}",
        "\n".join(["Stages", *(f"  {_stage_line(stage)}" for stage in experiment.outcome.stages)]),
        "\n".join(["Measurements", *(f"  {line}" for line in _measurements(experiment))]),
    ]
    for title, path in (
        ("Prompt", run_dir.request_path(experiment.op, experiment.number)),
        ("Reply", run_dir.reply_path(experiment.op, experiment.number)),
    ):
        if path.is_file():
            blocks.append(f"{title}\n{visible(path.read_text(errors='replace')).rstrip()}")
    blocks.append("\n".join(["Diff against the incumbent of then", *(entry.diff() or ["  none: the same text"])]))
    return "\n\n".join(blocks)


def _stage_line(stage: StageReport) -> str:
    reason = f": {one_line(stage.reason)}" if stage.reason else ""
    return f"{stage.stage} {stage.verdict}, {stage.cases} cases in {stage.seconds:.1f} s{reason}"


def _measurements(experiment: Experiment) -> list[str]:
    timing = experiment.outcome.timing
    spent = [
        f"{experiment.seconds:.1f} s, {experiment.agent_s:.1f} of them the agent's",
        *([f"{experiment.proposal.tokens} tokens"] if experiment.proposal.tokens is not None else []),
        *([f"{experiment.proposal.cost_usd:.4f} USD"] if experiment.proposal.cost_usd is not None else []),
    ]
    memory = experiment.outcome.peak_memory_mb
    return [
        *(["not timed"] if timing is None else timing_lines(timing)),
        *([] if memory is None else [f"peak memory {memory:.1f} MB"]),
        ", ".join(spent),
        *([f"commit {experiment.commit}"] if experiment.commit else []),
    ]


def timing_lines(timing: Timing) -> list[str]:
    """The measurements of a timing, a line each."""
    return [
        f"{timing.candidate_us:.1f} us, the incumbent {timing.incumbent_us:.1f} us",
        f"speedup {timing.speedup} in {timing.blocks} blocks",
        *([] if timing.host_us is None else [f"host needs {timing.host_us:.1f} us to start it"]),
        *([] if timing.graph_us is None else [f"in a replayed CUDA graph {timing.graph_us:.1f} us"]),
        *([] if timing.clocks is None else [f"clock {timing.clocks}"]),
    ]
