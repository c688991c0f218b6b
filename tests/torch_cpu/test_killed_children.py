"""Children of the judge that die by SIGKILL: the system's choice counts once, a kernel's own habit is its fault."""

from pathlib import Path

import pytest

from autokernel.bench import Bench
from autokernel.errors import WorkerError
from autokernel.judge.rejected import SIGKILLED
from autokernel.loading import get_spec
from autokernel.records import PlannedOp, TimedCase, Verdict

HONEST = (Path(__file__).parents[1] / "loop" / "honest.py").read_text()
DIES = """
import os, signal
from pathlib import Path
seen = Path(__file__).with_name("seen")
if not seen.exists() or {always}:
    seen.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    spec = get_spec("rmsnorm")
    case = spec.cases[0]
    planned = PlannedOp(
        op="rmsnorm", cases=(TimedCase(case=case, calls=1),), time_us=1.0, share=0.5, headroom=None, potential=1.5
    )
    with Bench(tmp_path_factory.mktemp("builds"), "cpp", "off") as bench:
        bench.turn_to(planned)
        yield bench


def test_child_that_is_killed_once_costs_its_kernel_nothing(bench):
    outcome = bench.judge(HONEST + DIES.format(always=False), None)
    assert (outcome.verdict, outcome.reason) == (Verdict.PASS, "")


def test_kernel_whose_child_is_killed_each_time_is_told_so(bench):
    outcome = bench.judge(HONEST + DIES.format(always=True), None)
    assert outcome.verdict is Verdict.OOM
    assert SIGKILLED in outcome.reason


def test_starter_that_fails_while_pytorch_is_timed_stops_the_run_with_a_message(bench):
    with pytest.raises(WorkerError, match="could not be timed"):
        bench.baseline(HONEST + DIES.format(always=True), compiled=False)
