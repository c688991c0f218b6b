"""What the heuristics' guesses are worth on a table: by hand, and on a recorded one."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "tuner"
sys.path.insert(0, str(FOLDER))

from guesses import guess, markdown, naive  # noqa: E402
from tables import TABLES, Cell, read_table, table_path  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

from autokernel.tuner.heuristics import Heuristics  # noqa: E402
from autokernel.tuner.kinds import Kind  # noqa: E402
from autokernel.tuner.studies import Facts  # noqa: E402


@pytest.fixture(scope="module")
def recorded():
    return read_table(table_path(TABLES, "rmsnorm_cpp"))


@pytest.fixture
def small(recorded):
    """A side and a number of warps. The best is the last; 64 x 8 does not run."""
    cells = [
        Cell(point=(0, 0), status="OK", compile_s=1.0, us=(80.0,), timing_s=0.1, shared_bytes=100),
        Cell(point=(0, 1), status="OK", compile_s=1.0, us=(40.0,), timing_s=0.1, shared_bytes=200),
        Cell(point=(1, 0), status="LAUNCH_ERROR", compile_s=1.0, shared_bytes=400),
        Cell(point=(1, 1), status="OK", compile_s=1.0, us=(20.0,), timing_s=0.1),
    ]
    knobs = {"BLOCK": [64, 128], "num_warps": [8, 16]}
    return replace(recorded, knobs=knobs, default={"BLOCK": 64, "num_warps": 8}, constraints=[], cells=cells)


class Told:
    """Heuristics that say what they are told to."""

    def __init__(self, default, seeds, shared):
        self._default, self._seeds, self._shared = default, seeds, shared

    def default(self):
        return self._default

    def seeds(self, _count):
        return self._seeds

    def estimates(self, point):
        return tuple(SimpleNamespace(shared_bytes=n) for n in self._shared.get(point, ()))


def test_guesses_are_looked_up(small):
    heuristics = Told((0, 1), [(0, 1), (1, 0)], {(0, 0): (10, 100), (0, 1): (199,), (1, 1): (5,)})
    found = guess(small, heuristics)
    assert (found.default_over_best, found.naive_over_default, found.seeds_over_best) == (2.0, 2.0, 2.0)
    assert (found.seeds, found.failures) == (2, 1)
    # The largest of a call's launches counts; the third cell was not predicted, the fourth not recorded.
    assert (found.below, found.predicted) == (1, 2)


def test_a_default_that_does_not_run_is_infinitely_slow(small):
    found = guess(small, Told((1, 0), [(1, 0), (1, 1)], {}))
    assert (found.default_over_best, found.seeds_over_best) == (math.inf, 1.0)


def test_naive_is_the_nearest_that_runs(small):
    points = [cell.point for cell in small.cells if cell.status == "OK"]
    assert naive(small, points) == (0, 0)
    assert naive(small, points[1:]) == (0, 1)


def test_what_naive_does_not_speak_of_stays_as_in_config(recorded):
    point = naive(recorded, [cell.point for cell in recorded.cells])
    chosen = recorded.space.config_at(point)
    assert (chosen["UNROLL"], chosen["ROWS"]) == (min(recorded.knobs["UNROLL"]), min(recorded.knobs["ROWS"]))
    assert chosen["STREAM"] == recorded.default["STREAM"]
    assert chosen["OPT"] == recorded.default["OPT"]


def test_recorded_table_and_its_report(recorded):
    space = recorded.space
    base = space.locate(recorded.default)
    facts = Facts(
        space=space,
        backend="cpp",
        case=WORKLOADS["rmsnorm_cpp"].case,
        device=None,
        kind=Kind.REDUCTION,
        base=base,
        shaping=(),
        studies={},
        failures={},
    )
    found = guess(recorded, Heuristics(facts))
    assert 1 <= found.seeds_over_best <= found.default_over_best < math.inf
    assert (found.failures, found.below, found.predicted) == (0, 0, 0)
    lines = markdown([found]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| rmsnorm_cpp", "| geometric mean", "| geometric mean"]
