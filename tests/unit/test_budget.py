"""What is left of a run's time and experiments, and what of its clock a journal keeps."""

from dataclasses import replace

import pytest

from autokernel.budget import Budget
from autokernel.journal import Event
from autokernel.kerneltext import text_digest
from autokernel.rundir import RunDir
from autokernel.state import replay, started_json
from tests.unit.sample_run import SETTINGS, started


def test_experiments_are_counted_against_their_limit():
    budget = Budget(replace(SETTINGS, max_experiments=3))
    assert budget.used_up(2) is None
    assert budget.experiments_left(2) == 1
    assert budget.used_up(3) == "3 experiments done, as asked"
    assert Budget(SETTINGS).experiments_left(100) is None


def test_time_ends_before_what_the_measurement_at_the_end_needs():
    fresh = Budget(SETTINGS)  # 300 s, of which 75 s are kept for the end
    assert fresh.time_left_s() == pytest.approx(225, abs=1)
    assert fresh.used_up(0) is None
    late = Budget(SETTINGS, already_s=220)
    assert late.used_up(0) == "the time of 5 minutes is used up"  # another experiment takes 6 s
    late.took(1.0)
    assert late.used_up(1) is None


def state(tmp_path, *events):
    run_started = ("run-started", {"settings": SETTINGS.to_json(), "sandbox": "all"})
    stamped = [
        Event(kind=kind, fields=fields, seq=number, time_utc=f"2030-01-01T00:00:0{number}Z")
        for number, (kind, fields) in enumerate([run_started, *events], start=1)
    ]
    return replay(stamped, RunDir(path=tmp_path, name="run"))


def test_journal_keeps_the_clock_and_the_starters_that_do_not_pass(tmp_path):
    skipped = ("op-skipped", {"op": "softmax", "reason": "CRASH"})
    found = state(tmp_path, skipped)
    assert found.started_utc == "2030-01-01T00:00:01Z"
    assert found.unusable == {"softmax"}
    again = state(tmp_path, skipped, ("run-started", {"settings": SETTINGS.to_json()}))
    assert again.started_utc == "2030-01-01T00:00:03Z"
    assert again.unusable == set()


def test_journal_names_the_op_that_is_worked_on_until_it_is_closed(tmp_path):
    history = started()
    path = RunDir(path=tmp_path, name="run").kernel_path("rmsnorm", 0)
    path.parent.mkdir(parents=True)
    path.write_text(history.incumbent)
    fields = {"op": "rmsnorm", "digest": text_digest(history.incumbent), "history": started_json(history)}
    begun = ("op-started", fields)
    assert state(tmp_path).current_op is None
    assert state(tmp_path, begun).current_op == "rmsnorm"
    assert state(tmp_path, begun, ("op-stopped", {"op": "rmsnorm", "reason": "enough"})).current_op is None
