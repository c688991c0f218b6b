"""The real loop on a real model: profile, judge, git, results, the whole model at the end."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import autokernel
from autokernel import results, wholemodel
from autokernel.cli import main
from autokernel.live import PlainView
from autokernel.loading import load_file, toplevel
from autokernel.model import load_model
from autokernel.rundir import find_run
from autokernel.settings import Settings
from autokernel.state import load_state
from tests.loop.conftest import git

EXPECTED = [("FAIL", "REVERT"), ("CRASH", "REVERT"), ("SCREENED", "REVERT"), ("PASS", "KEEP")]
LIMIT = ["--minutes", "10"]
FLAGS = [*LIMIT, "--ops", "rmsnorm", "--agent", "replay:candidates", "--starters", "starters", "--no-compile-baseline"]
FLAGS += ["--tune", "0"]  # test_numbers.py has it


def settings(workdir, **changes):
    base = Settings(
        model=str(workdir / "norms.py"),
        workdir=workdir,
        budget_s=600,
        ops=("rmsnorm",),
        agent=f"replay:{workdir / 'candidates'}",
        compile_baseline=False,
        starters=workdir / "starters",
        tune_s=0,
    )
    return replace(base, **changes)


def command(workdir, *arguments):
    """A run in a process that minds Ctrl-C, also where that is ignored: a shell's job in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "autokernel", "run", *arguments, "--plain"],
        cwd=workdir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def assert_complete(workdir):
    """Every experiment once, in the log, in git and in the journal."""
    run = find_run(workdir)
    rows = results.read_rows(workdir / "results.tsv")
    assert [(row.experiment, row.correctness, row.decision) for row in rows] == [
        (number, *expected) for number, expected in enumerate(EXPECTED, start=1)
    ]
    history = load_state(run).histories["rmsnorm"]
    assert [experiment.decision for experiment in history.experiments] == [decision for _, decision in EXPECTED]
    assert history.incumbent == (workdir / "candidates" / "rmsnorm" / "4_fast.py").read_text()
    kept = git(workdir, "log", "--format=%s", f"autokernel/{run.name}", "--grep=^Decision: KEEP")
    assert len(kept.splitlines()) == 1
    assert kept.startswith("rmsnorm 4x512x1024 fp32: ")
    rejected = git(workdir, "for-each-ref", "--format=%(refname)", "refs/autokernel/rejected").splitlines()
    assert [ref.rsplit("/", 1)[1] for ref in sorted(rejected)] == ["1", "2", "3"]
    assert git(workdir, "show", f"autokernel/{run.name}:kernel.py") == history.incumbent.strip()
    return run


@pytest.fixture
def orchestrate():
    return load_file(toplevel("orchestrate.py"), "autokernel_orchestrate")


def measure_the_model_for(monkeypatch, seconds):
    """In runs of this process, at most so long: for a verdict that is plain, or that nobody looks at."""
    measure = wholemodel.measure
    monkeypatch.setattr(wholemodel, "measure", lambda *run: measure(*run[:-1], budget_s=min(run[-1], seconds)))


def test_run_keeps_the_faster_kernel_and_leaves_the_user_alone(workdir, orchestrate, monkeypatch, capsys):
    measure_the_model_for(monkeypatch, 20.0)
    status = git(workdir, "status", "--porcelain")
    head = git(workdir, "rev-parse", "HEAD")
    summary = orchestrate.run(settings(workdir), PlainView())
    run = assert_complete(workdir)
    assert git(workdir, "rev-parse", "HEAD") == head
    assert git(workdir, "status", "--porcelain") == f"{status}\n?? results.tsv".strip()
    assert (workdir / "notes.txt").read_text() == "not committed\n"
    assert summary.histories[0].stop_reason
    assert summary.settings.backend == "cpp"  # what "auto" stood for
    assert summary.integration is not None
    assert summary.integration["speedup"]["low"] > 1.0
    loaded = load_model(str(workdir / "norms.py"))
    with torch.no_grad():
        before = loaded.model(*loaded.args)
        applied = autokernel.apply(loaded.model, run.path)
        after = loaded.model(*loaded.args)
    assert applied.calls["rmsnorm"] == 2
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert_the_run_can_be_looked_at(workdir, run.name, monkeypatch, capsys)


def assert_the_run_can_be_looked_at(workdir, run, monkeypatch, capsys):
    """By `log`, `show`, `status`, the HTML report and `clean`, which leaves it."""
    monkeypatch.chdir(workdir)

    def said(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        return capsys.readouterr().out

    experiments = json.loads(said("log", "--json"))["experiments"]
    assert [(each["verdict"], each["decision"]) for each in experiments] == EXPECTED
    assert "+    return torch.zeros_like(x)" in said("show", "1")
    assert "PASS, KEEP: faster: " in said("show", "4", "--run", run)
    assert said("status").startswith(f"run {run}: ended: ")
    said("report", "--html", "--out", "page.html")
    page = (workdir / "page.html").read_text()
    assert page.count('id="experiment-') == len(EXPECTED)
    assert "rmsnorm: roofline, " in page
    assert str(workdir) not in page
    assert f"{run}: 4 experiments, 1 kept" in said("clean", "--yes")
    assert find_run(workdir).name == run


def test_experiments_limit_stops_the_run_and_resume_goes_on(workdir, orchestrate, monkeypatch):
    measure_the_model_for(monkeypatch, 4.0)
    second = SecondRun(workdir)
    summary = orchestrate.run(settings(workdir, max_experiments=2), second)
    second.assert_was_refused()
    assert summary.reason == "2 experiments done, as asked"
    assert len(results.read_rows(workdir / "results.tsv")) == 2
    orchestrate.run(settings(workdir), PlainView(), resume="latest")
    assert_complete(workdir)


class SecondRun(PlainView):
    """While the run that it shows is at work, another one is started in the same directory."""

    def __init__(self, workdir):
        super().__init__()
        self.workdir = workdir

    def op_started(self, history):
        super().op_started(history)
        self.process = command(self.workdir, "norms.py", *FLAGS)
        self.stderr = self.process.communicate(timeout=100)[1]

    def assert_was_refused(self):
        assert self.process.returncode == 2
        assert "Traceback" not in self.stderr
        assert "hint:" in self.stderr


def test_killed_or_interrupted_run_resumes_with_nothing_lost_or_doubled(workdir, orchestrate, monkeypatch):
    end_at(command(workdir, "norms.py", *FLAGS), workdir, ("proposed", 1), signal.SIGKILL)

    code, stdout, stderr = end_at(command(workdir, "--resume", *LIMIT), workdir, ("proposed", 4), signal.SIGINT)
    assert code == 0, stderr
    assert "rmsnorm" in stdout  # the report
    assert "Traceback" not in stderr
    run = find_run(workdir)
    assert load_state(run).ended == "stopped by the user"
    assert (run.optimized_dir("rmsnorm") / "kernel.py").is_file()

    end_at(command(workdir, "--resume", *LIMIT), workdir, ("judged", 4), signal.SIGKILL)
    measure_the_model_for(monkeypatch, 4.0)
    monkeypatch.chdir(workdir)
    orchestrate.run(settings(workdir), PlainView(), resume="latest")
    assert assert_complete(workdir).name == run.name


def end_at(process, workdir, moment, how):
    """Send `process` the signal as soon as the moment is in the journal; its exit code and its output."""
    deadline, seen = time.monotonic() + 240, False
    while time.monotonic() < deadline and process.poll() is None and not (seen := moment in events(workdir)):
        time.sleep(0.01)
    process.send_signal(how)
    output = process.communicate(timeout=200)
    assert seen, output  # an interrupt may still take the line back
    return process.returncode, *output


def events(workdir):
    """(kind, experiment) of the complete journal lines so far."""
    found = []
    for path in workdir.glob(".autokernel/*/journal.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                found.append((event["kind"], event.get("number", event.get("fields", {}).get("number"))))
    return found
