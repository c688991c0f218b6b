"""What an op's history tells the next agent, as text: the experiments, what not to repeat, the last failure.

All that a candidate could have written (ideas, messages) is cut to a length, kept to its line, and looked through for
keys; nothing here can make a prompt grow with the night.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import KernelFile, without_config
from autokernel.records import Decision, Experiment, Verdict

IDEA_CHARS = 200
AVOIDED_CHARS = 110
SCANNED = 200
"""Newest experiments whose files are read for their settings: reading one takes up to 15 ms."""

FAILURES = (Verdict.CRASH, Verdict.FAIL)
"""Verdicts whose whole message is shown while they are the last ones: they are there to be mended."""

_SECRET = re.compile(
    r"\b(?:sk|pk|rk)-[\w-]{16,}|\b(?:gh[pousr]|hf|xox[abp])_?-?[A-Za-z0-9-]{20,}|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}"
    r"|(?i:\bbearer\s+[\w.~+/-]{16,})"
)


def table(experiments: Sequence[Experiment], reason_chars: int) -> str:
    """The experiments as a Markdown table, oldest first; reasons are cut to `reason_chars` (0: left out)."""
    head = ["#", "idea", "verdict", "decision", "speedup over the incumbent of that time"]
    head += ["reason"] if reason_chars else []
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for experiment in experiments:
        outcome = experiment.outcome
        verdict = outcome.verdict.value + (f" in {outcome.stage}" if outcome.stage else "")
        cells = [str(experiment.number), one_line(experiment.proposal.hypothesis, IDEA_CHARS), verdict]
        cells += [experiment.decision.value, speedup(experiment)]
        cells += [one_line(outcome.reason or experiment.reason, reason_chars)] if reason_chars else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speedup(experiment: Experiment) -> str:
    """Interleaved speedup with its interval, or a dash where none was measured."""
    if experiment.outcome.timing is not None:
        return str(experiment.outcome.timing.speedup)
    if experiment.latency_us and experiment.incumbent_us:
        return f"{experiment.incumbent_us / experiment.latency_us:.3f}x"
    return "-"


def refuted(newest_first: Iterable[Experiment], limit: int) -> list[str]:
    """The newest `limit` reverted ideas, one line each, without repetitions; newest first."""
    lines: dict[str, str] = {}
    for experiment in newest_first:
        if len(lines) >= limit:
            break
        if experiment.decision is Decision.REVERT:
            idea = one_line(experiment.proposal.hypothesis, AVOIDED_CHARS)
            verdict = experiment.outcome.verdict
            how = speedup(experiment).split()[0] if verdict in (Verdict.PASS, Verdict.SCREENED) else verdict.value
            lines.setdefault(idea, f"- {idea} ({how})")
    return list(lines.values())


def judged_configs(history: KernelHistory, limit: int) -> list[str]:
    """The newest `limit` judged settings of the incumbent's own knobs, as differences from its CONFIG."""
    return list(itertools.islice(_configs(history), limit))


def _configs(history: KernelHistory) -> Iterator[str]:
    incumbent = _read(history.incumbent)
    if incumbent is None:
        return
    kernel, skeleton = incumbent
    seen = set()
    for experiment in reversed(history.experiments[-SCANNED:]):
        other = _read(experiment.proposal.kernel_py)
        if other is None or other[1] != skeleton:
            continue
        changed = [f"{k}={v!r}" for k, v in other[0].config.items() if repr(kernel.config.get(k)) != repr(v)]
        text = ", ".join(changed)
        if changed and text not in seen:
            seen.add(text)
            verdict = experiment.outcome.verdict
            timed = verdict in (Verdict.PASS, Verdict.SCREENED)
            yield f"- {one_line(text, IDEA_CHARS)} ({speedup(experiment).split()[0] if timed else verdict.value})"


def last_failure(history: KernelHistory, chars: int) -> str | None:
    """The message of the newest experiment if it crashed or was wrong, cut in its middle to `chars`."""
    if not history.experiments or history.experiments[-1].outcome.verdict not in FAILURES:
        return None
    outcome = history.experiments[-1].outcome
    message = without_secrets(outcome.reason.strip() or "no message")
    if len(message) > chars:
        half = max(0, chars // 2)
        left_out = len(message) - 2 * half
        message = f"{message[:half]}\n[... {left_out} characters left out ...]\n{message[len(message) - half :]}"
    where = f" in {outcome.stage}" if outcome.stage else ""
    return f"Experiment {history.experiments[-1].number}: {outcome.verdict.value}{where}\n{fenced(message, '')}"


def fenced(text: str, language: str) -> str:
    """`text` in a fence that is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def one_line(text: str, chars: int) -> str:
    """`text` as a table cell: no line break, no bar, no key, at most `chars` long."""
    flat = " ".join(without_secrets(text).split()).replace("|", "/")
    return flat if len(flat) <= chars else flat[: max(0, chars - 1)].rstrip() + "…"


def without_secrets(text: str) -> str:
    """`text` with whatever looks like a key of a known provider taken out."""
    return _SECRET.sub("[key removed]", text)


def _read(text: str) -> tuple[KernelFile, str] | None:
    """As `without_config`; None when it is no kernel.py."""
    try:
        return without_config(text)
    except ConfigError:
        return None
