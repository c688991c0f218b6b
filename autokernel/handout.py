"""What somebody outside reads after `next` and `submit`: as text, and as JSON objects. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from autokernel.driven import Answer, Turn
from autokernel.history import KernelHistory
from autokernel.kernelfile import signature
from autokernel.records import Decision, Experiment

FINISH = "autokernel finish"


def turn_text(turn: Turn, submit: str, *, brief: bool) -> str:
    """The next experiment as Markdown; `brief` leaves out the playbook, `submit` is how a kernel is handed in."""
    lines = [*_settled(turn.settled), *_closed_ops(turn)]
    if turn.history is None or turn.prompt is None:
        lines += [f"# Run {turn.run}: nothing is left to do", "", f"{turn.reason[:1].upper()}{turn.reason[1:]}.", ""]
        lines.append(
            f"`{FINISH}` measures the whole model with the kernels; `autokernel report` shows what they bring."
        )
        return "\n".join(lines)
    number = sum(len(history.experiments) for history in turn.histories) + 1
    lines += [f"# Run {turn.run}: experiment {number}, on {turn.history.op}", "", *_how(turn, turn.history, submit)]
    parts = [turn.prompt.user] if brief else [turn.prompt.system, turn.prompt.user]
    return "\n".join([*lines, "", "\n".join(parts).rstrip()])


def _how(turn: Turn, history: KernelHistory, submit: str) -> Iterator[str]:
    state = "holds edits that were not handed in" if turn.edited else "holds the incumbent"
    yield f"- edit: {turn.draft} ({state})"
    yield f"- hand in: {submit}"
    yield f"- it defines: {_signature(history)}, KERNEL_TYPE {history.op!r}, BACKEND {history.backend!r}"
    yield f"- to beat: {history.incumbent_us:.1f} us for one forward's calls; {_ways(history)}"
    room = "" if turn.experiments_left is None else f"{turn.experiments_left} experiments and "
    yield (
        f"- left: {room}{turn.seconds_left / 60:.0f} minutes; the op is closed after {turn.patience} reverts in a row "
        f"({history.reverts_in_a_row} now)"
    )


def turn_json(turn: Turn, *, brief: bool) -> dict[str, Any]:
    """The same as an object; without an op (`op` is null) when nothing is left."""
    history, prompt = turn.history, turn.prompt
    closed = [{"op": h.op, "reason": h.stop_reason} for h in _closed(turn)]
    told: dict[str, Any] = {"run": turn.run, "op": None, "closed": closed, "settled": _experiment(turn.settled)}
    if history is None or prompt is None:
        return {**told, "reason": turn.reason, "then": FINISH}
    return {
        **told,
        "op": history.op,
        "backend": history.backend,
        "device": history.device,
        "kernel_py": str(turn.draft),
        "edited": turn.edited,
        "signature": _signature(history),
        "incumbent_us": history.incumbent_us,
        "floor_us": history.floor_us,
        "baselines_us": dict(history.baseline.latencies_us),
        "speedup_vs_baseline": history.speedup_vs_baseline,
        "cases": [{"label": item.case.label, "calls": item.calls} for item in history.planned.cases],
        "experiments": [_experiment(each) for each in history.experiments],
        "patience": turn.patience,
        "reverts_in_a_row": history.reverts_in_a_row,
        "experiments_left": turn.experiments_left,
        "seconds_left": turn.seconds_left,
        "playbook": None if brief else prompt.system,
        "prompt": prompt.user,
    }


def answer_text(answer: Answer, *, following: str = "autokernel next") -> str:
    """What the judge said, what became of the kernel, and what to do then."""
    experiment, history = answer.experiment, answer.history
    timing, outcome = experiment.outcome.timing, experiment.outcome
    kept = "kept: it is the incumbent now" if experiment.decision is Decision.KEEP else "reverted"
    where = f" in {outcome.stage}" if outcome.stage else ""
    lines = [*_settled(answer.settled), f"experiment {experiment.number} on {experiment.op}: {kept}"]
    lines.append(f"  verdict    {outcome.verdict}{where}")
    lines.append(f"  reason     {outcome.reason or experiment.reason}")
    if timing is not None:
        lines.append(
            f"  timing     {timing.candidate_us:.1f} us, the incumbent of that time {timing.incumbent_us:.1f} us: "
            f"{timing.speedup}"
        )
    lines.append(f"  incumbent  {history.incumbent_us:.1f} us; {_ways(history)}")
    lines.append(f"  commit     {experiment.commit} ({_reached_by(answer)})")
    if answer.stopped is not None:
        lines.append(f"  {experiment.op} is done for now: {answer.stopped}")
    return "\n".join([*lines, f"next: {following}"])


def answer_json(answer: Answer) -> dict[str, Any]:
    """The same as an object."""
    history = answer.history
    return {
        "run": answer.run,
        **(_experiment(answer.experiment) or {}),
        "incumbent_now_us": history.incumbent_us,
        "speedup_vs_baseline": history.speedup_vs_baseline,
        "baseline": history.baseline.fastest,
        "stopped": answer.stopped,
        "settled": _experiment(answer.settled),
    }


def _experiment(experiment: Experiment | None) -> dict[str, Any] | None:
    if experiment is None:
        return None
    timing = experiment.outcome.timing
    return {
        "experiment": experiment.number,
        "op": experiment.op,
        "hypothesis": experiment.proposal.hypothesis,
        "verdict": experiment.outcome.verdict,
        "stage": experiment.outcome.stage,
        "decision": experiment.decision,
        "reason": experiment.outcome.reason or experiment.reason,
        "latency_us": experiment.latency_us,
        "incumbent_us": experiment.incumbent_us,
        "speedup": asdict(timing.speedup) if timing else None,
        "commit": experiment.commit,
    }


def _settled(experiment: Experiment | None) -> Iterator[str]:
    if experiment is not None:
        yield (
            f"Experiment {experiment.number} on {experiment.op} had been left unfinished and was finished now: "
            f"{experiment.outcome.verdict}, {experiment.decision} ({experiment.outcome.reason or experiment.reason})."
        )
        yield ""


def _closed(turn: Turn) -> list[KernelHistory]:
    return [
        h for h in turn.histories if h.stop_reason is not None and (turn.history is None or h.op != turn.history.op)
    ]


def _closed_ops(turn: Turn) -> Iterator[str]:
    for history in _closed(turn):
        yield (
            f"{history.op} is closed: {history.stop_reason}; {history.incumbent_us:.1f} us, "
            f"{history.speedup_vs_baseline:.2f}x against {history.baseline.fastest}."
        )
        yield ""


def _signature(history: KernelHistory) -> str:
    return signature(history.starter or history.incumbent) or "kernel_fn as the incumbent has it"


def _ways(history: KernelHistory) -> str:
    ways = ", ".join(f"{name} {us:.1f} us" for name, us in history.baseline.latencies_us.items())
    return f"{history.speedup_vs_baseline:.2f}x PyTorch's fastest way ({ways})"


def _reached_by(answer: Answer) -> str:
    if answer.experiment.decision is Decision.KEEP:
        return answer.branch
    return f"refs/autokernel/rejected/{answer.run}/{answer.experiment.number}"
