"""Where a run keeps its files: `.autokernel/<run>/` in the working directory, and the lock that admits one run.

`.autokernel/.gitignore` hides all of it from the user's own repository without touching any file of hers. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autokernel.errors import ConfigError

FOLDER = ".autokernel"
MARKER = "run.json"  # names a directory as a run of ours, and says when it began
_SLUG_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """The directory of one run and the names in it; a name is there once something has written it."""

    path: Path
    name: str

    @property
    def journal_path(self) -> Path:
        """The journal, from which the run's state is rebuilt."""
        return self.path / "journal.jsonl"

    @property
    def log_path(self) -> Path:
        """Log lines of every level."""
        return self.path / "log.txt"

    @property
    def report_path(self) -> Path:
        """The report, as Markdown."""
        return self.path / "report.md"

    @property
    def page_path(self) -> Path:
        """The report, as HTML."""
        return self.path / "report.html"

    @property
    def worktree(self) -> Path:
        """The run's own git worktree."""
        return self.path / "worktree"

    @property
    def builds(self) -> Path:
        """Compiled native kernels."""
        return self.path / "builds"

    @property
    def regions(self) -> Path:
        """One directory per captured subgraph that is an op: its `reference.py` and its first kernel."""
        return self.path / "regions"

    @property
    def experiments(self) -> Path:
        """One directory per experiment."""
        return self.path / "experiments"

    def experiment_dir(self, op: str, number: int) -> Path:
        """Directory of one experiment; number 0 is the op's starter."""
        return self.experiments / f"{op}-{number:04d}"

    def kernel_path(self, op: str, number: int) -> Path:
        """The text that was judged."""
        return Path(self.path, "experiments", f"{op}-{number:04d}", "kernel.py")  # in one: a run has thousands

    def request_path(self, op: str, number: int) -> Path:
        """What the agent was asked."""
        return self.experiment_dir(op, number) / "request.md"

    def reply_path(self, op: str, number: int) -> Path:
        """What the agent answered."""
        return self.experiment_dir(op, number) / "reply.md"

    def tuning_path(self, op: str, number: int) -> Path:
        """Every configuration that the search for its numbers has measured."""
        return self.experiment_dir(op, number) / "tuning.jsonl"

    def draft_path(self, op: str) -> Path:
        """The working copy that an outside agent edits."""
        return self.path / "work" / op / "kernel.py"

    def optimized_dir(self, op: str) -> Path:
        """Directory of the op's best kernel."""
        return self.path / "optimized" / op


def create_run(workdir: Path, model_name: str, now: datetime) -> RunDir:
    """A new run directory, named after `now` and the model: `20261129-1726-llama`, with `-2` and so on when taken.

    Raises: ConfigError when the working directory cannot be written.
    """
    folder = _folder(workdir)
    slug = re.sub(r"[^a-z0-9]+", "-", model_name.lower()).strip("-")[:_SLUG_CHARS].strip("-") or "model"
    stem = f"{now:%Y%m%d-%H%M}-{slug}"
    name, count = stem, 1
    try:
        while True:
            try:
                (folder / name).mkdir()
                break
            except FileExistsError:
                count += 1
                name = f"{stem}-{count}"
        run = RunDir(path=folder / name, name=name)
        for part in (run.experiments, run.builds):
            part.mkdir()
        marker = {"run": name, "model": model_name, "created": now.astimezone(UTC).isoformat(), "count": count}
        _write_whole(run.path / MARKER, json.dumps(marker) + "\n")
    except OSError as error:
        raise _unwritable(folder, error)
    return run


def find_run(workdir: Path, name: str | None = None) -> RunDir:
    """The run called `name`; the newest one for None or "latest".

    Raises: ConfigError naming the runs that exist.
    """
    runs = list_runs(workdir)
    if not runs:
        raise ConfigError(
            f"there is no run in {workdir / FOLDER}",
            hint="start one: autokernel run model.py; or name another directory",
        )
    if name is None or name == "latest":
        begun = [run for run in runs if run.journal_path.exists()]  # a run without git, say, ends before it begins
        return (begun or runs)[-1]
    for run in runs:
        if run.name == name:
            return run
    shown = ", ".join(run.name for run in runs[-10:])
    raise ConfigError(f"there is no run {name!r} in {workdir / FOLDER}", hint=f"the newest runs are: {shown}")


def list_runs(workdir: Path) -> list[RunDir]:
    """Every run of the working directory, oldest first."""
    found: list[tuple[str, int, RunDir]] = []
    for marker_path in (workdir / FOLDER).glob(f"*/{MARKER}"):
        try:
            marker: Any = json.loads(marker_path.read_text())
            created, count = str(marker["created"]), int(marker["count"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{marker_path} cannot be read: {error}", hint="restore or remove that run's directory")
        found.append((created, count, RunDir(path=marker_path.parent, name=marker_path.parent.name)))
    return [run for _, _, run in sorted(found, key=lambda item: item[:2])]


class RunLock:
    """The held lock of a working directory; `name_run` tells others which run it is."""

    def __init__(self, fd: int, run: str) -> None:
        self._fd = fd
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self.name_run(run)

    def name_run(self, run: str) -> None:
        """Write who holds the lock into it."""
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started_utc": self._started, "run": run}
        with contextlib.suppress(OSError):  # on a full disk it is a lock all the same
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, (json.dumps(owner) + "\n").encode(), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds the lock of a working directory; `run` is empty until the run has a name."""

    run: str
    pid: int
    host: str
    started_utc: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, since {self.started_utc}"


def holder(workdir: Path) -> Holder | None:
    """Who holds the working directory's lock; None when nobody does, or when a killed run left its name in it."""
    path = workdir / FOLDER / "lock"
    try:
        raw: Any = json.loads(path.read_text())
        found = Holder(run=raw["run"], pid=raw["pid"], host=raw["host"], started_utc=raw["started_utc"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if found.host == socket.gethostname() and not Path(f"/proc/{found.pid}").exists() and Path("/proc/self").exists():
        return None  # asked first, so that a run which just begins does not find the lock taken by the next lines
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return found
    return None


_held: set[int] = set()


def _drop_in_child() -> None:
    # flock lives as long as any copy of the descriptor: a forked child that outlives us must not keep the lock.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


@contextmanager
def lock(workdir: Path, run: str = "") -> Iterator[RunLock]:
    """Hold the working directory for one run. The lock ends with its process, however that ends.

    Raises: ConfigError saying who holds it; or when the directory cannot be written or locked.
    """
    path = _folder(workdir) / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = RunLock(fd, run)
    except BlockingIOError:
        owner = os.pread(fd, 4096, 0)
        os.close(fd)
        raise _taken(path, owner)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"{path} cannot be locked: {error.strerror}", hint="work on a file system that has flock")
    _held.add(fd)
    try:
        yield held
    finally:
        if fd in _held:  # a child forked while we held it has closed its copy
            os.ftruncate(fd, 0)
            _held.discard(fd)
            os.close(fd)


def _taken(path: Path, content: bytes) -> ConfigError:
    try:
        owner: Any = json.loads(content)
        who = f"pid {owner['pid']} on {owner['host']}, since {owner['started_utc']}"
        who = f"run {owner['run']}, {who}" if owner["run"] else who
        stop = f"wait for it, end it with `kill -INT {owner['pid']}`, or work in another directory"
    except (ValueError, KeyError, TypeError):  # it is just writing its name
        who, stop = "owner unknown", "wait for it, or work in another directory"
    return ConfigError(f"another run works in {path.parent.parent} ({who})", hint=stop)


def _folder(workdir: Path) -> Path:
    """`.autokernel` of the working directory, made when missing."""
    folder = workdir / FOLDER
    try:
        if not workdir.is_dir():
            raise ConfigError(f"{workdir} is no directory", hint="create it, or name one that exists")
        folder.mkdir(exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            _write_whole(ignore, "*\n")
    except OSError as error:
        raise _unwritable(folder, error)
    return folder


def _write_whole(path: Path, text: str) -> None:
    """Write the file so that it has its whole content or does not exist."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}",
        hint="run in a directory that you can write to (its files, logs and results.tsv go there)",
    )
