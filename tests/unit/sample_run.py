"""A small finished run as records, for the tests of views and report: two ops, one faster than PyTorch, one slower."""

from pathlib import Path

from autokernel.history import KernelHistory
from autokernel.records import (
    Baseline,
    Case,
    Decision,
    Experiment,
    Interval,
    Outcome,
    PlannedOp,
    Proposal,
    StageReport,
    TensorMeta,
    TimedCase,
    Timing,
    Verdict,
)
from autokernel.settings import Settings
from autokernel.view import RunSummary

SETTINGS = Settings(model="examples/llama.py", workdir=Path("work"), budget_s=300.0)


def planned(op: str, share: float, headroom: float | None = 0.8) -> PlannedOp:
    case = Case(op=op, name="model", dtype="fp32", tensors={"x": TensorMeta(shape=(512, 384), dtype="fp32")})
    timed = (TimedCase(case=case, calls=9),)
    return PlannedOp(op=op, cases=timed, time_us=900.0, share=share, headroom=headroom, potential=1.12)


def started(op: str = "rmsnorm", starter_us: float = 1000.0, eager_us: float = 1600.0, share: float = 0.14):
    return KernelHistory(
        planned=planned(op, share),
        backend="cpp",
        device="Example CPU, 2 cores",
        baseline=Baseline(latencies_us={"eager": eager_us, "compile": 2 * eager_us}),
        incumbent="starter text",
        incumbent_us=starter_us,
        floor_us=400.0,
    )


def experiment(
    number: int,
    *,
    op: str = "rmsnorm",
    verdict: Verdict = Verdict.PASS,
    decision: Decision = Decision.REVERT,
    us: float | None = 1000.0,
    incumbent_us: float | None = 1000.0,
    idea: str = "UNROLL 2 -> 4",
    reason: str = "not surely faster",
) -> Experiment:
    timing = None
    if us is not None and incumbent_us is not None:
        ratio = incumbent_us / us
        interval = Interval(low=ratio * 0.99, estimate=ratio, high=ratio * 1.01)
        timing = Timing(candidate_us=us, incumbent_us=incumbent_us, speedup=interval, blocks=12)
    stage = StageReport(stage="smoke", verdict=verdict, cases=2, seconds=0.1)
    return Experiment(
        number=number,
        op=op,
        proposal=Proposal(hypothesis=idea, kernel_py=f"text {number}"),
        outcome=Outcome(
            verdict=verdict, stage="", reason=reason, stages=(stage,), timing=timing, peak_memory_mb=80.0, seconds=2.0
        ),
        decision=decision,
        reason=reason,
        latency_us=us,
        incumbent_us=incumbent_us,
        commit=f"{number:040x}",
        agent_s=0.1,
        seconds=2.1,
    )


def rmsnorm() -> KernelHistory:
    """1000 -> 500 us with two of five kept, against 1600 us of eager."""
    history = started()
    for one in (
        experiment(1, decision=Decision.KEEP, us=800.0, idea="vectorized loads", reason="faster"),
        experiment(2, us=790.0, incumbent_us=800.0),
        experiment(3, verdict=Verdict.SCREENED, us=990.0, incumbent_us=800.0, reason="plainly slower"),
        experiment(4, verdict=Verdict.CRASH, us=None, incumbent_us=None, reason="compile error"),
        experiment(5, decision=Decision.KEEP, us=500.0, incumbent_us=800.0, idea="keep the row in cache"),
    ):
        history = history.add(one)
    return history.stopped("3 reverts in a row")


def softmax() -> KernelHistory:
    """A loss: 400 us against PyTorch's 200 us, nothing kept."""
    history = started("softmax", starter_us=400.0, eager_us=200.0, share=0.03)
    return history.add(experiment(6, op="softmax", us=410.0, incumbent_us=400.0))


def summary(integration=None) -> RunSummary:
    return RunSummary(
        run="20300102-0304-llama",
        settings=SETTINGS,
        branch="autokernel/20300102-0304-llama",
        reason="every op of the plan is done",
        histories=(rmsnorm(), softmax()),
        integration=integration,
        seconds=90.0,
    )
