"""The search loop: budgets, what is timed twice and what once, and going on from a journal cut anywhere."""

import dataclasses
import json
import math
import statistics

import pytest
from tuner_landscapes import LANDSCAPES, Landscape, Table

from autokernel.errors import LogError
from autokernel.records import KernelResources
from autokernel.tuner.importance import importance, in_words
from autokernel.tuner.journal import CRASHED
from autokernel.tuner.strategies import Task, strategy_of
from autokernel.tuner.trials import Provider, Status, Trial
from autokernel.tuner.tuning import AHEAD, Budget, batch_size, tune

ATTENTION = next(landscape for landscape in LANDSCAPES if landscape.name == "attention")


class Confirming(Table):
    """Times again in rounds that all points share, and has names of binaries: `same` maps a point to another's."""

    def __init__(self, landscape, *, same=None, **options):
        super().__init__(landscape, **options)
        self.same, self.compared, self.prepared = same or {}, [], []

    def digests(self, points):
        return [str(self.same.get(point, point)) for point in points]

    def measure(self, points):
        trials = super().measure(points)
        resources = KernelResources(kernel="k", registers=32)
        return [
            dataclasses.replace(trial, digest=name, resources=resources)
            for trial, name in zip(trials, self.digests(points), strict=True)
        ]

    def prepare(self, points):
        self.prepared.append(list(points))

    def confirm(self, points):
        self.compared.append(list(points))
        return [[self.reading(point, turn) for turn in range(1, 11)] for point in points]


def tuned(provider, budget, *, name="lfbo", seed=0, **options):
    space = provider.landscape.space
    return tune(space, provider, strategy_of(name, Task(space=space, seed=seed)), budget, **options)


def test_a_budget_of_evaluations_is_kept_and_the_best_is_a_whole_config():
    provider = Confirming(ATTENTION)
    result = tuned(provider, Budget(evaluations=42))
    assert result.evaluations == len(result.trials) == len(provider.asked) == 42
    assert result.why == "42 evaluations"
    assert result.config == ATTENTION.space.config_at(result.best)
    assert ATTENTION.table[result.best] <= 1.1 * ATTENTION.best
    assert result.latency_us == pytest.approx(ATTENTION.table[result.best], rel=0.05)


def test_a_budget_of_seconds_ends_between_batches():
    provider = Confirming(ATTENTION)
    result = tuned(provider, Budget(seconds=250), clock=lambda: 30.0 * len(provider.batches))
    assert len(provider.batches) == math.ceil(250 / 30)
    assert result.why == "250 seconds"


def test_patience_counts_evaluations_since_the_last_better_one():
    landscape = Landscape("one", {"A": [1, 2, 4, 8], "B": list(range(1, 9))}, lambda A, B: 1.0 if A * B == 1 else 9.0)
    result = tuned(Confirming(landscape, noise=0.0), Budget(patience=12), seeds=[(0, 0)])
    assert "without a better one" in result.why
    assert result.best == (0, 0)
    assert 12 <= len(result.trials) - 1 < 20


def test_a_space_is_measured_out_and_says_so():
    landscape = Landscape("tiny", {"A": [1, 2], "B": [1, 2]}, lambda A, B: 1.0 + A + B)
    result = tuned(Confirming(landscape), Budget())
    assert result.why == "every configuration has been measured"
    assert result.best == (0, 0)


def test_nothing_that_runs_is_no_best():
    landscape = Landscape("none", {"A": [1, 2], "B": [1, 2]}, lambda A, B: None)
    result = tuned(Confirming(landscape), Budget())
    assert (result.best, result.config, result.latency_us, len(result.trials)) == (None, None, None, 4)


def test_one_binary_is_timed_once():
    landscape = Landscape("twins", {"A": [1, 2, 4], "B": [1, 2, 4], "IDLE": [0, 1]}, lambda A, B, IDLE: 5.0 + A * B)
    provider = Confirming(landscape, same={(a, b, 1): (a, b, 0) for a in range(3) for b in range(3)})
    result = tuned(provider, Budget(), name="exhaustive")
    assert len(result.trials) == 18
    assert result.evaluations == len(provider.asked) == 9
    by_point = {trial.point: trial for trial in result.trials}
    for (a, b, idle), trial in by_point.items():
        assert trial.latency_us == by_point[a, b, 1 - idle].latency_us
    assert sum(trial.timing_s > 0 for trial in result.trials) == 9


def test_a_lucky_reading_does_not_become_the_best():
    """Noise of 10 % in single readings, 40 searches: comparing in turns returns better configurations."""
    landscape = Landscape("flat", {"A": list(range(1, 17)), "B": [1, 2]}, lambda A, B: 100.0 + A + 2 * B)

    class Trusting(Confirming):
        def confirm(self, points):
            return Provider.confirm(self, points)

    def mean(kind):
        found = [
            tuned(kind(landscape, seed=seed, noise=0.1), Budget(), name="random", seed=seed).best for seed in range(40)
        ]
        return statistics.fmean(landscape.table[point] for point in found)

    assert mean(Confirming) < mean(Trusting)


def test_what_comes_next_is_compiled_ahead():
    provider = Confirming(ATTENTION)
    tuned(provider, Budget(evaluations=40))
    # The first batch is spread over the space: what comes after it is not known yet.
    for ahead, batch in zip(provider.prepared, provider.batches[1:], strict=True):
        assert ahead[: len(batch)] == batch
        assert len(ahead) == len(set(ahead)) == len(batch) + AHEAD


def test_batches_begin_small_and_grow_with_what_is_known():
    assert [batch_size(10_000, measured) for measured in (0, 16, 32, 64, 1000)] == [4, 4, 8, 16, 32]
    assert batch_size(200, 1000) == 10
    assert batch_size(20, 1000) == 4


class Killed(BaseException):
    """Stands for the death of the process: nothing is written after it."""


def journal_of(tmp_path, budget):
    path = tmp_path / "whole.jsonl"
    result = tuned(Confirming(ATTENTION), budget, journal_path=path, seeds=[(2, 2, 2, 1, 0)])
    return path.read_bytes(), result


@pytest.mark.slow
def test_a_search_goes_on_exactly_from_a_journal_cut_anywhere(tmp_path):
    budget = Budget(evaluations=25)
    whole, expected = journal_of(tmp_path, budget)
    lines = whole.splitlines(keepends=True)
    cuts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    cuts += [cut + len(line) // 2 for cut, line in zip(cuts, lines, strict=False)]
    for number, cut in enumerate(sorted(cuts)):
        path = tmp_path / f"cut{number}.jsonl"
        path.write_bytes(whole[:cut])
        provider = Confirming(ATTENTION)
        result = tuned(provider, budget, journal_path=path, seeds=[(2, 2, 2, 1, 0)])
        lone = [t for t in result.trials if t.error == CRASHED]
        if not lone:  # the only start of one point is the seed's
            assert (result.trials, result.best, result.why) == (expected.trials, expected.best, expected.why)
            known = sum(
                len(json.loads(line)["trials"])
                for line in whole[:cut].splitlines()
                if b'"done"' in line and line.endswith(b"}")
            )
            assert len(provider.asked) == len(expected.trials) - known
    assert path.read_bytes() == whole


def test_a_point_that_died_alone_is_labelled_and_skipped(tmp_path):
    whole, expected = journal_of(tmp_path, Budget(evaluations=8))
    path = tmp_path / "crash.jsonl"
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    provider = Confirming(ATTENTION)
    result = tuned(provider, Budget(evaluations=8), journal_path=path, seeds=[(2, 2, 2, 1, 0)])
    assert result.trials[0] == Trial(point=(2, 2, 2, 1, 0), status=Status.LAUNCH_ERROR, error=CRASHED)
    assert (2, 2, 2, 1, 0) not in provider.asked
    assert expected.trials[0].status is Status.OK


def test_what_was_stopped_on_purpose_is_measured_again(tmp_path):
    class Interrupted(Confirming):
        def measure(self, points):
            if len(self.batches) == 2:
                raise KeyboardInterrupt
            return super().measure(points)

    path = tmp_path / "stopped.jsonl"
    with pytest.raises(KeyboardInterrupt):
        tuned(Interrupted(ATTENTION), Budget(evaluations=20), journal_path=path)
    resumed = tuned(Confirming(ATTENTION), Budget(evaluations=20), journal_path=path)
    assert resumed.trials == tuned(Confirming(ATTENTION), Budget(evaluations=20)).trials


def test_seconds_used_before_a_pause_count(tmp_path):
    path = tmp_path / "journal.jsonl"
    first = Confirming(ATTENTION)
    tuned(first, Budget(seconds=100), journal_path=path, clock=lambda: 10.0 * len(first.batches))
    more = Confirming(ATTENTION)
    tuned(more, Budget(seconds=150), journal_path=path, clock=lambda: 5000 + 10.0 * len(more.batches))
    assert (len(first.batches), len(more.batches)) == (10, 5)


def test_another_search_or_a_damaged_line_stops_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    tuned(Confirming(ATTENTION), Budget(evaluations=4), journal_path=path)
    with pytest.raises(LogError, match="another search"):
        tuned(Confirming(LANDSCAPES[0]), Budget(evaluations=4), journal_path=path)
    path.write_bytes(path.read_bytes().replace(b'"trials"', b'"trails"'))
    with pytest.raises(LogError, match="line"):
        tuned(Confirming(ATTENTION), Budget(evaluations=8), journal_path=path)


def test_knobs_are_ranked_by_what_they_change_and_told_in_words():
    landscape = Landscape(
        "ranked",
        {"BIG": [1, 2, 4], "SMALL": [1, 2, 4], "IDLE": [1, 2], "WAY": ["a", "b", "bad"]},
        lambda BIG, SMALL, IDLE, WAY: None if WAY == "bad" else 100 * BIG**0.5 * SMALL**0.1,
    )
    trials = Table(landscape, noise=0.0).measure(list(landscape.table))
    ranked = importance(landscape.space, trials)
    assert [knob.name for knob in ranked[:2]] == ["BIG", "SMALL"]
    assert ranked[0].spread == pytest.approx(math.log(2), rel=0.1)
    assert ranked[1].spread == pytest.approx(0.1 * math.log(4), rel=0.1)
    assert ranked[2].spread < 0.01
    words = in_words(landscape.space, trials)
    assert "- BIG: 9" in words  # 95 %: shrunk a little from 100 %
    assert "best at 1" in words
    assert "WAY = 'bad' failed each of 18 times" in words
    assert "18 x launch_error: out of resource: shared memory" in words
    assert "100.0 us: as it is" in words


def test_importance_of_nothing_is_nothing():
    assert all(knob.spread == 0 for knob in importance(ATTENTION.space, []))
    assert in_words(ATTENTION.space, []) == ""
