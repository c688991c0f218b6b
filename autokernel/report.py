"""The report of a run, as text, Markdown or JSON, from its histories and the whole-model measurement; no torch.

A loss is told like a win: a kernel slower than PyTorch, or one that the model is better off without, has its line.
An unknown number is missing from the text and null in JSON, never replaced by another.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autokernel import __version__, machine, reproduce
from autokernel.history import KernelHistory
from autokernel.markup import counted, one_line
from autokernel.modelnumbers import model_lines
from autokernel.records import Clocks, Decision, Verdict
from autokernel.settings import Settings
from autokernel.view import RunSummary

if TYPE_CHECKING:
    from autokernel.state import RunState

BEST_IDEAS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """A kept experiment: what was tried, and how much faster than the incumbent of then it was measured."""

    number: int
    op: str
    hypothesis: str
    speedup: float
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """One op. Latencies are for one forward's worth of calls, in us; `failed` maps a verdict to a count.

    `shapes` are the calls as `autokernel tune --shape` takes them, where they have such a form.
    """

    op: str
    backend: str
    starter_us: float
    latency_us: float
    baseline: str
    baselines_us: Mapping[str, float]
    speedup: float
    roofline_fraction: float | None
    kept: int
    reverted: int
    screened: int
    failed: Mapping[str, int]
    stop_reason: str | None
    dtype: str = ""
    shapes: tuple[str, ...] = ()

    @property
    def experiments(self) -> int:
        """All experiments on this op."""
        return self.kept + self.reverted + self.screened + sum(self.failed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run, summed up. `integration` is the whole-model measurement as `autokernel.integrate` wrote it.

    `clocks` span all measurements of experiments; None where no clock was logged.
    """

    run: str
    branch: str
    model: str
    device: str
    reason: str
    seconds: float | None
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    kernels: tuple[KernelReport, ...]
    ideas: tuple[Idea, ...]
    integration: Mapping[str, Any] | None
    sandbox: str = ""
    clocks: Clocks | None = None


def from_summary(summary: RunSummary) -> Report:
    """The report of a run that has just ended."""
    return _report(
        run=summary.run,
        branch=summary.branch,
        reason=summary.reason,
        seconds=summary.seconds,
        settings=summary.settings,
        histories=summary.histories,
        integration=summary.integration,
        sandbox=summary.sandbox,
        made_with=environment(),
    )


def from_state(run: str, state: RunState) -> Report:
    """The report of a run as its journal tells it, whether it has ended, is going on or was killed."""
    return _report(
        run=run,
        branch=f"autokernel/{run}",
        reason=state.ended or "not ended (going on, or killed: --resume goes on with it)",
        seconds=None,
        settings=state.settings,
        histories=tuple(state.histories.values()),
        integration=state.integration,
        sandbox=state.sandbox,
        made_with=state.environment,
    )


def _report(
    *,
    run: str,
    branch: str,
    reason: str,
    seconds: float | None,
    settings: Settings,
    histories: Sequence[KernelHistory],
    integration: Mapping[str, Any] | None,
    sandbox: str,
    made_with: Mapping[str, str],
) -> Report:
    ideas = sorted((idea for history in histories for idea in _ideas(history)), key=lambda idea: -idea.speedup)
    return Report(
        run=run,
        branch=branch,
        model=settings.shown_model,
        device=next((history.device for history in histories), ""),
        reason=reason,
        seconds=seconds,
        settings=settings.to_json(),
        environment=made_with,
        kernels=tuple(_kernel(history) for history in histories),
        ideas=tuple(ideas[:BEST_IDEAS]),
        integration=integration,
        sandbox=sandbox,
        clocks=Clocks.joined(
            timing.clocks for history in histories for each in history.experiments if (timing := each.outcome.timing)
        ),
    )


def environment() -> dict[str, str]:
    """What a run is made with, here and now: versions, processor and driver, read without importing any of it."""
    found = {"autokernel": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    of_the_machine = {"cpu": machine.cpu_name(), "driver": machine.gpu_driver()}
    return found | {name: text for name, text in of_the_machine.items() if text is not None}


def _kernel(history: KernelHistory) -> KernelReport:
    verdicts = Counter(e.outcome.verdict for e in history.experiments if e.decision is not Decision.KEEP)
    return KernelReport(
        op=history.op,
        backend=history.backend,
        starter_us=history.starter_us,
        latency_us=history.incumbent_us,
        baseline=history.baseline.fastest,
        baselines_us=dict(history.baseline.latencies_us),
        speedup=history.speedup_vs_baseline,
        roofline_fraction=history.roofline_fraction,
        kept=history.kept,
        reverted=verdicts.pop(Verdict.PASS, 0),
        screened=verdicts.pop(Verdict.SCREENED, 0),
        failed={verdict.value: count for verdict, count in sorted(verdicts.items())},
        stop_reason=history.stop_reason,
        dtype=history.planned.cases[0].case.dtype,
        shapes=tuple(filter(None, map(reproduce.shape_argument, history.planned.cases))),
    )


def _ideas(history: KernelHistory) -> list[Idea]:
    return [
        Idea(
            number=e.number,
            op=e.op,
            hypothesis=one_line(e.proposal.hypothesis),
            speedup=e.outcome.timing.speedup.estimate,
            commit=e.commit,
        )
        for e in history.experiments
        if e.decision is Decision.KEEP and e.outcome.timing is not None
    ]


def to_json(report: Report) -> dict[str, Any]:
    """The report as a JSON object; unknown values are null."""
    return asdict(report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with lines of text, or with commands to be shown as they are."""

    title: str
    lines: tuple[str, ...]
    commands: bool = False


def render_text(report: Report) -> str:
    """The report for a terminal."""
    blocks = [f"{_title(report)}\n" + "\n".join(f"  {line}" for line in facts(report))]
    blocks += ["\n".join([section.title, *(f"  {line}" for line in section.lines)]) for section in sections(report)]
    return "\n\n".join(blocks)


def render_markdown(report: Report) -> str:
    """The report as Markdown."""
    blocks = [f"# {_title(report)}", "\n".join(f"- {line}" for line in facts(report))]
    for section in sections(report):
        if section.commands:
            body = "\n".join(["```sh", *section.lines, "```"])
        else:  # an indented line continues its kernel's
            body = "\n".join(f"{line[: len(line) - len(line.lstrip())]}- {line.lstrip()}" for line in section.lines)
        blocks += [f"## {section.title}", body]
    return "\n\n".join(blocks)


def _title(report: Report) -> str:
    return f"autokernel report: run {report.run}"


def facts(report: Report) -> list[str]:
    """What was run, how it ended, what was enforced."""
    took = "" if report.seconds is None else f" after {report.seconds / 60:.1f} min"
    experiments = counted(sum(kernel.experiments for kernel in report.kernels), "experiment")
    return [
        f"model: {report.model}" + (f", on {report.device}" if report.device else ""),
        f"end: {report.reason}{took}; {experiments}, {sum(k.kept for k in report.kernels)} kept",
        *([f"sandbox: {report.sandbox}"] if report.sandbox else []),
    ]


def sections(report: Report) -> list[Section]:
    """The report's parts in their order."""
    kernels = [line for kernel in report.kernels for line in kernel_lines(kernel)]
    ideas = [f"#{i.number} {i.op} {i.speedup:.2f}x: {i.hypothesis}{_commit(i.commit)}" for i in report.ideas]
    return [
        Section(title="Whole model", lines=tuple(model_lines(report.integration))),
        Section(title="Kernels (latency of all of one forward's calls)", lines=tuple(kernels or ["none was started"])),
        Section(title="Best ideas", lines=tuple(ideas or ["no experiment was kept"])),
        Section(title="Environment", lines=tuple(f"{name} {value}" for name, value in surroundings(report).items())),
        Section(title="Reproduce", lines=tuple(reproduce.commands(report)), commands=True),
    ]


def surroundings(report: Report) -> dict[str, str]:
    """What the numbers were measured with: device, its clock, versions. What was not recorded says so."""
    return {
        "device": report.device or "not recorded",
        "clock": str(report.clocks) if report.clocks else "not recorded",
        **report.environment,
    }


def _commit(commit: str | None) -> str:
    return f" (commit {commit[:10]})" if commit else ""


def kernel_lines(kernel: KernelReport) -> list[str]:
    """A kernel's line, and those that continue it, indented."""
    ways = ", ".join(f"{name} {us:.1f} us" for name, us in kernel.baselines_us.items())
    if kernel.speedup >= 1:
        standing = f"{kernel.speedup:.2f}x against PyTorch's fastest"
    else:
        standing = f"SLOWER than PyTorch's fastest, {kernel.speedup:.2f}x"
    roofline = "" if kernel.roofline_fraction is None else f", {kernel.roofline_fraction:.0%} of the roofline"
    return [
        f"{kernel.op} ({kernel.backend}): {kernel.starter_us:.1f} us (starter) -> {kernel.latency_us:.1f} us{roofline}",
        f"  {standing}, {kernel.baseline} (measured: {ways})",
        f"  {tally(kernel)}",
        f"  moved on: {kernel.stop_reason or 'not yet; the run ended first'}",
    ]


def tally(kernel: KernelReport) -> str:
    """`3 experiments: 1 kept, 1 reverted, 0 screened out, 1 CRASH`."""
    counts = [f"{kernel.kept} kept", f"{kernel.reverted} reverted", f"{kernel.screened} screened out"]
    counts += [f"{count} {verdict}" for verdict, count in kernel.failed.items()]
    told = counted(kernel.experiments, "experiment")
    return f"{told}: {', '.join(counts)}" if kernel.experiments else "no experiment"
