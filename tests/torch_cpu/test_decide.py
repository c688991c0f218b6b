"""The keep rule and the order of the plan, as orchestrate.py has them."""

import pytest

from autokernel.history import KernelHistory
from autokernel.loading import load_file, toplevel
from autokernel.records import Baseline, Interval, Outcome, PlannedOp, Proposal, Timing, Verdict
from autokernel.rules import TargetSpeedup
from autokernel.settings import Settings

orchestrate = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
INCUMBENT = "x" * 1000
HISTORY = KernelHistory(
    planned=PlannedOp(op="softmax", cases=(), time_us=10, share=0.5, headroom=None, potential=1.2),
    backend="cpp",
    device="cpu",
    baseline=Baseline(latencies_us={"eager": 10.0}),
    incumbent=INCUMBENT,
    incumbent_us=10.0,
)


def outcome(verdict=Verdict.PASS, speedup=None):
    timing = None
    if speedup:
        low, high = speedup
        interval = Interval(low=low, estimate=(low + high) / 2, high=high)
        timing = Timing(candidate_us=9, incumbent_us=10, speedup=interval, blocks=12)
    return Outcome(verdict=verdict, stage="", reason="", stages=(), timing=timing, peak_memory_mb=None, seconds=1.0)


@pytest.mark.parametrize(
    ("result", "text", "decision"),
    [
        (outcome(speedup=(1.02, 1.1)), INCUMBENT, "KEEP"),
        (outcome(speedup=(1.005, 1.1)), INCUMBENT, "REVERT"),
        (outcome(speedup=(0.995, 1.005)), "x" * 800, "KEEP"),
        (outcome(speedup=(0.995, 1.005)), "x" * 950, "REVERT"),
        (outcome(speedup=(0.95, 1.005)), "x" * 800, "REVERT"),
        (outcome(Verdict.FAIL), INCUMBENT, "REVERT"),
        (outcome(Verdict.SCREENED, (1.5, 2.0)), INCUMBENT, "REVERT"),
        (outcome(), INCUMBENT, "REVERT"),
    ],
)
def test_keep_rule(result, text, decision):
    decided, why = orchestrate.decide(HISTORY, Proposal(hypothesis="h", kernel_py=text), result)
    assert decided == decision
    assert why


def test_second_pass_does_not_stop_at_twice_pytorch(tmp_path):
    first, second = orchestrate.passes(Settings(model="m", workdir=tmp_path, patience=3))
    assert any(isinstance(rule, TargetSpeedup) for rule in first)
    assert not any(isinstance(rule, TargetSpeedup) for rule in second)
    assert len(second) == len(first) - 1
    assert any(getattr(rule, "patience", None) == 3 for rule in second)
