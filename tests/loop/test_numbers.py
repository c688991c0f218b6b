"""In the loop, an edit of the structure is judged with the configuration that a search found for it."""

import json
from dataclasses import replace

import pytest

from autokernel import results, wholemodel
from autokernel.history import KernelHistory
from autokernel.kernelfile import parse_kernel
from autokernel.live import PlainView
from autokernel.loading import load_file, toplevel
from autokernel.numbers import TUNER, has_knobs, is_new_structure, may_take_s, parents_trials
from autokernel.records import Baseline, Decision, PlannedOp
from autokernel.rundir import find_run
from autokernel.settings import Settings
from autokernel.state import load_state
from tests.loop.conftest import HONEST, SLOW

KNOBS = 'TUNABLES = {"WAIT": [0, 3_000, 30_000, 90_000]}\nCONFIG = {"WAIT": 30_000}\n'
WAITING = HONEST.replace("SOURCE = r", KNOBS + "SOURCE = r", 1)
WAITING = WAITING.replace(
    "double scale = 1 /", "for (volatile int i = 0; i < WAIT; ++i) {}\n        double scale = 1 /"
)
WAITING = WAITING.replace('flags=["-O2"]', 'flags=["-O2", f"-DWAIT={CONFIG[\'WAIT\']}"]')
"""Right, and as slow as its CONFIG says."""

WRONG = WAITING.replace("sum / cols + eps", "sum / cols + eps + 1")


def events(run_dir, kind):
    lines = [json.loads(line) for line in run_dir.journal_path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def finished(workdir, monkeypatch):
    """The history of rmsnorm after a run with these settings, and the run's directory."""
    model = workdir / "norms.py"
    model.write_text(model.read_text().replace("4, 512, 1024", "2, 128, 1024"))  # what waits is most of a call
    measure = wholemodel.measure
    monkeypatch.setattr(wholemodel, "measure", lambda *run: measure(*run[:-1], budget_s=1.0))

    def run(**changes):
        settings = Settings(
            model=str(workdir / "norms.py"),
            workdir=workdir,
            budget_s=900,
            ops=("rmsnorm",),
            compile_baseline=False,
            starters=workdir / "starters",
            tune_s=20.0,
        )
        orchestrate = load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")
        orchestrate.run(replace(settings, **changes), PlainView())
        found = find_run(workdir)
        return load_state(found).histories["rmsnorm"], found

    return run


def test_an_edit_is_kept_with_the_numbers_that_the_search_found(workdir, finished):
    """What computes something else is not searched, and what only changes CONFIG is not either."""
    (workdir / "starters" / "rmsnorm.py").write_text(SLOW.replace("i < 3000", "i < 30000"))
    folder = workdir / "candidates" / "rmsnorm"
    for path in folder.iterdir():
        path.unlink()
    for name, text in {"1": WRONG, "2": WAITING, "3": WAITING.replace("30_000}", "90_000}")}.items():
        (folder / f"{name}.py").write_text(text)
    history, found = finished(agent=f"replay:{workdir / 'candidates'}", max_experiments=3)
    wrong, kept, slower = history.experiments
    assert [str(each.outcome.verdict) for each in (wrong, kept, slower)] == ["FAIL", "PASS", "SCREENED"]
    assert parse_kernel(kept.proposal.kernel_py).config == {"WAIT": 0}
    assert history.incumbent == kept.proposal.kernel_py
    (tuned,) = events(found, "tuned")
    assert tuned["number"] == kept.number
    numbers = tuned["numbers"]
    assert numbers["config"] == {"WAIT": 0}
    assert numbers["best_us"] < numbers["own_us"]
    assert "WAIT" in kept.proposal.numbers
    assert kept.seconds > numbers["seconds"]
    trials = parents_trials(found, history, WAITING)
    assert {trial.point for trial in trials} == {(0,), (1,), (2,), (3,)}


def test_an_op_begins_with_a_search_over_its_starter(workdir, finished):
    (workdir / "starters" / "rmsnorm.py").write_text(WAITING)
    history, found = finished(agent="search", max_experiments=1)
    (experiment,) = history.experiments
    assert (experiment.proposal.agent, experiment.decision) == (TUNER, Decision.KEEP)
    assert parse_kernel(history.incumbent).config == {"WAIT": 0}
    assert [event["number"] for event in events(found, "tuned")] == [0]
    assert "WAIT" in load_state(found).histories["rmsnorm"].experiments[0].proposal.numbers
    (row,) = results.read_rows(workdir / "results.tsv")
    assert row.agent == TUNER
    assert row.description.startswith("numbers by search, 4 configurations: ")


def test_a_search_needs_time_and_a_new_structure():
    assert may_take_s(45.0, 8 * 3600) == 45.0
    assert may_take_s(45.0, 200.0) == 20.0
    assert may_take_s(45.0, 40.0) == 0.0
    assert may_take_s(0.0, 8 * 3600) == 0.0
    planned = PlannedOp(op="rmsnorm", cases=(), time_us=1.0, share=0.5, headroom=None, potential=1.5)
    baseline = Baseline(latencies_us={"eager": 1.0})
    history = KernelHistory(
        planned=planned, backend="cpp", device="cpu", baseline=baseline, incumbent=WAITING, incumbent_us=1.0
    )
    assert not is_new_structure(history, WAITING.replace("30_000}", "0}"))
    assert is_new_structure(history, WAITING.replace("-O2", "-O3"))
    assert has_knobs(WAITING)
    assert not has_knobs(HONEST)
    assert not has_knobs("def kernel_fn(")
