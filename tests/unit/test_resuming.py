"""Going on with a run that was killed, moved or written to: what `open_session` makes of its directory. No torch."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from autokernel import model_worker
from autokernel.errors import IntegrityError, LogError
from autokernel.gitrepo import RunRepository
from autokernel.journal import Journal, write_whole
from autokernel.kerneltext import ShelvedText, text_digest
from autokernel.opening import open_session
from autokernel.records import Proposal
from autokernel.roofline import Ceilings
from autokernel.rundir import RunDir, create_run
from autokernel.settings import Settings
from autokernel.state import Pending, judged_json, load_state, proposed_json, started_json
from tests.unit.sample_run import SETTINGS, experiment, started

PLANNED = {
    "profile": {"wall_us": 100.0},
    "plan": {"ops": []},
    "ceilings": Ceilings(device="cpu", copy_gbps=1.0, gemm_tflops={}).to_json(),
    "notes": [],
}
TEN_THOUSAND = 10_000
LOAD_S = 2.0
"""CPU seconds in which ten thousand experiments must be read."""


class Quiet:
    """A view that says nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture
def begun(tmp_path):
    """The settings of a run that was killed after it had used 100 of its 600 seconds, and its directory."""
    workdir = tmp_path / "project"
    (workdir / "candidates").mkdir(parents=True)
    (workdir / "candidates" / "rmsnorm.py").write_text("def kernel_fn(")
    settings = Settings(
        model="model.py", workdir=workdir, budget_s=600, agent="replay:candidates", backend="cpp", sandbox="off"
    )
    return settings, begin(settings)


def begin(settings):
    """Make the directory, the branch and the journal of a run."""
    run = create_run(settings.workdir, "model", datetime.now(UTC))
    RunRepository.create(settings.workdir, run.path, run.name)
    with Journal(run.journal_path) as journal:
        journal.append("run-started", settings=settings.to_json(), version="0", elapsed_s=0.0)
        journal.append("planned", **PLANNED, elapsed_s=100.0)
    return run


def seconds_left(settings):
    with open_session(settings, Quiet(), "latest") as session:
        return session.left[1]


def test_killed_run_has_the_rest_of_its_time(begun):
    settings, run = begun
    first = seconds_left(settings)
    assert first == pytest.approx(600 - 150 - 100, abs=2)  # a quarter is kept for the end
    second = seconds_left(settings)  # killed again, without another event: no second is given back
    assert second <= first + 0.1
    assert seconds_left(replace(settings, budget_s=1200)) == pytest.approx(1200 - 300, abs=2)
    with Journal(run.journal_path) as journal:
        journal.append("run-ended", reason="stopped by the user")
    assert seconds_left(replace(settings, budget_s=1200)) == pytest.approx(1200 - 300, abs=2)


def test_clock_that_is_set_changes_no_budget(begun):
    settings, run = begun
    lines = [json.loads(line) for line in run.journal_path.read_text().splitlines()]
    for line, stamp in zip(lines, ("2031-01-01T00:00:00.000+00:00", "1999-01-01T00:00:00.000+00:00"), strict=True):
        line["time_utc"] = stamp
    run.journal_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_left(settings) == pytest.approx(600 - 150 - 100, abs=2)


def test_moved_project_goes_on_where_it_is_now(begun):
    settings, _ = begun
    there = settings.workdir.with_name("moved")
    settings.workdir.rename(there)
    with open_session(replace(settings, workdir=there), Quiet(), "latest") as session:
        assert session.settings.workdir == there
    assert not settings.workdir.exists()


def test_scratch_folders_of_dead_processes_are_removed_and_others_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        (tmp_path / ".autokernel" / f"model-worker-{owner}-x").mkdir(parents=True)
    model_worker.sweep(tmp_path)
    assert [path.name for path in (tmp_path / ".autokernel").iterdir()] == [f"model-worker-{os.getpid()}-x"]


def test_a_kernels_text_is_read_from_its_file_and_only_as_it_was_judged(tmp_path):
    text = "a = '\r\n'\n"
    path = tmp_path / "experiments" / "kernel.py"
    write_whole(path, text)
    assert path.read_bytes() == text.encode()
    shelved = ShelvedText(path=str(path), digest=text_digest(text))
    proposal = Proposal(hypothesis="an idea", kernel_py=shelved)
    assert proposal.kernel_py == text
    assert proposal == Proposal(hypothesis="an idea", kernel_py=text)
    assert replace(proposal, kernel_py=replace(shelved, revise=str.upper)).kernel_py == text.upper()
    path.write_text("something else")
    with pytest.raises(IntegrityError, match="not the text"):
        _ = proposal.kernel_py
    path.unlink()
    with pytest.raises(IntegrityError, match="gone"):
        _ = proposal.kernel_py


FULL = """
import resource, signal, sys
from pathlib import Path
from autokernel.errors import LogError
from autokernel.journal import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), "x" * 2000)
except LogError as error:
    sys.exit(f"refused: {error.hint}")
"""


def test_file_that_does_not_fit_is_as_it_was_before(tmp_path):
    path = tmp_path / "kernel.py"
    write_whole(path, "before")
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True)
    assert done.stderr.startswith("refused: free some space")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_ten_thousand_experiments_are_read_within_two_seconds(tmp_path, monkeypatch):
    run = RunDir(path=tmp_path, name="run")
    history = started()
    write_whole(run.kernel_path("rmsnorm", 0), history.incumbent)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of this test's thirty thousand lines, one by one
    with Journal(run.journal_path) as journal:
        journal.append("run-started", settings=SETTINGS.to_json(), version="0")
        begun = {"op": "rmsnorm", "digest": text_digest(history.incumbent), "history": started_json(history)}
        journal.append("op-started", **begun)
        for number in range(1, TEN_THOUSAND + 1):
            record(journal, run, number)
    begin_s = time.process_time()
    state = load_state(run)
    assert time.process_time() - begin_s < LOAD_S
    experiments = state.histories["rmsnorm"].experiments
    assert [each.number for each in experiments] == list(range(1, TEN_THOUSAND + 1))
    assert experiments[4711].proposal.kernel_py == text_of(4712)
    assert state.histories["rmsnorm"].starter == history.incumbent
    shutil.rmtree(run.experiments)


def text_of(number):
    return "x = 1  # a line of a kernel as long as most of them are\n" * 60 + str(number)


def record(journal, run, number):
    """Journal an experiment as a run does."""
    sample, text = experiment(number), text_of(number)
    path = run.kernel_path("rmsnorm", number)
    file = ShelvedText(path=str(path), digest=text_digest(text))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    proposal = Proposal(hypothesis=sample.proposal.hypothesis, kernel_py=text)
    pending = Pending(number=number, op="rmsnorm", proposal=proposal, file=file, agent_s=0.1)
    journal.append("proposed", **proposed_json(pending))
    decided = pending.decided(sample.outcome, sample.decision, sample.reason, 2.0)
    journal.append("judged", **judged_json(decided))
    journal.append("recorded", number=number, op="rmsnorm", commit=f"{number:040x}", tip="0" * 40)


def test_results_that_cannot_be_read_stop_a_run_before_it_goes_on(begun):
    settings, _ = begun
    (settings.workdir / "results.tsv").write_text("mine\n")
    with pytest.raises(LogError), open_session(settings, Quiet(), "latest"):
        pass
