"""Rules: each fires exactly at its limit, says why, and refuses senseless limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.records import Baseline, Decision, Experiment, Outcome, PlannedOp, Proposal, Verdict
from autokernel.rules import (
    DEFAULT_RULES,
    ActiveTime,
    NearPeak,
    Plateau,
    TargetSpeedup,
    first_reason_to_stop,
)

PLANNED = PlannedOp(op="softmax", cases=(), time_us=1.0, share=0.5, headroom=None, potential=1.5)
FRESH = KernelHistory(
    planned=PLANNED,
    backend="cpp",
    device="cpu",
    baseline=Baseline(latencies_us={"eager": 120.0, "compile": 100.0}),
    incumbent="",
    incumbent_us=100.0,
)


def played(decisions: str, *, verdict: Verdict = Verdict.PASS, start: KernelHistory = FRESH) -> KernelHistory:
    """`start` with one experiment per letter: k is kept, r is reverted; each takes 10 s."""
    history = start
    for number, letter in enumerate(decisions, start=1):
        outcome = Outcome(
            verdict=verdict, stage="", reason="", stages=(), timing=None, peak_memory_mb=None, seconds=1.0
        )
        history = history.add(
            Experiment(
                number=number,
                op="softmax",
                proposal=Proposal(hypothesis="", kernel_py=f"# {number}"),
                outcome=outcome,
                decision=Decision.KEEP if letter == "k" else Decision.REVERT,
                reason="",
                latency_us=None,
                incumbent_us=None,
                commit=None,
                agent_s=0.0,
                seconds=10.0,
            )
        )
    return history


def test_plateau_stops_after_five_reverts_in_a_row():
    assert Plateau().reason_to_stop(played("rrrr")) is None
    assert Plateau().reason_to_stop(played("rrrrr")) == "5 reverts in a row"


def test_plateau_starts_counting_again_after_a_keep():
    assert Plateau().reason_to_stop(played("rrrrkrrrr")) is None
    assert Plateau().reason_to_stop(played("krrrrr")) == "5 reverts in a row"


@pytest.mark.parametrize("verdict", [Verdict.SCREENED, Verdict.CRASH, Verdict.FAIL, Verdict.TIMEOUT])
def test_plateau_counts_every_verdict_that_was_reverted(verdict):
    assert Plateau(patience=2).reason_to_stop(played("rr", verdict=verdict)) == "2 reverts in a row"


def test_near_peak_never_fires_without_known_ceilings():
    assert NearPeak(fraction=0.01).reason_to_stop(FRESH) is None


def test_near_peak_fires_at_its_fraction():
    assert NearPeak().reason_to_stop(replace(FRESH, floor_us=89.9)) is None
    assert NearPeak().reason_to_stop(replace(FRESH, floor_us=90.0)) == "90% of the roofline reached (limit 90%)"


def test_active_time_counts_the_seconds_of_experiments():
    assert ActiveTime(limit_s=31).reason_to_stop(played("krr")) is None
    assert ActiveTime(limit_s=30).reason_to_stop(played("krr")) == "0.5 min of active time used (limit 0.5 min)"


def test_target_speedup_is_measured_against_the_fastest_baseline():
    rule = TargetSpeedup()
    assert rule.reason_to_stop(replace(FRESH, incumbent_us=50.1)) is None
    assert rule.reason_to_stop(replace(FRESH, incumbent_us=50.0)) == "2.00x over PyTorch's compile (target 2x)"


def test_default_rules_let_a_fresh_op_start_and_report_the_first_reason_in_order():
    assert first_reason_to_stop(DEFAULT_RULES, FRESH) is None
    both = replace(played("rrrrr"), incumbent_us=10.0)
    assert first_reason_to_stop(DEFAULT_RULES, both) == "5 reverts in a row"
    assert "10.00x" in (first_reason_to_stop(DEFAULT_RULES[1:], both) or "")


def test_no_rules_give_no_reason():
    assert first_reason_to_stop((), played("r" * 50)) is None


@pytest.mark.parametrize(
    ("rule", "argument", "value"),
    [
        (Plateau, "patience", 0),
        (Plateau, "patience", -3),
        (NearPeak, "fraction", 0.0),
        (NearPeak, "fraction", 90),
        (NearPeak, "fraction", float("nan")),
        (ActiveTime, "limit_s", 0),
        (ActiveTime, "limit_s", float("inf")),
        (TargetSpeedup, "factor", 0.5),
        (TargetSpeedup, "factor", float("nan")),
    ],
)
def test_a_senseless_limit_is_refused_and_repeated(rule, argument, value):
    with pytest.raises(ConfigError, match=rf"{argument} = {value}") as caught:
        rule(**{argument: value})
    assert caught.value.hint
