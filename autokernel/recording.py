"""Write an experiment down where people read it: one git commit and one row of results.tsv; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autokernel import results
from autokernel.history import KernelHistory
from autokernel.records import Decision, Experiment
from autokernel.settings import Settings

if TYPE_CHECKING:
    from autokernel.gitrepo import RunRepository

RESULTS = "results.tsv"
"""In the working directory: one row per experiment of all its runs."""

SUBJECT_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Useful work of one forward's worth of the timed calls: FLOPs and bytes, with what to call the case."""

    flops: int
    nbytes: int
    case: str
    dtype: str


def subject(history: KernelHistory, experiment: Experiment, work: Work) -> str:
    """Commit subject: `rmsnorm 1x512x512 fp32: 71.2 -> 63.0 us (1.13x): vectorized loads`."""
    idea = " ".join(experiment.proposal.hypothesis.split())
    if experiment.latency_us is None or experiment.incumbent_us is None:
        text = f"{history.op} {work.case}: {experiment.outcome.verdict}: {idea}"
    else:
        ratio = experiment.incumbent_us / experiment.latency_us
        text = (
            f"{history.op} {work.case}: {experiment.incumbent_us:.1f} -> {experiment.latency_us:.1f} us "
            f"({ratio:.2f}x): {idea}"
        )
    return text if len(text) <= SUBJECT_CHARS else text[: SUBJECT_CHARS - 3] + "..."


def trailers(run: str, history: KernelHistory, experiment: Experiment) -> dict[str, str]:
    """Machine-readable lines of the commit message; unknown values are left out."""
    timing = experiment.outcome.timing
    lines = {
        "Experiment": f"{run}/{experiment.number}",
        "Op": history.op,
        "Verdict": experiment.outcome.verdict.value,
        "Decision": experiment.decision.value,
    }
    if timing is not None:
        lines["Speedup"] = f"{timing.speedup.estimate:.4f} [{timing.speedup.low:.4f}, {timing.speedup.high:.4f}]"
        lines["Latency-us"] = f"{timing.candidate_us:.2f}"
        lines["Incumbent-us"] = f"{timing.incumbent_us:.2f}"
    lines["Baseline"] = f"{history.baseline.fastest} {history.baseline.latency_us:.2f} us"
    return lines


def commit(repo: RunRepository, run: str, history: KernelHistory, experiment: Experiment, work: Work, tip: str) -> str:
    """Commit the experiment on top of `tip`; a reverted one is left under its own ref only."""
    commit_id = repo.commit_kernel(
        experiment.proposal.kernel_py,
        subject=subject(history, experiment, work),
        body=experiment.reason,
        trailers=trailers(run, history, experiment),
    )
    if experiment.decision is Decision.REVERT:
        repo.reject(commit_id, number=experiment.number, back_to=tip)
    return commit_id


def result_row(
    run: str, history: KernelHistory, experiment: Experiment, work: Work, *, agent: str, seed: int
) -> results.ResultRow:
    """The experiment's row of results.tsv; what was not measured stays empty."""
    latency, timing = experiment.latency_us, experiment.outcome.timing
    fraction = history.floor_us / latency if history.floor_us and latency else None
    speedup = timing.speedup if timing else None
    return results.ResultRow(
        experiment=experiment.number,
        tag=history.op,
        kernel_type=history.op,
        throughput_tflops=work.flops / latency / 1e6 if latency else None,
        latency_us=latency,
        pct_peak=100 * fraction if fraction is not None and fraction <= 1 else None,
        speedup_vs_pytorch=history.baseline.latency_us / latency if latency else None,
        correctness=experiment.outcome.verdict.value,
        peak_vram_mb=experiment.outcome.peak_memory_mb,
        description=experiment.proposal.hypothesis,
        run=run,
        op=history.op,
        case=work.case,
        dtype=work.dtype,
        backend=history.backend,
        agent=agent,
        device=history.device,
        decision=experiment.decision.value,
        speedup_vs_incumbent=speedup.estimate if speedup else None,
        speedup_low=speedup.low if speedup else None,
        speedup_high=speedup.high if speedup else None,
        baseline=history.baseline.fastest,
        baseline_us=history.baseline.latency_us,
        commit=experiment.commit or "",
        tokens=experiment.proposal.tokens,
        cost_usd=experiment.proposal.cost_usd,
        seconds=experiment.seconds,
        seed=seed,
    )


class Rows:
    """A run's rows of results.tsv. An experiment whose row was there when the run was opened gets no second one."""

    def __init__(self, settings: Settings, run: str, agent: str) -> None:
        """`agent` is who proposed what names no other. Raises: LogError when the file cannot be read."""
        self._path, self._run, self._agent, self._seed = settings.workdir / RESULTS, run, agent, settings.seed
        self._there = results.experiments_of(self._path, run)

    def missing(self, history: KernelHistory) -> list[Experiment]:
        """The experiments that have no row."""
        return [each for each in history.experiments if each.number not in self._there]

    def add(self, history: KernelHistory, experiment: Experiment, work: Work) -> None:
        """Append the experiment's row, unless there is one. Raises: LogError when it cannot be written."""
        if experiment.number in self._there:
            return
        agent = experiment.proposal.agent or self._agent
        row = result_row(self._run, history, experiment, work, agent=agent, seed=self._seed)
        results.append_row(self._path, row)
