"""The search agent on synthetic latency landscapes: quick to good configurations, never twice the same, stateless."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from autokernel.agents import AgentOptions, build_agent
from autokernel.agents.evidence import Measurement, fit_effects, gather
from autokernel.agents.search import SearchAgent, build
from autokernel.errors import AgentError, ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import parse_kernel, with_config
from autokernel.records import Baseline, Decision, Experiment, Outcome, PlannedOp, Proposal, Verdict
from autokernel.tuner.space import Space

TUNABLES = {
    "VEC": [1, 4, 8, 16],
    "UNROLL": [1, 2, 4, 8],
    "THREADS": [1, 2, 4],
    "ONE_PASS": [False, True],
    "BLOCK": [64, 128, 256, 512, 1024],
    "STORE": ["plain", "stream"],
}
CONFIG = {"VEC": 8, "UNROLL": 2, "THREADS": 1, "ONE_PASS": False, "BLOCK": 128, "STORE": "plain"}
PLANNED = PlannedOp(op="softmax", cases=(), time_us=1.0, share=0.5, headroom=None, potential=1.5)
SCREEN_AT = 1.1  # the fake judge screens candidates that are this much slower
KEEP_AT = 0.985  # and keeps those that are this much faster
NOISE = 0.004  # standard deviation of log latency

Latency = Callable[[Mapping], float | None]


def kernel(tunables: Mapping, config: Mapping, body: str = "return x") -> str:
    return (
        f'KERNEL_TYPE = "softmax"\nBACKEND = "cpp"\nTUNABLES = {tunables!r}\nCONFIG = {config!r}\n\n\n'
        f"def kernel_fn(x, dim=-1):\n    {body}\n"
    )


def start(text: str) -> KernelHistory:
    return KernelHistory(
        planned=PLANNED,
        backend="cpp",
        device="cpu",
        baseline=Baseline(latencies_us={"eager": 100.0}),
        incumbent=text,
        incumbent_us=100.0,
    )


def record(
    history: KernelHistory,
    proposal: Proposal,
    verdict: Verdict,
    *,
    ratio: float | None = None,
    decision: Decision = Decision.REVERT,
) -> KernelHistory:
    """The history with `proposal` judged; `ratio` is candidate latency / incumbent latency."""
    outcome = Outcome(verdict=verdict, stage="", reason="", stages=(), timing=None, peak_memory_mb=None, seconds=1.0)
    incumbent_us = history.incumbent_us
    experiment = Experiment(
        number=len(history.experiments) + 1,
        op="softmax",
        proposal=proposal,
        outcome=outcome,
        decision=decision,
        reason="",
        latency_us=None if ratio is None else incumbent_us * ratio,
        incumbent_us=None if ratio is None else incumbent_us,
        commit=None,
        agent_s=0.0,
        seconds=1.0,
    )
    return history.add(experiment)


def config_of(text: str) -> Mapping:
    return parse_kernel(text).config


def judge(history: KernelHistory, proposal: Proposal, latency: Latency, rng: random.Random) -> KernelHistory:
    """What the loop does with a proposal, on a synthetic landscape; a latency of None is a crash."""
    candidate, incumbent = latency(config_of(proposal.kernel_py)), latency(config_of(history.incumbent))
    if candidate is None:
        return record(history, proposal, Verdict.CRASH)
    ratio = candidate / incumbent * math.exp(rng.gauss(0.0, NOISE))
    if ratio > SCREEN_AT:
        return record(history, proposal, Verdict.SCREENED, ratio=ratio)
    decision = Decision.KEEP if ratio < KEEP_AT else Decision.REVERT
    return record(history, proposal, Verdict.PASS, ratio=ratio, decision=decision)


def landscape(seed: int, kind: str) -> Latency:
    """A latency in us over TUNABLES: knobs of random weight with a random best value, with `kind`'s difficulty."""
    rng = random.Random(f"{kind}/{seed}")
    best = {knob: rng.randrange(len(values)) for knob, values in TUNABLES.items()}
    slope = {knob: rng.choice([0.0, 0.02, 0.05, 0.15, 0.3]) for knob in TUNABLES}
    twist = {pair: rng.gauss(0.0, 0.2) for pair in itertools.combinations(TUNABLES, 2)} if kind == "interacting" else {}
    broken = {
        (knob, value)
        for knob, values in TUNABLES.items()
        for value in values
        if kind == "failing" and value != CONFIG[knob] and rng.random() < 0.2
    }

    def latency(config: Mapping) -> float | None:
        if any(item in broken for item in config.items()):
            return None
        place = {knob: values.index(config[knob]) / (len(values) - 1) for knob, values in TUNABLES.items()}
        ideal = {knob: best[knob] / (len(values) - 1) for knob, values in TUNABLES.items()}
        log = sum(1.5 * slope[knob] * abs(place[knob] - ideal[knob]) for knob in TUNABLES)
        log += sum(weight * (place[a] - 0.5) * (place[b] - 0.5) for (a, b), weight in twist.items())
        return 100.0 * math.exp(log)

    return latency


ALL_CONFIGS = [dict(zip(TUNABLES, values, strict=True)) for values in itertools.product(*TUNABLES.values())]


def evaluations_of_search(latency: Latency, goal: float, seed: int, limit: int) -> int:
    history, rng, agent = start(kernel(TUNABLES, CONFIG)), random.Random(seed), SearchAgent(seed=seed)
    while latency(config_of(history.incumbent)) > goal and len(history.experiments) < limit:
        history = judge(history, agent.propose(history), latency, rng)
    return len(history.experiments)


def evaluations_of_random(latency: Latency, goal: float, seed: int, limit: int) -> int:
    order = random.Random(seed).sample(ALL_CONFIGS, limit)
    candidates = itertools.chain([CONFIG], order)
    return next((n for n, c in enumerate(candidates) if (us := latency(c)) is not None and us <= goal), limit)


@pytest.mark.parametrize("kind", ["additive", "interacting", "failing"])
def test_search_comes_within_five_percent_of_the_best_far_sooner_than_random_search(kind):
    limit = 60
    searched, drawn = [], []
    for seed in range(12):
        latency = landscape(seed, kind)
        goal = 1.05 * min(us for config in ALL_CONFIGS if (us := latency(config)) is not None)
        searched.append(evaluations_of_search(latency, goal, seed, limit))
        drawn += [evaluations_of_random(latency, goal, 100 * seed + turn, len(ALL_CONFIGS)) for turn in range(10)]
    assert statistics.median(searched) < 0.6 * statistics.median(drawn), (searched, statistics.median(drawn))
    in_time = [statistics.mean(count < limit for count in counts) for counts in (searched, drawn)]
    assert in_time[0] > in_time[1] + 0.2, in_time


def test_on_a_flat_landscape_every_knob_is_tried_once_before_any_knob_twice():
    history, rng, agent = start(kernel(TUNABLES, CONFIG)), random.Random(0), SearchAgent(seed=0)
    touched = []
    for _ in TUNABLES:
        proposal = agent.propose(history)
        config = config_of(proposal.kernel_py)
        touched += [knob for knob in TUNABLES if config[knob] != CONFIG[knob]]
        history = judge(history, proposal, lambda _: 100.0, rng)
    assert sorted(touched) == sorted(TUNABLES)


def test_unknown_knobs_are_tried_in_the_order_of_tunables_wherever_they_stand_in_their_range():
    tunables, config = (
        {"MID": [1, 2, 4, 8, 16], "END": [1, 2, 4], "NAME": ["a", "b"]},
        {"MID": 4, "END": 1, "NAME": "a"},
    )
    history, agent, words = start(kernel(tunables, config)), SearchAgent(seed=0), []
    for _ in tunables:
        proposal = agent.propose(history)
        words.append(proposal.hypothesis.split(":")[0])
        history = record(history, proposal, Verdict.PASS, ratio=1.0)
    assert words == ["MID 4 -> 16", "END 1 -> 4", "NAME a -> b"]


def test_no_configuration_is_proposed_twice_and_the_starter_never():
    # A starter in another layout than the one in which CONFIG is written back, and kept changes on the way.
    pretty = kernel(TUNABLES, CONFIG).replace(repr(CONFIG), repr(CONFIG).replace(", ", ",  # why\n    "))
    history, rng, agent = start(pretty), random.Random(1), SearchAgent(seed=1)
    latency = landscape(3, "interacting")
    for _ in range(60):
        history = judge(history, agent.propose(history), latency, rng)
    configs = [tuple(config_of(e.proposal.kernel_py).items()) for e in history.experiments]
    assert any(e.decision is Decision.KEEP for e in history.experiments)
    assert len(set(configs)) == 60
    assert tuple(CONFIG.items()) not in configs


def test_a_small_space_is_used_up_and_then_nothing_is_proposed():
    tunables, config = {"A": [1, 2, 3], "B": [False, True], "C": ["x", "y"]}, {"A": 2, "B": False, "C": "x"}
    history, rng, agent = start(kernel(tunables, config)), random.Random(0), SearchAgent(seed=0)
    while (proposal := agent.propose(history)) is not None:
        history = judge(history, proposal, lambda c: 100.0 - 5.0 * c["A"] - 10.0 * c["B"], rng)
    assert len(history.experiments) == 11
    assert config_of(history.incumbent) == {"A": 3, "B": True, "C": "x"}


def test_the_same_history_gives_the_same_proposal_to_a_new_agent():
    latency, rng = landscape(5, "failing"), random.Random(5)
    history, agent = start(kernel(TUNABLES, CONFIG)), SearchAgent(seed=9)
    for _ in range(25):
        proposal = agent.propose(history)
        resumed = start(kernel(TUNABLES, CONFIG))
        for experiment in history.experiments:
            resumed = resumed.add(experiment)
        assert build_agent("search", AgentOptions(seed=9)).propose(resumed) == proposal
        history = judge(history, proposal, latency, rng)


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.CRASH, Verdict.TIMEOUT, Verdict.OOM])
def test_a_value_that_failed_alone_is_never_proposed_again(verdict):
    tunables, config = {"A": [1, 2, 3], "B": [1, 2, 3]}, {"A": 1, "B": 1}
    history, agent = start(kernel(tunables, config)), SearchAgent(seed=0)
    alone = Proposal(hypothesis="", kernel_py=kernel(tunables, {"A": 3, "B": 1}))
    history = record(history, alone, verdict)
    proposed = []
    while (proposal := agent.propose(history)) is not None:
        proposed.append(config_of(proposal.kernel_py))
        history = record(history, proposal, Verdict.PASS, ratio=1.0)
    assert len(proposed) == 5
    assert all(config["A"] != 3 for config in proposed)


def test_settings_that_failed_together_are_still_tried_apart():
    tunables, config = {"A": [1, 2], "B": [1, 2], "C": [1, 2]}, {"A": 1, "B": 1, "C": 1}
    history, agent = start(kernel(tunables, config)), SearchAgent(seed=0)
    together = Proposal(hypothesis="", kernel_py=kernel(tunables, {"A": 2, "B": 2, "C": 1}))
    history = record(history, together, Verdict.OOM)
    proposed = []
    while (proposal := agent.propose(history)) is not None:
        proposed.append(config_of(proposal.kernel_py))
        history = record(history, proposal, Verdict.PASS, ratio=1.0)
    assert {"A": 2, "B": 1, "C": 1} in proposed
    assert {"A": 1, "B": 2, "C": 1} in proposed
    assert {"A": 2, "B": 2, "C": 2} not in proposed


def test_a_failure_that_a_later_pass_contradicts_is_forgotten():
    tunables, config = {"A": [1, 2], "B": [1, 2]}, {"A": 1, "B": 1}
    history = start(kernel(tunables, config))
    failed = Proposal(hypothesis="", kernel_py=kernel(tunables, {"A": 2, "B": 1}))
    passed = Proposal(hypothesis="", kernel_py=kernel(tunables, {"A": 2, "B": 2}))
    kernel_file = parse_kernel(history.incumbent)
    history = record(history, failed, Verdict.TIMEOUT)
    assert gather(history, kernel_file).faults == (frozenset({(0, 1)}),)
    history = record(history, passed, Verdict.PASS, ratio=1.0)
    assert gather(history, kernel_file).faults == ()


def test_two_gains_too_small_to_be_kept_are_combined_as_soon_as_single_changes_are_known():
    tunables, config = {"A": [1, 2], "B": [1, 2], "C": [1, 2], "D": [1, 2]}, dict.fromkeys("ABCD", 1)
    ratios = {"A": 0.992, "B": 1.05, "C": 0.993, "D": 1.04}
    history, agent = start(kernel(tunables, config)), SearchAgent(seed=0)
    for _ in tunables:
        proposal = agent.propose(history)
        (changed,) = [knob for knob, value in config_of(proposal.kernel_py).items() if value == 2]
        history = record(history, proposal, Verdict.PASS, ratio=ratios[changed])
    fifth = agent.propose(history)
    assert config_of(fifth.kernel_py) == {"A": 2, "B": 1, "C": 2, "D": 1}
    assert fifth.hypothesis.startswith("A 1 -> 2, C 1 -> 2: expected 1.0% faster, 0.9% faster alone")


def test_a_screened_step_turns_the_search_of_that_knob_round():
    tunables, config = {"A": [1, 2, 4, 8, 16]}, {"A": 4}
    history, agent = start(kernel(tunables, config)), SearchAgent(seed=0)
    first = agent.propose(history)
    assert config_of(first.kernel_py)["A"] > 4
    history = record(history, first, Verdict.SCREENED, ratio=1.3)
    assert config_of(agent.propose(history).kernel_py)["A"] < 4


def test_the_hypothesis_says_what_changes_and_why():
    proposal = SearchAgent(seed=0).propose(start(kernel({"UNROLL": [4, 8]}, {"UNROLL": 4})))
    assert proposal.hypothesis == "UNROLL 4 -> 8: nothing is known of this knob yet"
    assert proposal.kernel_py == kernel({"UNROLL": [4, 8]}, {"UNROLL": 8})


def test_candidates_of_another_agent_do_not_disturb_the_search():
    text = kernel({"A": [1, 2]}, {"A": 1})
    history, agent = start(text), SearchAgent(seed=0)
    for foreign in ("def broken(:", "TUNABLES = {[]: 1}", kernel({"A": [1, 2]}, {"A": 2}, body="return x + 0")):
        history = record(history, Proposal(hypothesis="", kernel_py=foreign), Verdict.CRASH)
    assert config_of(agent.propose(history).kernel_py) == {"A": 2}


def test_a_kept_change_of_structure_starts_the_search_afresh():
    old, new = kernel({"A": [1, 2]}, {"A": 1}), kernel({"A": [1, 2], "B": [1, 2]}, {"A": 1, "B": 1})
    history = record(start(old), Proposal(hypothesis="", kernel_py=with_config(old, {"A": 2})), Verdict.CRASH)
    history = record(history, Proposal(hypothesis="", kernel_py=new), Verdict.PASS, ratio=0.5, decision=Decision.KEEP)
    assert config_of(SearchAgent(seed=0).propose(history).kernel_py) == {"A": 2, "B": 1}


@pytest.mark.parametrize(
    "text",
    [
        kernel({}, {}),
        kernel({"A": [1]}, {"A": 1}),
        kernel({"A": [1, 2]}, {}),
        kernel({"A": [1, 2]}, {}).replace("CONFIG = {}\n", ""),
        kernel({"A": [1, 2]}, {"A": 1}).replace("TUNABLES", "OTHERS"),
    ],
)
def test_a_kernel_without_a_choice_gets_no_proposal(text):
    assert SearchAgent(seed=0).propose(start(text)) is None


def test_an_incumbent_with_a_bad_literal_is_an_agent_error_with_a_hint():
    text = kernel({"A": [1, 2]}, {"A": 1}).replace("[1, 2]", "list(range(3))")
    with pytest.raises(AgentError, match="TUNABLES is not a literal") as caught:
        SearchAgent(seed=0).propose(start(text))
    assert "mend the starter" in caught.value.hint


def test_equal_values_of_different_types_are_different_settings():
    space = Space.of(parse_kernel(kernel({"A": [1, True, 1.0, 1]}, {"A": True})))
    assert [repr(value) for value in space.knobs[0].values] == ["1", "True", "1.0"]
    assert space.locate({"A": True}) == (1,)
    assert repr(space.config_at((2,))) == "{'A': 1.0}"


def test_the_additive_fit_recovers_effects_from_overlapping_measurements():
    truth = {(0, 0): 0.0, (0, 1): -0.2, (1, 0): 0.0, (1, 1): 0.1}
    points = [(0, 0), (0, 1), (1, 0), (1, 1)]
    rows = [Measurement(point=p, log_latency=truth[0, p[0]] + truth[1, p[1]], weight=1.0) for p in points]
    effects = fit_effects(rows, (0, 0))
    assert effects[0, 1] - effects[0, 0] == pytest.approx(-0.2, abs=0.01)
    assert effects[1, 1] - effects[1, 0] == pytest.approx(0.1, abs=0.01)


def test_a_slower_machine_does_not_change_what_is_learned():
    history, agent = start(kernel(TUNABLES, CONFIG)), SearchAgent(seed=0)
    slow = replace(history, incumbent_us=300.0)
    for ratio in (0.9, 1.1, 0.95, 1.02):
        proposal = agent.propose(history)
        decision = Decision.KEEP if ratio < KEEP_AT else Decision.REVERT
        history = record(history, proposal, Verdict.PASS, ratio=ratio, decision=decision)
        slow = record(slow, proposal, Verdict.PASS, ratio=ratio, decision=decision)
    assert agent.propose(slow) == agent.propose(history)


def test_an_argument_is_refused():
    with pytest.raises(ConfigError, match="takes no argument, got 'fast'"):
        build(AgentOptions(seed=0, argument="fast"))


def test_agents_do_not_import_torch():
    code = "import sys, autokernel.agents.search, autokernel.agents.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
