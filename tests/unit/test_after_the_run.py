"""Runs in a real repository, one that kept something and one that did not: how they are looked at while somebody works,
and what `clean` takes away and what it leaves.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sample_run import SETTINGS, experiment, rmsnorm, started
from test_report import measured, write_run

from autokernel import gitcall, recording
from autokernel.cleaning import survey
from autokernel.cli import main
from autokernel.gitrepo import RunRepository
from autokernel.journal import Journal
from autokernel.records import Decision
from autokernel.rundir import create_run, list_runs, lock
from autokernel.settings import OUTSIDE

WORK = recording.Work(flops=1, nbytes=1, case="512x384 fp32", dtype="fp32")


def git(folder, *arguments):
    """Output of a git command in `folder`, with an identity of its own."""
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=User", "-c", "user.email=user@localhost"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def autokernel(workdir, *arguments):
    """What a command prints in another process."""
    command = [sys.executable, "-m", "autokernel", *arguments]
    return subprocess.run(command, cwd=workdir, capture_output=True, text=True, timeout=60)


def committed_run(workdir, history, **changes):
    """A run of one op with its branch, worktree and rejected refs; its name."""
    run = write_run(workdir, histories=[history], **changes)
    repo = RunRepository.create(workdir, run.path, run.name)
    tip = repo.commit_kernel(history.starter, subject="starter", trailers={})
    for each in history.experiments:
        commit = recording.commit(repo, run.name, history, each, WORK, tip)
        tip = commit if each.decision is Decision.KEEP else tip
    return run.name


def fruitless():
    """Two experiments, neither kept."""
    return started().add(experiment(1)).add(experiment(2))


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """Half the time of these tests would be git's fsync, which only a power cut could check."""
    monkeypatch.setattr(gitcall, "_SETTINGS", tuple(each for each in gitcall._SETTINGS if "fsync" not in each))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A dirty repository, the name of a run in it that kept something, and that of one that did not."""
    workdir = tmp_path / "project"
    workdir.mkdir()
    (workdir / "notes.txt").write_text("committed\n")
    git(workdir, "init", "-q")
    git(workdir, "add", "-A")
    git(workdir, "commit", "-qm", "mine")
    (workdir / "notes.txt").write_text("not committed\n")
    kept = committed_run(workdir, rmsnorm())
    lost = committed_run(workdir, fruitless())
    monkeypatch.chdir(workdir)
    return workdir, kept, lost


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    return out


def why(workdir, name):
    """Why `clean` leaves the run; None when it does not."""
    return next(found.stays for found in survey(workdir) if found.run_dir.name == name)


def test_status_tells_what_a_run_is_doing_while_it_does_it(here):
    workdir, _, _ = here
    with lock(workdir):
        assert "now: profiling the model" in autokernel(workdir, "status").stdout
    run = write_run(workdir, histories=[fruitless()], ended=False)
    with lock(workdir, run.name), Journal(run.journal_path) as journal:
        closed = autokernel(workdir, "status").stdout.splitlines()
        assert closed[0].startswith(f"run {run.name}: working, pid {os.getpid()} on ")
        assert closed[2].startswith("now: rmsnorm: the agent (auto) thinks of the next experiment, for ")
        assert closed[3].startswith("2 experiments, 0 kept; ")
        assert closed[-1].startswith("last: #2 PASS REVERT, 1000.0 us, ")
        journal.append("op-stopped", op="rmsnorm", reason="5 reverts in a row")
        journal.append("exported", tip="t")
        assert "now: measuring the whole model, for " in autokernel(workdir, "status").stdout
    assert "nobody works on it" in autokernel(workdir, "watch").stdout  # which ends with the run


def test_watch_ends_with_the_run(here):
    workdir, _, _ = here
    run = write_run(workdir, histories=[fruitless()], ended=False)
    command = [sys.executable, "-m", "autokernel", "watch", "--every", "0.1"]
    with lock(workdir, run.name), Journal(run.journal_path) as journal:
        watch = subprocess.Popen(command, cwd=workdir, stdout=subprocess.PIPE, text=True)
        assert f"run {run.name}: working" in watch.stdout.readline()
        journal.append("run-ended", reason="stopped by the user")
    out, _ = watch.communicate(timeout=30)
    assert watch.returncode == 0
    assert f"run {run.name}: ended: stopped by the user" in out
    assert "\x1b" not in out


def test_clean_waits_while_a_run_is_at_work(here):
    workdir, kept, lost = here
    with lock(workdir, kept):
        done = autokernel(workdir, "clean", "--run", kept, "--yes")
        assert "it is being worked on" in done.stdout
        assert "nothing to remove" in done.stdout
        refused = autokernel(workdir, "clean", "--yes")
    assert refused.returncode == 2
    assert "another run works in" in refused.stderr
    assert {run.name for run in list_runs(workdir)} == {kept, lost}


def test_clean_leaves_runs_that_are_worth_something(here):
    workdir, kept, lost = here
    used = committed_run(workdir, fruitless(), integration=measured())
    driven = committed_run(workdir, fruitless(), settings=replace(SETTINGS, agent=OUTSIDE), ended=False)
    damaged = committed_run(workdir, fruitless())
    (workdir / ".autokernel" / damaged / "journal.jsonl").write_text("garbage\n")
    assert why(workdir, kept) == "it holds kept experiments"
    assert why(workdir, used) == "its kernels make the model faster"
    assert why(workdir, driven).startswith("it is open, driven from outside")
    assert why(workdir, damaged).startswith("nobody knows what it holds")
    assert why(workdir, lost) is None


def test_a_directory_that_is_a_link_stays(here, tmp_path):
    workdir, _, lost = here
    (workdir / ".autokernel" / lost).rename(tmp_path / "elsewhere")
    (workdir / ".autokernel" / lost).symlink_to(tmp_path / "elsewhere")
    assert why(workdir, lost) == "its directory is a link to elsewhere"


def test_a_run_of_the_same_name_in_another_directory_is_left_alone(here, monkeypatch, capsys):
    workdir, kept, _ = here
    twin = workdir / "elsewhere"
    twin.mkdir()
    git(workdir, "worktree", "remove", "--force", str(workdir / ".autokernel" / kept / "worktree"))
    begun = create_run(twin, "llama", datetime(2030, 1, 2, 3, 4, tzinfo=UTC))
    assert begun.name == kept  # its branch exists already: the run ended there
    before = refs(workdir)
    monkeypatch.chdir(twin)
    assert f"{kept}: it ended before its journal began; can go" in said(capsys, "clean", "--yes")
    assert list_runs(twin) == []
    assert refs(workdir) == before


def test_clean_without_a_repository_of_the_users(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lost = committed_run(tmp_path, fruitless())
    assert (tmp_path / ".autokernel" / lost / "worktree" / ".git").is_dir()
    assert f"{lost} removed" in said(capsys, "clean", "--yes")
    assert list_runs(tmp_path) == []


def refs(workdir):
    return set(git(workdir, "for-each-ref", "--format=%(refname)").splitlines())


def test_clean_asks_for_nothing_and_removes_nothing_by_itself(here, capsys):
    workdir, kept, lost = here
    before = refs(workdir)
    text = said(capsys, "clean")
    assert f"{lost}: 2 experiments, nothing kept; can go" in text
    assert f"{kept}: 5 experiments, 2 kept" in text
    assert "nothing was removed; --yes" in text
    assert refs(workdir) == before
    assert len(list_runs(workdir)) == 2


def test_clean_leaves_a_run_that_others_hold_something_of(here):
    workdir, _, lost = here
    branch = f"refs/heads/autokernel/{lost}"

    assert why(workdir, lost) is None
    with lock(workdir, lost):
        assert "it is being worked on" in why(workdir, lost)
    tip = git(workdir, "rev-parse", branch)
    mine = git(workdir, "commit-tree", f"{tip}^{{tree}}", "-p", tip, "-m", "mine")
    git(workdir, "update-ref", branch, mine)
    assert why(workdir, lost) == "its branch holds commits that are not the run's"
    git(workdir, "update-ref", branch, tip)
    git(workdir, "worktree", "add", "-q", "--force", "../elsewhere", f"autokernel/{lost}")
    assert "its branch is checked out in" in why(workdir, lost)
    git(workdir, "worktree", "remove", "--force", "../elsewhere")
    worktree = workdir / ".autokernel" / lost / "worktree"
    git(worktree, "checkout", "-q", "--detach")
    assert "its worktree has" in why(workdir, lost)
    git(worktree, "checkout", "-q", f"autokernel/{lost}")
    assert why(workdir, lost) is None


def test_clean_takes_the_run_that_kept_nothing_and_nothing_else(here, capsys):
    workdir, kept, lost = here
    git(workdir, "branch", "autokernel/mine")
    git(workdir, "branch", f"autokernel/{lost}-mine")
    git(workdir, "update-ref", f"refs/autokernel/rejected/{lost}-mine/1", "HEAD")
    (workdir / "results.tsv").write_text("rows of every run\n")
    status, before = git(workdir, "status", "--porcelain"), refs(workdir)
    assert f"{lost} removed" in said(capsys, "clean", "--yes")
    gone = {f"refs/heads/autokernel/{lost}", *(f"refs/autokernel/rejected/{lost}/{number}" for number in (1, 2))}
    assert gone <= before
    assert refs(workdir) == before - gone
    assert [run.name for run in list_runs(workdir)] == [kept]
    assert not (workdir / ".autokernel" / lost).exists()
    assert lost not in git(workdir, "worktree", "list")
    assert git(workdir, "status", "--porcelain") == status
    assert (workdir / "results.tsv").read_text() == "rows of every run\n"
    assert "nothing to remove" in said(capsys, "clean", "--yes")


def test_a_run_that_kept_something_goes_only_by_its_name(here, capsys):
    workdir, kept, _ = here
    said(capsys, "clean", "--yes")
    assert f"refs/heads/autokernel/{kept}" in refs(workdir)
    assert f"{kept} removed" in said(capsys, "clean", "--run", kept, "--yes")
    assert list_runs(workdir) == []
    assert not any(kept in ref for ref in refs(workdir))
    assert git(workdir, "status", "--porcelain")  # the user's own change is still there
    assert (workdir / "notes.txt").read_text() == "not committed\n"


def test_a_run_that_cannot_begin_is_told_to_the_notified_program(here):
    workdir, _, _ = here
    (workdir / "results.tsv").write_text("somebody\telse\n")
    code = "import pathlib, sys; pathlib.Path('told.json').write_text(sys.stdin.read())"
    done = autokernel(workdir, "run", "model.py", "--plain", "--notify", shlex.join([sys.executable, "-c", code]))
    assert done.returncode == 8, done.stderr
    told = json.loads((workdir / "told.json").read_text())
    assert (told["event"], told["exit_code"]) == ("stopped", 8)
    assert "results.tsv was written by something else" in told["reason"]
