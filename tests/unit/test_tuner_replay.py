"""Replay of searches on recorded tables: what is charged and scored, and the exact expectation of random search."""

import itertools
import math
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "tuner"
sys.path.insert(0, str(FOLDER))

from arms import ARMS, OURS  # noqa: E402
from scoring import (  # noqa: E402
    expected_random,
    good_cells,
    half_of,
    horizon_s,
    ratio_of,
    score,
)
from seeding import cost_s, heuristics_of  # noqa: E402
from simulated import CURVE, WORKERS, Over, Session, TableProvider  # noqa: E402
from tables import TABLES, Cell, read_table, table_path, write_table  # noqa: E402

from autokernel.tuner.strategies import Task, strategy_of  # noqa: E402
from autokernel.tuner.trials import Status  # noqa: E402
from autokernel.tuner.tuning import Budget, tune  # noqa: E402


@pytest.fixture(scope="module")
def recorded():
    """A real table: a C++ kernel's grid, recorded on a CPU."""
    return read_table(table_path(TABLES, "rmsnorm_cpp"))


@pytest.fixture
def small(recorded):
    """Four cells by hand: the second is the best, the third fails, the fourth is within 5 %."""
    cells = [
        Cell(point=(0,), status="OK", compile_s=3.0, us=(20.0, 22.0, 21.0), timing_s=0.5),
        Cell(point=(1,), status="OK", compile_s=1.0, us=(10.0, 10.0, 10.0), timing_s=0.25),
        Cell(point=(2,), status="LAUNCH_ERROR", compile_s=2.0, timing_s=0.125),
        Cell(point=(3,), status="OK", compile_s=4.0, us=(10.0, 10.4, 11.0), timing_s=0.5),
    ]
    return replace(recorded, knobs={"A": [1, 2, 3, 4]}, default={"A": 1}, constraints=[], cells=cells)


def test_table_survives_being_written(recorded, tmp_path):
    path = table_path(tmp_path, "copy")
    write_table(path, recorded)
    assert read_table(path) == recorded
    assert path.stat().st_size < 100 << 10
    assert not list(tmp_path.glob("*.partial"))


def test_recorded_table_is_a_whole_grid(recorded):
    assert [cell.point for cell in recorded.cells] == list(recorded.space.points())
    assert all(len(cell.us) == 3 and min(cell.us) > 0 for cell in recorded.cells if cell.status == "OK")


def test_compilations_run_side_by_side_and_timings_one_after_the_other(small):
    session = Session(table=small, seed=0, until=0.0)
    session.measure([(0,), (1,), (2,)])
    # All compile at once; each is timed in the order asked for, once it is compiled: 3 + 0.5 + 0.25 + 0.125.
    assert [step.at_s for step in session.steps] == [3.5, 3.75, 3.875]
    session.measure([(3,)])
    assert session.now_s == 3.875 + 4.0 + 0.5


def test_what_is_compiled_ahead_is_not_waited_for(small):
    session = Session(table=small, seed=0, until=0.0)
    session.compile([(0,), (3,)])
    session.measure([(0,)])
    session.measure([(3,)])
    assert session.now_s == 4.0 + 0.5  # the second began at 0 and took 4 s


def test_only_the_rest_of_a_compilation_begun_ahead_is_waited_for(small):
    session = Session(table=small, seed=0, until=0.0)
    provider = TableProvider(session)
    provider.prepare([(1,), (3,)])
    assert session.now_s == 0.0  # it returns at once
    provider.measure([(1,)])
    assert session.now_s == 1.25
    provider.digests([(3,)])
    assert session.now_s == 4.0  # 2.75 s were left of its 4


def test_what_is_to_be_compiled_later_begins_then(small):
    session = Session(table=small, seed=0, until=0.0)
    session.compile([(1,)], from_s=2.0)
    session.measure([(1,)])
    assert session.now_s == 2.0 + 1.0 + 0.25


def test_more_compilations_than_workers_queue(recorded):
    session = Session(table=recorded, seed=0)
    points = [cell.point for cell in recorded.cells]
    session.wait(points)
    free = [0.0] * WORKERS
    for cell in recorded.cells:  # first come, first served
        free.sort()
        free[0] += cell.compile_s
    assert session.now_s == pytest.approx(max(free))
    assert session.now_s > sum(cell.compile_s for cell in recorded.cells) / WORKERS


def test_repeats_cost_nothing_and_failures_are_charged(small):
    session = Session(table=small, seed=0, until=0.0)
    session.measure([(2,)])
    assert session.now_s == 2.125
    assert session.reading((2,)) is None
    session.measure([(2,), (2,)])
    assert (session.now_s, len(session.steps)) == (2.125, 1)


def test_forbidden_points_are_neither_charged_nor_counted(small):
    session = Session(table=small, seed=0)
    assert session.measure([(7,)]) == [None]
    assert (session.now_s, session.steps) == (0.0, [])


def test_session_ends_with_its_budget(small):
    session = Session(table=small, seed=0, budget=2, until=0.0)
    with pytest.raises(Over):
        session.measure([(0,), (1,), (2,)])
    assert len(session.steps) == 2


def test_readings_are_recorded_medians_and_repeat_with_the_seed(recorded):
    point = recorded.cells[0].point
    seen = set()
    for seed in range(40):
        session = Session(table=recorded, seed=seed)
        session.measure([point])
        seen.add(session.reading(point))
        again = Session(table=recorded, seed=seed)
        again.measure([point])
        assert again.reading(point) == session.reading(point)
    assert seen == set(recorded.cells[0].us)


def test_score_of_a_run_by_hand(small):
    session = Session(table=small, seed=0, until=0.0)
    session.measure([(2,), (0,), (3,), (1,)])
    found = score(session, "arm", 0.0)
    # 2 + .125, then 3 + .5, then 4 + .5, then .25 more
    assert (found.evaluations_5, found.seconds_5, found.reached_5) == (3, 4.5, True)
    assert (found.evaluations_1, found.seconds_1, found.reached_1) == (4, 4.75, True)
    assert found.regret[:4] == (math.inf, 1.1, 0.04, 0.0)
    assert len(found.regret) == CURVE
    assert (found.failures, found.evaluations) == (1, 4)


def test_run_that_never_comes_near_counts_as_the_whole_budget(small):
    session = Session(table=small, seed=0, budget=50)
    session.measure([(0,)])
    found = score(session, "arm", 0.0)
    assert (found.evaluations_5, found.reached_5) == (50, False)
    assert horizon_s(small, 50) == pytest.approx(50 * (10 / 4 / WORKERS + 1.375 / 4))
    assert found.seconds_5 == pytest.approx(horizon_s(small, 50), abs=1e-3)


def test_expectation_of_random_search_agrees_with_every_order():
    cells, good, budget = 6, 2, 3
    firsts = [min(order.index(0), order.index(1)) + 1 for order in itertools.permutations(range(cells))]
    assert expected_random(cells, good) == pytest.approx(statistics.mean(firsts))
    capped = statistics.mean(min(first, budget) for first in firsts)
    assert expected_random(cells, good, budget) == pytest.approx(capped)


def test_random_sessions_meet_their_expectation(recorded):
    """The harness's own check: a wrong count of evaluations, good cells or draws would show here."""
    points, draws = [cell.point for cell in recorded.cells], []
    for seed in range(300):
        session = Session(table=recorded, seed=seed)
        try:
            for point in random.Random(seed).sample(points, len(points)):
                session.measure([point])
        except Over:
            pass
        draws.append(score(session, "random", 0.0).evaluations_5)
    exact = expected_random(len(points), good_cells(recorded, 1.05), 200)
    error = statistics.stdev(draws) / math.sqrt(len(draws))
    assert abs(statistics.mean(draws) - exact) < 4 * error


def test_ratio_is_the_geometric_mean_over_tables():
    ours = {"a": [10.0] * 5, "b": [40.0] * 5}
    theirs = {"a": [20.0] * 5, "b": [320.0] * 5}
    found = ratio_of(theirs, ours)
    assert found.estimate == pytest.approx(4.0)  # 2 and 8
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(8.0))


def test_ratio_of_equal_arms_has_one_in_its_interval():
    rng = random.Random(1)
    arms = [{name: [rng.expovariate(1 / 30) for _ in range(50)] for name in "abcdef"} for _ in range(2)]
    found = ratio_of(*arms)
    assert found.low < 1 < found.high
    assert found.high < 2


def test_halves_follow_the_kernel_file(recorded):
    assert half_of(recorded) == half_of(replace(recorded, name="another", dtype="fp16"))
    assert {half_of(replace(recorded, kernel=f"{name}.py")) for name in "abcdefgh"} == {"dev", "test"}


def test_ours_measures_config_while_the_heuristics_are_at_work(recorded):
    session = Session(table=recorded, seed=1, budget=8, until=0.0)
    ARMS[OURS].run(session)
    own = session.cells[recorded.space.locate(recorded.default)]
    first, second = session.steps[:2]
    assert (first.cell, first.at_s) == (own, own.compile_s + own.timing_s)  # not later for the heuristics' sake
    assert second.at_s >= cost_s(heuristics_of(recorded)) + second.cell.timing_s
    assert len({step.cell.point for step in session.steps}) == 8


@pytest.mark.parametrize("name", ["random", "pattern", "lfbo"])
def test_the_tuner_searches_a_recorded_table(recorded, name):
    pytest.importorskip("sklearn")
    space = recorded.space
    session = Session(table=recorded, seed=3, budget=24, until=0.0)
    strategy = strategy_of(name, Task(space=space, seed=3))
    found = tune(space, TableProvider(session), strategy, Budget(evaluations=24))
    assert found.evaluations == len(session.steps) == 24
    assert found.best in {step.cell.point for step in session.steps}
    assert {trial.status for trial in found.trials} == {Status.OK}
    cheapest = sum(step.cell.timing_s for step in session.steps)
    assert session.now_s > cheapest
