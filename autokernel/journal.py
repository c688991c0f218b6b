"""The run's journal: one JSON object a line, only ever appended, from which a run's state is rebuilt; no torch.

A line counts once its newline is on disk. What stands behind the last newline is a write that never completed (the
process was killed, the power failed): nobody was told that it had happened, so it is set aside. Any other damage stops
the run with the line number; nothing is repaired or begun anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from autokernel.errors import LogError

log = logging.getLogger(__name__)

_OWN_FIELDS = frozenset({"seq", "time_utc", "kind"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the journal. `seq` counts from 1 and is the line's number; `fields` are the writer's own."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    seq: int
    time_utc: str = ""


class Journal:
    """The journal at `path`. Reading never changes the file; the first `append` opens it for writing.

    `also` gives fields that every event has.
    """

    def __init__(self, path: Path, also: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.path, self._also = path, also
        self._fd: int | None = None
        self._size = 0  # bytes
        self._seq = 0

    def events(self) -> list[Event]:
        """Every completed event, oldest first; none when the file does not exist.

        Raises: LogError with the line number for a malformed or out-of-sequence line.
        """
        return self._parse(self._read())

    def append(self, kind: str, **fields: Any) -> None:
        """Write one event and return when it is on disk.

        Raises: LogError when it could not be written (the journal is then as it was before), or when the file is
        damaged or was changed by something else since the last append; TypeError for a field that is no JSON.
        """
        if clash := _OWN_FIELDS & fields.keys():
            raise TypeError(f"a journal event has its own {', '.join(sorted(clash))}")
        fd = self._open()
        seq = self._seq + 1
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"seq": seq, "time_utc": stamp, "kind": kind, **fields, **self._also()}
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        end = self._size + len(data)
        if (size := os.fstat(fd).st_size) != self._size:
            raise LogError(
                f"{self.path} has {size} bytes where this run left {self._size}: something else wrote to it",
                hint="let one run at a time use a run directory; `autokernel run --resume` goes on from the file",
            )
        append_whole(fd, data, self.path)
        # No call stands between the write and these two, so that Ctrl-C cannot part them.
        self._size = end
        self._seq = seq

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        """The descriptor for appending, after the whole file was checked and a torn last line set aside."""
        if self._fd is not None:
            return self._fd
        is_new = not self.path.exists()
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _unwritable(self.path, error)
        try:
            content = self._read()
            self._seq = len(self._parse(content))
            self._size = content.rfind(b"\n") + 1
            if torn := content[self._size :]:
                set_torn_aside(fd, self._size, torn, self.path.with_suffix(".torn"))
            if is_new:
                sync_directory(self.path.parent)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return fd

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise LogError(f"{self.path} cannot be read: {error.strerror}", hint="check its owner and permissions")

    def _parse(self, content: bytes) -> list[Event]:
        lines = content.split(b"\n")
        return [self._event(line, number) for number, line in enumerate(lines[:-1], start=1)]

    def _event(self, line: bytes, number: int) -> Event:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._damaged(number, f"no JSON ({error})")
        if not isinstance(record, dict):
            raise self._damaged(number, "no JSON object")
        seq, kind, time_utc = (record.pop(name, None) for name in ("seq", "kind", "time_utc"))
        if type(seq) is not int or seq != number:
            raise self._damaged(number, f"it has seq {seq!r} where {number} comes next")
        if not isinstance(kind, str) or not isinstance(time_utc, str):
            raise self._damaged(number, "kind or time_utc is missing")
        return Event(kind=kind, fields=record, seq=seq, time_utc=time_utc)

    def _damaged(self, number: int, what: str) -> LogError:
        return LogError(
            f"{self.path} is damaged at line {number}: {what}",
            hint="restore the file from a backup, or start a new run; nothing was changed",
        )


def append_whole(fd: int, data: bytes, path: Path) -> None:
    """Add `data` to the O_APPEND descriptor `fd` in one write and wait until it is on disk: all of it or nothing.

    Raises: LogError when the disk is full or fails; whatever part had been written is cut off again.
    """
    before = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        if written < len(data):  # a nearly full disk takes what it can before it says ENOSPC
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    except OSError as error:
        os.ftruncate(fd, before)
        raise _unwritable(path, error)
    except BaseException:
        os.ftruncate(fd, before)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file that a journal line will name: when this returns, all of it is on disk, also after a power loss.

    Raises: LogError when it cannot be written; the file is then as it was before.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        for folder in (path.parent, path.parent.parent):
            sync_directory(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _unwritable(path, error)


def set_torn_aside(fd: int, end: int, torn: bytes, aside: Path) -> None:
    """Add the unfinished last line `torn` to the file `aside`, then cut it off `fd` at byte `end`.

    Raises: LogError when `aside` cannot be written; the log is then untouched.
    """
    try:
        with aside.open("ab") as file:
            file.write(torn + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.ftruncate(fd, end)
        os.fsync(fd)
    except OSError as error:
        raise _unwritable(aside, error)
    log.warning("the last write before a crash was cut off after %d bytes; moved to %s", len(torn), aside)


def sync_directory(path: Path) -> None:
    """Wait until the entries of the directory at `path` are on disk, where the file system can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        log.debug("cannot sync %s: %s", path, error)  # some network file systems refuse; the file itself was synced
    finally:
        os.close(fd)


def _unwritable(path: Path, error: OSError) -> LogError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return LogError(
        f"{path} cannot be written: {error.strerror}",
        hint="free some space; what was recorded is intact, and `autokernel run --resume` goes on"
        if full
        else "check its owner and permissions, and that the file system is not read-only",
    )
