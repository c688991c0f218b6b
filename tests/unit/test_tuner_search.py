"""Searches over imagined kernels (tuner_landscapes.py): how few measurements they need, and that they repeat."""

import dataclasses
import itertools
import math
import statistics
import time

import pytest
from tuner_landscapes import LANDSCAPES, Landscape, Table

from autokernel.errors import ConfigError
from autokernel.tuner.lfbo import Lfbo
from autokernel.tuner.strategies import STRATEGIES, Task, strategy_of
from autokernel.tuner.trials import Status, Trial
from autokernel.tuner.tuning import batch_size
from autokernel.tuner.twins import Twins

pytestmark = pytest.mark.alone

SEEDS = 20
MOST = 150
"""Measurements after which a search counts as having needed so many."""

BY_NAME = {landscape.name: landscape for landscape in LANDSCAPES}
SMALL = Landscape("small", {"A": [1, 2, 4], "B": [1, 2, 4], "C": ["x", "y"]}, lambda A, B, C: 10 + A + B + (C == "x"))


def search(landscape, name, seed=0, **task):
    return strategy_of(name, Task(space=landscape.space, seed=seed, **task))


def run(landscape, strategy, most, *, seed=0):
    """Points in the order in which a search measures them."""
    provider, trials = Table(landscape, seed=seed), []
    while len(trials) < most and (points := strategy.propose(trials, batch_size(landscape.space.size, len(trials)))):
        trials += provider.measure(points)
    return provider.asked[:most]


def needed(landscape, name, seed):
    """Measurements until one is within 5 % of the best there is."""
    provider, strategy, trials = Table(landscape, seed=seed), search(landscape, name, seed), []
    while len(trials) < MOST:
        points = strategy.propose(trials, batch_size(landscape.space.size, len(trials)))
        for number, point in enumerate(points, start=len(trials) + 1):
            if (landscape.table[point] or math.inf) <= 1.05 * landscape.best:
                return number
        trials += provider.measure(points)
    return MOST


@pytest.fixture(scope="module")
def counts():
    names = ("lfbo", "pattern", "random")
    return {
        name: [[needed(landscape, name, seed) for seed in range(SEEDS)] for landscape in LANDSCAPES] for name in names
    }


def pooled(counts):
    return statistics.fmean(statistics.fmean(of_one) for of_one in counts)


@pytest.mark.slow
def test_lfbo_needs_at_most_half_of_the_measurements_of_pattern_search(counts):
    assert pooled(counts["lfbo"]) <= 0.5 * pooled(counts["pattern"])


@pytest.mark.slow
def test_lfbo_needs_fewer_measurements_than_drawing_at_random_on_each_landscape(counts):
    for landscape, ours, theirs in zip(LANDSCAPES, counts["lfbo"], counts["random"], strict=True):
        assert statistics.fmean(ours) < statistics.fmean(theirs), landscape.name


@pytest.mark.slow
def test_random_needs_what_drawing_without_replacement_must(counts):
    for landscape, drawn in zip(LANDSCAPES, counts["random"], strict=True):
        cells = list(landscape.table.values())
        good = sum((latency or math.inf) <= 1.05 * landscape.best for latency in cells)
        # P(none of the first k is good); the mean of a count that stops at MOST is the sum of these.
        left = [math.comb(len(cells) - good, k) / math.comb(len(cells), k) for k in range(MOST)]
        expected, error = sum(left), statistics.stdev(drawn) / math.sqrt(SEEDS)
        assert abs(statistics.fmean(drawn) - expected) < 4 * error, landscape.name


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_small_space_is_measured_whole_and_each_point_once(name):
    asked = run(SMALL, search(SMALL, name), 100)
    assert sorted(asked) == sorted(SMALL.table)


@pytest.mark.parametrize("name", STRATEGIES)
def test_seeds_come_first_and_a_search_repeats_exactly(name):
    landscape = BY_NAME["attention"]
    seeds = [(2, 2, 2, 1, 0), (0, 0, 0, 0, 0)]
    first = run(landscape, search(landscape, name, 7, seeds=seeds), 24)
    assert first == run(landscape, search(landscape, name, 7, seeds=seeds), 24)
    assert name in ("exhaustive", "pattern") or first[:2] == seeds
    assert name != "pattern" or first[0] == seeds[0]
    other = run(landscape, search(landscape, name, 8, seeds=seeds), 24)
    assert name == "exhaustive" or first != other


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_proposal_follows_from_the_trials_and_not_from_former_calls(name):
    landscape = BY_NAME["rows"]
    used, trials = search(landscape, name, 3), []
    for _ in range(4):
        points = used.propose(trials, 4)
        assert points == search(landscape, name, 3).propose(trials, 4)
        trials += Table(landscape).measure(points)


def test_what_fails_everywhere_near_is_left_alone():
    """All of one value fails: after some of its failures it is rarely chosen."""
    tunables = {"A": [1, 2, 4, 8], "B": [1, 2, 4, 8], "C": [1, 2, 4, 8], "WAY": ["x", "y"]}
    landscape = Landscape("half", tunables, lambda A, B, C, WAY: None if WAY == "y" else 100 - A - B - C)
    asked = run(landscape, search(landscape, "lfbo"), 40)
    assert sum(point[3] == 1 for point in asked[12:]) <= 2


def test_no_proposal_repeats_when_nothing_runs():
    landscape = Landscape("none", {"A": [1, 2, 4], "B": [1, 2, 4]}, lambda A, B: None if A * B < 16 else 1.0)
    assert len(set(run(landscape, search(landscape, "lfbo"), 100))) == 9


def test_a_censored_reading_teaches_as_a_slow_one():
    """Stopped at twice the best so far: the search goes on as well as with whole readings."""
    landscape = BY_NAME["attention"]
    provider, trials, strategy, best = Table(landscape), [], search(landscape, "lfbo", 1), math.inf
    while len(trials) < 60:
        for trial in provider.measure(strategy.propose(trials, 4)):
            best = min(best, trial.latency_us or math.inf)
            if trial.latency_us and trial.latency_us > 2 * best:
                trial = dataclasses.replace(trial, status=Status.CENSORED, latency_us=2 * best)
            trials.append(trial)
    assert any(trial.status is Status.CENSORED for trial in trials)
    assert best <= 1.05 * landscape.best


@pytest.mark.slow
def test_measurements_of_the_parent_shorten_the_search():
    """The child is 30 % slower throughout, and its best lies elsewhere by one knob."""
    parent = BY_NAME["attention"]
    child = Landscape(
        "child", parent.tunables, lambda **c: (t := parent.latency(**c)) and t * (1.3 - 0.2 * (c["ORDER"] == "snake"))
    )
    trials = Table(parent).measure(run(parent, search(parent, "random", 5), 40))

    def count(parent_trials, seed):
        asked = run(child, search(child, "lfbo", seed, parent=parent_trials), 40, seed=seed)
        hits = [n for n, p in enumerate(asked, start=1) if (child.table[p] or math.inf) <= 1.05 * child.best]
        return hits[0] if hits else 40

    alone = statistics.fmean(count((), seed) for seed in range(4))
    helped = statistics.fmean(count(trials, seed) for seed in range(4))
    assert helped < 0.7 * alone


def test_features_that_tell_the_latency_shorten_the_search():
    landscape = BY_NAME["attention"]

    def mean(features):
        counts = []
        for seed in range(5):
            asked = run(landscape, search(landscape, "lfbo", seed, features=features), 60, seed=seed)
            fast = [(landscape.table[point] or math.inf) <= 1.05 * landscape.best for point in asked]
            hits = [n for n, is_fast in enumerate(fast, start=1) if is_fast]
            counts.append(hits[0] if hits else 60)
        return statistics.fmean(counts)

    assert mean(lambda point: (math.log(landscape.table[point] or 1e6),)) < mean(None)


def test_a_space_too_large_to_list_is_searched_near_the_best():
    tunables = {f"K{number}": [1, 2, 4, 8, 16, 32] for number in range(10)}
    target = (4, 1, 3, 2, 0, 5, 2, 3, 1, 4)
    space = Lazy(tunables).space
    assert space.size > 50_000

    def latency(point):
        return 100 * math.exp(sum(0.12 * abs(a - b) for a, b in zip(point, target, strict=True)))

    trials, strategy = [], Lfbo(space=space, seed=0)
    while len(trials) < 100:
        points = strategy.propose(trials, 8)
        assert not {trial.point for trial in trials} & set(points)
        trials += [Trial(point=point, status=Status.OK, latency_us=latency(point)) for point in points]
    # A point drawn at random is 19 steps away; so is the best of the first ones here by about 11.
    assert min(latency(trial.point) for trial in trials) < 100 * math.exp(0.12 * 4)


def test_little_is_spent_on_configurations_that_compile_to_the_same_code():
    """Eight of ten knobs are idle, as in a kernel that chooses its structure by shape; 36 binaries there are."""
    space = Lazy({f"K{number}": [0, 1, 2, 4, 8, 16] for number in range(10)}).space

    def latency(point):
        return 100.0 + 7 * abs(point[2] - 3) + 5 * abs(point[7] - 1)

    trials, strategy = [], Lfbo(space=space, seed=0, seeds=[(0,) * 10])
    while len(trials) < 64:
        for point in strategy.propose(trials, 8):
            digest = f"{point[2]}{point[7]}"
            trials.append(Trial(point=point, status=Status.OK, latency_us=latency(point), digest=digest))
    assert len({trial.digest for trial in trials}) >= 18  # 7 to 12 without the expectation


def test_twins_are_expected_where_knobs_were_idle():
    space = Lazy({"A": [1, 2, 4], "B": [0, 1, 2], "C": [1, 2, 4], "D": [False, True]}).space

    def trials(*rows):
        return [Trial(point=point, status=Status.OK, latency_us=1.0, digest=digest) for point, digest in rows]

    seen = trials(((0, 1, 0, 0), "x"), ((1, 1, 0, 0), "x"), ((0, 1, 1, 0), "y"))
    assert Twins(space, seen).expects((2, 1, 0, 0))  # A was idle at x
    assert Twins(space, seen).expects((2, 1, 1, 0))  # and is at y
    assert not Twins(space, seen).expects((2, 1, 2, 0))  # another C
    assert not Twins(space, seen).expects((2, 1, 0, 1))  # another D
    by_shape = trials(((0, 0, 0, 0), "x"), ((0, 1, 0, 0), "x"))
    assert not Twins(space, by_shape).expects((0, 2, 0, 0))  # "by shape" was 1
    matters = trials(((0, 1, 0, 0), "x"), ((1, 1, 0, 0), "x"), ((2, 1, 0, 0), "z"))
    assert not Twins(space, matters).expects((2, 2, 0, 0))
    both = trials(((0, 1, 0, 0), "x"), ((0, 1, 0, 1), "x"), ((1, 1, 0, 0), "y"))
    assert Twins(space, both).expects((1, 1, 0, 1))  # a flag both of whose values are alike
    assert not Twins(space, trials(((0, 1, 0, 0), None), ((1, 1, 0, 0), None))).expects((2, 1, 0, 0))


class Lazy(Landscape):
    """A landscape of which only the space is made."""

    def __init__(self, tunables):
        super().__init__("lazy", {name: values[:1] for name, values in tunables.items()}, lambda **config: 1.0)
        from autokernel.tuner.knobs import knob_of
        from autokernel.tuner.space import Space

        knobs = tuple(knob_of(name, values) for name, values in tunables.items())
        object.__setattr__(self, "space", Space(knobs=knobs, config={n: v[0] for n, v in tunables.items()}))


def test_a_proposal_over_five_thousand_points_is_fast():
    tunables = {
        "A": [1, 2, 4, 8, 16],
        "B": [1, 2, 4, 8, 16],
        "C": [1, 2, 4, 8],
        "D": [1, 2, 4, 8, 16],
        "E": [1, 2, 3, 4],
    }
    tunables["F"] = [0, 1, 2]
    landscape = Landscape("large", tunables, lambda A, B, C, D, E, F: 1.0 + A / B + C * D / (E + F))
    trials = Table(landscape).measure(list(itertools.islice(landscape.table, 0, None, 100))[:60])
    strategy = search(landscape, "lfbo")
    strategy.propose(trials, 8)
    taken = []
    for _ in range(3):
        begun = time.process_time()
        strategy.propose(trials, 8)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.5


def test_another_name_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError) as caught:
        search(SMALL, "annealing")
    assert "lfbo, pattern, random, exhaustive" in caught.value.hint
