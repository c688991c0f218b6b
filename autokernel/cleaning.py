"""Find and remove runs that brought nothing: their directory, worktree, branch and the refs of rejected experiments.

Only what a run itself has made is ever removed, and only while nobody works in the directory. A branch that holds a
commit of somebody else's, or that is checked out elsewhere, keeps its run. `results.tsv` keeps its rows. No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autokernel.errors import AutokernelError, ConfigError, LogError
from autokernel.gitcall import IDENTITY, git_output, is_in_repository
from autokernel.journal import Event, Journal
from autokernel.records import Decision
from autokernel.rundir import MARKER, RunDir, holder, list_runs
from autokernel.settings import OUTSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run, what it holds in a few words, and why it stays (None: it can go)."""

    run_dir: RunDir
    holds: str
    stays: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Brought:
    """What a journal tells of a run's worth."""

    experiments: int
    kept: int
    used: tuple[str, ...]  # ops whose kernels are in the measured model, starters among them
    is_open: bool  # somebody drives it from outside and has not ended it

    @property
    def text(self) -> str:
        counts = f"{self.experiments} experiments, {self.kept or 'nothing'} kept"
        return f"{counts}; used in the model: {', '.join(self.used)}" if self.used else counts

    @property
    def worth(self) -> str | None:
        if self.kept:
            return "it holds kept experiments"
        if self.used:
            return "its kernels make the model faster"
        return "it is open, driven from outside (`autokernel finish` ends it)" if self.is_open else None


def survey(workdir: Path, names: Iterable[str] = ()) -> list[Found]:
    """Every run of the directory, or those named, with whether it can go; one that is named may hold something.

    Raises: ConfigError for a name that no run has.
    """
    runs, wanted = list_runs(workdir), set(names)
    if unknown := wanted - {run.name for run in runs}:
        there_are = ", ".join(run.name for run in runs[-10:]) or "none"
        raise ConfigError(
            f"there is no run {', '.join(sorted(unknown))} in {workdir}", hint=f"the newest runs are: {there_are}"
        )
    held = holder(workdir)
    in_repository = is_in_repository(workdir)
    found = []
    for run_dir in runs:
        if wanted and run_dir.name not in wanted:
            continue
        holds, worth = _brought(run_dir)
        stays = None if run_dir.name in wanted else worth
        if held is not None and held.run in ("", run_dir.name):
            stays = f"it is being worked on ({held})"
        found.append(
            Found(run_dir=run_dir, holds=holds, stays=stays or _foreign(workdir, run_dir, in_repository=in_repository))
        )
    return found


def _brought(run_dir: RunDir) -> tuple[str, str | None]:
    """What the run holds, and why that is worth keeping."""
    try:
        events = Journal(run_dir.journal_path).events()
    except LogError:
        return "its journal is damaged", "nobody knows what it holds (name it with --run if it can go)"
    if not events:
        return "it ended before its journal began", None
    brought = _read(events)
    return brought.text, brought.worth


def _read(events: Iterable[Event]) -> _Brought:
    experiments = kept = 0
    used: tuple[str, ...] = ()
    agent = None
    for event in events:
        if event.kind == "run-started":
            agent = event.fields["settings"]["agent"]
        elif event.kind == "run-ended":
            agent = None
        elif event.kind == "judged":
            experiments += 1
            kept += event.fields["decision"] == Decision.KEEP
        elif event.kind == "integrated":
            used = tuple(event.fields["result"]["used"])
    return _Brought(experiments=experiments, kept=kept, used=used, is_open=agent == OUTSIDE)


def _foreign(workdir: Path, run_dir: RunDir, *, in_repository: bool) -> str | None:
    """Why the run cannot go without touching what is not its own; None when it can."""
    if run_dir.path.is_symlink():
        return "its directory is a link to elsewhere"
    if not in_repository:
        return None
    where, ref = ["-C", str(workdir)], _branch_ref(run_dir)
    for path, branch in _worktrees(where):
        is_own = path == run_dir.worktree.resolve()
        if branch == ref and not is_own:
            return f"its branch is checked out in {path}"
        if is_own and branch != ref:
            return f"its worktree has {branch or 'a commit of its own choice'} checked out"
    if git_output([*where, "rev-parse", "-q", "--verify", ref], accept=(0, 1)):
        authors = set(git_output([*where, "log", "--format=%ae%n%ce", ref]).split())
        if authors - {IDENTITY["GIT_AUTHOR_EMAIL"]}:
            return "its branch holds commits that are not the run's"
    return None


def _branch_ref(run_dir: RunDir) -> str:
    return f"refs/heads/autokernel/{run_dir.name}"


def _worktrees(where: list[str]) -> list[tuple[Path, str]]:
    """Path and branch ("" for none) of every worktree that git knows."""
    found: list[tuple[Path, str]] = []
    for block in git_output([*where, "worktree", "list", "--porcelain"]).split("\n\n"):
        lines = dict(line.partition(" ")[::2] for line in block.splitlines())
        if "worktree" in lines:
            found.append((Path(lines["worktree"]).resolve(), lines.get("branch", "")))
    return found


def remove(workdir: Path, run_dir: RunDir) -> None:
    """Remove the run: worktree, branch, rejected refs, directory. The caller holds the lock and has asked `survey`.

    Raises: RepositoryError when git refuses; ConfigError when a file cannot be removed.
    """
    # A run that ended before it had a worktree has no branch; one of its name is that of a run in another directory.
    if is_in_repository(workdir) and (run_dir.worktree.exists() or run_dir.journal_path.exists()):
        where = ["-C", str(workdir)]
        if any(path == run_dir.worktree.resolve() for path, _ in _worktrees(where)):
            git_output([*where, "worktree", "remove", "--force", "--force", str(run_dir.worktree.resolve())])
        patterns = [_branch_ref(run_dir), f"refs/autokernel/rejected/{run_dir.name}/"]
        listed = git_output([*where, "for-each-ref", "--format=delete %(refname) %(objectname)", *patterns])
        if listed:  # each only as long as it points to what was listed
            git_output([*where, "update-ref", "--stdin"], stdin=f"{listed}\n".encode())
    try:
        # The marker goes last: a run that is removed in part is still a run, and can be removed again.
        for child in sorted(run_dir.path.iterdir(), key=lambda path: path.name == MARKER):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        run_dir.path.rmdir()
    except OSError as error:
        raise ConfigError(f"{run_dir.path} cannot be removed: {error}", hint="check its owner, then clean again")


def removal_error(found: Found, error: AutokernelError) -> str:
    """A line on a run that could not be removed."""
    return f"{found.run_dir.name} was not removed: {error}" + (f" ({error.hint})" if error.hint else "")
