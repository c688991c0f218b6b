"""The run's branch: what it records, and that nothing of the user's is touched, run or needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

import pytest

from autokernel import gitcall
from autokernel.errors import RepositoryError
from autokernel.gitrepo import RunRepository

RUN = "20261129-1726-llama"
REJECTED = f"refs/autokernel/rejected/{RUN}"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch, tmp_path):
    """No identity, no configuration of this machine's, and no refreshing of the index by `git status`."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    # Half the time of these tests would be git's fsync, which only a power cut could check.
    monkeypatch.setattr(gitcall, "_SETTINGS", tuple(each for each in gitcall._SETTINGS if "fsync" not in each))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_OPTIONAL_LOCKS", "0")


def git(where, *arguments):
    who = ["-c", "user.name=User", "-c", "user.email=user@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", "-C", str(where), *who, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def new_repository(path, *, commits=1):
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    for number in range(commits):
        (path / "model.py").write_text(f"version = {number}\n")
        (path / "kernel.py").write_text("the user's own file of that name\n")
        git(path, "add", ".")
        git(path, "commit", "-q", "-m", f"commit {number}")
    return path


def run_dir(workdir):
    folder = workdir / ".autokernel" / RUN
    folder.mkdir(parents=True, exist_ok=True)
    (workdir / ".autokernel" / ".gitignore").write_text("*\n")
    return folder


def start(workdir):
    return RunRepository.create(workdir, run_dir(workdir), RUN)


def trailers(number, verdict="PASS"):
    return {"Experiment": f"{RUN}/{number}", "Verdict": verdict}


OURS = (".autokernel/", "/worktrees/worktree/", "/objects/", "heads/autokernel/", "refs/autokernel/")


def snapshot(folder):
    """Every file of the user's below `folder` with its hash: checkout, index, HEAD, refs, config, stash, logs."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = f"/{path.relative_to(folder)}"
        if path.is_file() and not any(part in name for part in OURS):
            found[name] = (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode, path.stat().st_mtime_ns)
    return found


def live_through_a_run(workdir):
    """Everything that a run does, over a restart; returns the repository."""
    repository = start(workdir)
    first = repository.commit_kernel("x = 1\n", subject="starter", trailers=trailers(0))
    kept = repository.commit_kernel("x = 2\n", subject="faster", trailers=trailers(1))
    lost = repository.commit_kernel("x = 3\n", subject="slower", trailers=trailers(2, "FAIL"))
    repository.reject(lost, number=2, back_to=kept)
    repository = RunRepository.open(workdir, run_dir(workdir), RUN)
    repository.restore(kept)
    repository.commit_files({"optimized/rmsnorm.py": "x = 2\n"}, "rmsnorm: done", {"Op": "rmsnorm"})
    assert git(repository.root, "log", "--format=%s", repository.branch).split("\n") == [
        "rmsnorm: done",
        "faster",
        "starter",
        f"autokernel run {RUN}",
    ]
    assert git(repository.root, "rev-parse", f"{REJECTED}/2") == lost
    assert git(repository.root, "show", f"{first}:kernel.py") == "x = 1"
    assert git(repository.root, "status", "--porcelain") == ""
    return repository


def plain(tmp_path):
    return new_repository(tmp_path / "user", commits=2)


def subfolder(tmp_path):
    folder = plain(tmp_path) / "deep" / "er"
    folder.mkdir(parents=True)
    return folder


def dirty(tmp_path):
    user = plain(tmp_path)
    (user / "stashed.py").write_text("stash me\n")
    git(user, "add", "stashed.py")
    git(user, "stash", "-q")
    (user / "staged.py").write_text("staged\n")
    git(user, "add", "staged.py")
    (user / "model.py").write_text("edited, not staged\n")
    (user / "untracked.py").write_text("untracked\n")
    return user


def merging(tmp_path):
    user = plain(tmp_path)
    git(user, "checkout", "-q", "-b", "other", "HEAD~1")
    (user / "model.py").write_text("conflict\n")
    git(user, "commit", "-q", "-am", "other")
    merge = subprocess.run(["git", "-C", str(user), "merge", "main"], capture_output=True, env=os.environ | IDENTITY)
    assert merge.returncode == 1
    assert (user / ".git" / "MERGE_HEAD").exists()
    return user


IDENTITY = {f"GIT_{who}_{what}": "u@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def detached(tmp_path):
    user = plain(tmp_path)
    git(user, "checkout", "-q", "--detach", "HEAD~1")
    return user


def unborn(tmp_path):
    return new_repository(tmp_path / "user", commits=0)


def bare(tmp_path):
    git(tmp_path, "clone", "-q", "--bare", str(plain(tmp_path)), str(tmp_path / "bare.git"))
    return tmp_path / "bare.git"


def submodule(tmp_path):
    new_repository(tmp_path / "library")
    git(plain(tmp_path), "submodule", "add", "-q", str(tmp_path / "library"), "sub")
    return tmp_path / "user" / "sub"


def linked_worktree(tmp_path):
    git(plain(tmp_path), "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    return tmp_path / "side"


def packed(tmp_path):
    user = plain(tmp_path)
    git(user, "pack-refs", "--all")
    git(user, "gc", "-q")
    return user


SHAPES = [plain, subfolder, dirty, merging, detached, unborn, bare, submodule, linked_worktree, packed]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_users_repository_stays_byte_identical(tmp_path, shape):
    workdir = shape(tmp_path)
    before = snapshot(tmp_path)
    status = None if shape is bare else git(workdir, "status", "--porcelain")
    repository = live_through_a_run(workdir)
    assert snapshot(tmp_path) == before
    if shape is not bare:
        assert git(workdir, "status", "--porcelain") == status
    base = git(repository.root, "log", "--format=%(trailers:key=Base,valueonly)", "--max-parents=0", repository.branch)
    assert base == ("none" if shape is unborn else git(workdir, "rev-parse", "HEAD"))
    assert git(workdir, "rev-parse", repository.branch) == repository.head()


def test_working_directory_outside_any_repository_gets_its_own(tmp_path):
    workdir = tmp_path / "plain"
    workdir.mkdir()
    before = snapshot(tmp_path)
    repository = live_through_a_run(workdir)
    assert snapshot(tmp_path) == before
    assert git(repository.root, "rev-parse", "--abbrev-ref", "HEAD") == f"autokernel/{RUN}"
    assert (repository.root / ".git").is_dir()


def test_nothing_of_the_users_configuration_runs_or_changes_a_byte(tmp_path):
    user = plain(tmp_path)
    marker = tmp_path / "ran"
    touch = tmp_path / "touch.sh"
    touch.write_text(f"#!/bin/sh\necho $0 >> {marker}\ncat\n")
    touch.chmod(0o755)
    hooks = user / ".git" / "hooks"
    for name in (
        "pre-commit",
        "commit-msg",
        "post-commit",
        "post-checkout",
        "reference-transaction",
        "post-index-change",
    ):
        shutil.copy(touch, hooks / name)
    (user / ".git" / "info" / "attributes").write_text("*.py text eol=crlf ident filter=evil\n")
    for key, value in {
        "filter.evil.clean": str(touch),
        "filter.evil.smudge": str(touch),
        "filter.evil.required": "true",
        "core.fsmonitor": str(touch),
        "core.autocrlf": "true",
        "core.safecrlf": "true",
        "core.sparseCheckout": "true",
        "commit.gpgSign": "true",
        "gpg.program": str(touch),
        "user.useConfigOnly": "true",
        "i18n.commitEncoding": "latin1",
        "core.commentChar": "a",
    }.items():
        git(user, "config", key, value)
    marker.unlink(missing_ok=True)
    repository = start(user)
    text = "# $Id$ é\r\nx = 1\ny = 2 \n\n"
    commit = repository.commit_kernel(text, subject="a é", trailers=trailers(1))
    other = repository.commit_kernel("x = 2\n", subject="b", trailers=trailers(2))
    repository.reject(other, number=2, back_to=commit)
    assert (repository.root / "kernel.py").read_bytes() == text.encode()
    assert not marker.exists()
    raw = subprocess.run(["git", "-C", str(user), "cat-file", "commit", commit], capture_output=True, check=True).stdout
    assert b"\na \xc3\xa9\n" in raw
    assert b"gpgsig" not in raw
    assert b"\nauthor AutoKernel <autokernel@localhost> " in b"\n" + raw
    assert b"\ncommitter AutoKernel <autokernel@localhost> " in raw


def test_callers_git_variables_do_not_leak_in(tmp_path, monkeypatch):
    other = new_repository(tmp_path / "other")
    user = plain(tmp_path)
    before = snapshot(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other / ".git" / "objects"))
    monkeypatch.setenv("GIT_NAMESPACE", "elsewhere")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    repository = start(user)
    commit = repository.commit_kernel("x = 1\n", subject="s", trailers=trailers(1))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE"):
        monkeypatch.delenv(name)
    assert snapshot(other) == before
    assert git(user, "log", "-1", "--format=%H %an", repository.branch) == f"{commit} AutoKernel"


def test_a_commit_holds_exactly_the_kernel_and_its_message(tmp_path):
    repository = start(plain(tmp_path))
    (repository.root / "stray.py").write_text("left by something\n")
    subject = "rmsnorm 8192x8192 bf16: 71.2 -> 63.0 us (1.13x):\nvectorized loads"
    body = "Idea.\n\nExperiment: forged/9\n# no comment\n"
    commit = repository.commit_kernel("x = 1\n", subject=subject, body=body, trailers=trailers(1) | {"Note": "a\nb"})
    assert git(repository.root, "show", "--name-only", "--format=", commit) == "kernel.py"
    assert git(repository.root, "log", "-1", "--format=%s", commit) == subject.replace("\n", " ")
    assert "# no comment" in git(repository.root, "log", "-1", "--format=%b", commit)
    parsed = git(repository.root, "log", "-1", "--format=%(trailers:unfold)", commit)
    assert parsed.split("\n") == [f"Experiment: {RUN}/1", "Verdict: PASS", "Note: a b"]
    with pytest.raises(RepositoryError, match="trailer"):
        repository.commit_kernel("x = 1\n", subject="s", trailers={"No colon: here": "x"})


def test_the_same_text_again_is_another_commit(tmp_path):
    repository = start(plain(tmp_path))
    first = repository.commit_kernel("x = 1\n", subject="same", trailers=trailers(1))
    second = repository.commit_kernel("x = 1\n", subject="same", trailers=trailers(2))
    assert first != second
    assert git(repository.root, "rev-parse", f"{second}^") == first


def test_files_that_the_branch_has_are_not_committed_again(tmp_path):
    repository = start(plain(tmp_path))
    first = repository.first_commit()
    assert first == repository.head()
    files = {"optimized/rmsnorm.py": "x = 1\n", "optimized/softmax.py": "y = 1\n"}
    commit = repository.commit_files(files, "best", trailers(1))
    assert repository.commit_files(files, "best", trailers(1)) == commit
    assert repository.commit_files({"optimized/rmsnorm.py": "x = 1\n"}, "best", trailers(1)) == commit
    changed = repository.commit_files({**files, "optimized/softmax.py": "y = 2\n"}, "best", trailers(1))
    assert git(repository.root, "rev-list", "--count", f"{first}..{changed}") == "2"
    assert repository.first_commit() == first


def test_reject_resets_the_worktree_and_keeps_the_commit(tmp_path):
    repository = start(plain(tmp_path))
    kept = repository.commit_kernel("x = 1\n", subject="kept", trailers=trailers(1))
    lost = repository.commit_files({"kernel.py": "x = 2\n", "extra/new.py": "y\n"}, "lost", trailers(2))
    repository.reject(lost, number=2, back_to=kept)
    assert repository.head() == kept
    assert (repository.root / "kernel.py").read_text() == "x = 1\n"
    assert not (repository.root / "extra").exists()
    git(repository.root, "reflog", "expire", "--expire=now", "--all")
    git(repository.root, "gc", "-q", "--prune=now")
    assert git(repository.root, "show", f"{REJECTED}/2:kernel.py") == "x = 2"


def test_experiments_are_found_on_the_branch_and_among_the_rejected(tmp_path):
    repository = start(plain(tmp_path))
    commits = {}
    for number in range(1, 13):
        body = f"Experiment: {RUN}/99"
        commits[number] = repository.commit_kernel(str(number), subject="s", body=body, trailers=trailers(number))
        if number % 2:
            repository.reject(commits[number], number=number, back_to=commits.get(number - 1, commits[number]))
    assert {number: repository.find_experiment(number) for number in commits} == commits
    assert repository.find_experiment(99) is None
    assert repository.find_experiment(0) is None


def test_restore_goes_back_to_the_recorded_commit_after_a_crash(tmp_path):
    user = plain(tmp_path)
    repository = start(user)
    kept = repository.commit_kernel("x = 1\n", subject="kept", trailers=trailers(1))
    repository.commit_kernel("x = 2\n", subject="not yet decided", trailers=trailers(2))
    (repository.root / "kernel.py").write_text("half writ")
    git_dir = git(repository.root, "rev-parse", "--absolute-git-dir")
    stale = [f"{git_dir}/index.lock", f"{git_dir}/HEAD.lock", str(user / f".git/refs/heads/autokernel/{RUN}.lock")]
    (user / ".git" / REJECTED).mkdir(parents=True)
    stale.append(str(user / f".git/{REJECTED}/2.lock"))
    for name in stale:
        with open(name, "w") as file:  # noqa: PTH123 - what a killed git leaves
            file.write("")
    again = RunRepository.open(user, run_dir(user), RUN)
    again.restore(kept)
    assert again.head() == kept
    assert (again.root / "kernel.py").read_text() == "x = 1\n"
    lost = again.commit_kernel("x = 3\n", subject="goes on", trailers=trailers(2))
    assert lost == again.head()
    again.reject(lost, number=2, back_to=kept)
    assert git(user, "rev-parse", f"{REJECTED}/2") == lost
    with pytest.raises(RepositoryError, match="does not exist"):
        again.restore("0" * 39 + "1")


def test_commit_on_the_branch_by_somebody_else_stops_the_run(tmp_path):
    user = plain(tmp_path)
    repository = start(user)
    ours = repository.commit_kernel("x = 1\n", subject="ours", trailers=trailers(1))
    theirs = git(user, "commit-tree", f"{ours}^{{tree}}", "-p", ours, "-m", "theirs")
    git(user, "update-ref", f"refs/heads/{repository.branch}", theirs)
    with pytest.raises(RepositoryError, match="did not move") as caught:
        repository.commit_kernel("x = 2\n", subject="ours too", trailers=trailers(2))
    assert "--resume" in caught.value.hint
    assert repository.head() == theirs


def test_lost_worktree_is_made_again_and_a_moved_project_is_found(tmp_path):
    user = plain(tmp_path)
    repository = start(user)
    kept = repository.commit_kernel("x = 1\n", subject="kept", trailers=trailers(1))
    shutil.rmtree(repository.root)
    again = RunRepository.open(user, run_dir(user), RUN)
    again.restore(kept)
    assert (again.root / "kernel.py").read_text() == "x = 1\n"
    moved = user.rename(tmp_path / "moved")
    third = RunRepository.open(moved, run_dir(moved), RUN)
    third.restore(kept)
    assert third.commit_kernel("x = 2\n", subject="on", trailers=trailers(2)) == git(moved, "rev-parse", third.branch)


def test_worktree_without_its_git_link_never_falls_back_on_the_users_repository(tmp_path):
    user = plain(tmp_path)
    repository = start(user)
    before = snapshot(user)
    (repository.root / ".git").unlink()
    with pytest.raises(RepositoryError):
        repository.commit_kernel("x = 1\n", subject="s", trailers=trailers(1))
    with pytest.raises(RepositoryError):
        repository.restore(git(user, "rev-parse", "HEAD"))
    assert snapshot(user) == before


def test_existing_branch_is_refused_and_left_alone(tmp_path):
    user = plain(tmp_path)
    git(user, "branch", f"autokernel/{RUN}")
    before = git(user, "for-each-ref")
    with pytest.raises(RepositoryError, match="exists already") as caught:
        start(user)
    assert "--resume" in caught.value.hint
    assert git(user, "for-each-ref") == before


def test_branch_called_autokernel_is_an_error_in_words_and_leaves_nothing_behind(tmp_path):
    user = plain(tmp_path)
    git(user, "branch", "autokernel")
    before = git(user, "for-each-ref")
    with pytest.raises(RepositoryError, match="refs/heads/autokernel"):
        start(user)
    assert git(user, "for-each-ref") == before


def test_branch_is_not_left_behind_when_the_worktree_cannot_be_made(tmp_path):
    user = plain(tmp_path)
    (run_dir(user) / "worktree").mkdir()
    (run_dir(user) / "worktree" / "file").write_text("in the way")
    with pytest.raises(RepositoryError):
        start(user)
    assert git(user, "for-each-ref", "refs/heads/autokernel") == ""


def test_open_without_the_branch_is_an_error_with_the_next_step(tmp_path):
    user = plain(tmp_path)
    for workdir in (user, tmp_path):
        with pytest.raises(RepositoryError) as caught:
            RunRepository.open(workdir, run_dir(workdir), RUN)
        assert "start a new run" in caught.value.hint


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".git/config", "a/.GIT/x"])
def test_path_outside_the_worktree_is_refused(tmp_path, name):
    repository = RunRepository(root=tmp_path, run=RUN)
    with pytest.raises(RepositoryError, match="worktree"):
        repository.commit_files({name: "x"}, "s", {})


def test_relative_working_directory_works(tmp_path, monkeypatch):
    user = plain(tmp_path)
    monkeypatch.chdir(user)
    folder = run_dir(user).relative_to(user)
    repository = RunRepository.create(user.relative_to(user), folder, RUN)
    repository.commit_kernel("x = 1\n", subject="s", trailers=trailers(1))
    assert (user / folder / "worktree" / "kernel.py").read_text() == "x = 1\n"


NO_GIT = """
import sys
from pathlib import Path
import autokernel.gitrepo
from autokernel import gitcall
from autokernel.errors import RepositoryError
assert "git" not in sys.modules and "torch" not in sys.modules
try:
    autokernel.gitrepo.RunRepository.create(Path(sys.argv[1]), Path(sys.argv[1]) / "run", "r")
except RepositoryError as error:
    print(error, "|", error.hint)
"""


def test_missing_git_is_an_error_that_says_how_to_install_it(tmp_path):
    program = [sys.executable, "-c", NO_GIT, str(tmp_path)]
    environment = os.environ | {"PATH": str(tmp_path)}
    said = subprocess.run(program, capture_output=True, text=True, check=True, env=environment).stdout
    assert "git was not found" in said
    assert "install git" in said
