"""results.tsv: one row per experiment, kept or not, for people and for analysis; no torch.

The columns are the fields of `ResultRow`, in order. The file is only ever appended to, under a lock, and a file with
another header is left alone. The journal is the truth of a run; this file is made from it and read by nothing in the
loop; only who resumes a run asks it by `experiments_of` which rows are missing.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autokernel.errors import LogError
from autokernel.journal import append_whole, set_torn_aside, sync_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One experiment. What is unknown is None (text: empty) and an empty cell in the file, never a guess.

    `correctness` is the verdict; `speedup_vs_pytorch` compares with the fastest way that PyTorch itself offers, which
    `baseline` names; `speedup_low` and `speedup_high` bound `speedup_vs_incumbent` with 95 % confidence.
    """

    experiment: int
    tag: str = ""
    kernel_type: str = ""
    throughput_tflops: float | None = None
    latency_us: float | None = None
    pct_peak: float | None = None
    speedup_vs_pytorch: float | None = None
    correctness: str = ""
    peak_vram_mb: float | None = None
    description: str = ""
    run: str = ""
    op: str = ""
    case: str = ""
    dtype: str = ""
    backend: str = ""
    agent: str = ""
    device: str = ""
    decision: str = ""
    speedup_vs_incumbent: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    baseline: str = ""
    baseline_us: float | None = None
    commit: str = ""
    tokens: int | None = None
    cost_usd: float | None = None
    seconds: float | None = None
    seed: int | None = None


COLUMNS = tuple(column.name for column in fields(ResultRow))
HEADER = "\t".join(COLUMNS).encode()

_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0"}
_PLAIN = {escaped: plain for plain, escaped in _ESCAPES.items()} | {'\\"': '"'}


def append_row(path: Path, row: ResultRow) -> None:
    """Add `row` to the file at `path`, which is created with its header when there is none, and wait for the disk.

    An unfinished last line is moved to `<name>.torn` first. Several processes may append at once.
    Raises: LogError when the file has another header or cannot be written; it is then as it was before.
    """
    fd = _open_locked(path)
    try:
        content = _prepare(fd, path)
        line = "\t".join(_cell(getattr(row, name)) for name in COLUMNS).encode("utf-8", "backslashreplace")
        append_whole(fd, content + line + b"\n", path)
    finally:
        os.close(fd)


def read_rows(path: Path) -> list[ResultRow]:
    """All rows, oldest first; none when the file does not exist. An unfinished last line is no row.

    Raises: LogError for another header, or with the line number for a line that is no row.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}", hint="check its owner and permissions")
    lines = content.split(b"\n")
    if lines == [b""] or (len(lines) == 1 and HEADER.startswith(content)):
        return []
    _check_header(path, lines[0])
    rows = [_parse_row(path, line, number) for number, line in enumerate(lines[1:-1], start=2)]
    if lines[-1] and len(lines) > 1 and _is_row(path, lines[-1]):
        rows.append(_parse_row(path, lines[-1], len(lines)))
    return rows


def experiments_of(path: Path, run: str) -> set[int]:
    """Numbers of the run's experiments that the file has. Raises: LogError as `read_rows` does."""
    return {row.experiment for row in read_rows(path) if row.run == run}


def _open_locked(path: Path) -> int:
    """A descriptor for appending, locked against other writers; closing it gives the lock back."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise LogError(
                f"{path} cannot be written: {error.strerror}",
                hint="check the owner and permissions of the file and its directory",
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # An editor saves by renaming a new file over the old one; a row in the old one would be lost.
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except OSError as error:
            os.close(fd)
            raise LogError(f"{path} cannot be locked: {error.strerror}", hint="work on a file system with flock")
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _prepare(fd: int, path: Path) -> bytes:
    """What must stand before the next row: the header of a new file, a newline that an editor left off, or nothing."""
    content = _read_all(fd)
    if not content:
        sync_directory(path.parent)
        return HEADER + b"\n"
    aside = path.with_name(path.name + ".torn")
    end = content.rfind(b"\n") + 1
    if end == 0 and content != HEADER and HEADER.startswith(content):  # the very first write was cut off
        set_torn_aside(fd, 0, content, aside)
        return HEADER + b"\n"
    _check_header(path, content.partition(b"\n")[0])
    last = content[end:]
    if not last:
        return b""
    if end == 0 or _is_row(path, last):
        return b"\n"
    set_torn_aside(fd, end, last, aside)
    return b""


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    content = b""
    while chunk := os.pread(fd, size, len(content)):
        content += chunk
    return content


def _check_header(path: Path, header: bytes) -> None:
    if header == HEADER:
        return
    found = header.decode("utf-8", "replace").split("\t")
    pairs = zip(found, COLUMNS, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(COLUMNS)))
    has = repr(found[at][:60]) if at < len(found) else "missing"
    wants = repr(COLUMNS[at]) if at < len(COLUMNS) else "nothing more"
    raise LogError(
        f"{path} was written by something else: column {at + 1} of its header is {has}, expected {wants}",
        hint="move the file away or run in another directory; it was not changed",
    )


def _cell(value: object) -> str:
    """Text of one cell: six significant digits for a float, empty for unknown."""
    if value is None:
        return ""
    if isinstance(value, float):
        return format(value, ".6g") if math.isfinite(value) else ""
    text = re.sub(r"[\\\t\n\r\0]", lambda match: _ESCAPES[match[0]], str(value))
    # A cell that begins with a quote would open a quoted field for pandas and csv, and swallow the lines after it.
    return "\\" + text if text.startswith('"') else text


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: read(text) if text else None


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda match: _PLAIN.get(match[0], match[0]), text)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "str": _unescape,
    "float | None": _optional(float),
    "int | None": _optional(int),
}


def _parse_row(path: Path, line: bytes, number: int) -> ResultRow:
    cells = line.decode("utf-8", "replace").split("\t")
    if len(cells) != len(COLUMNS):
        raise _damaged(path, number, f"it has {len(cells)} columns, not {len(COLUMNS)}")
    values: dict[str, Any] = {}
    for column, cell in zip(fields(ResultRow), cells, strict=True):
        try:
            values[column.name] = _READERS[str(column.type)](cell)
        except ValueError:
            raise _damaged(path, number, f"{column.name} is {cell[:60]!r}")
    return ResultRow(**values)


def _is_row(path: Path, line: bytes) -> bool:
    try:
        _parse_row(path, line, 0)
    except LogError:
        return False
    return True


def _damaged(path: Path, number: int, what: str) -> LogError:
    return LogError(f"{path} is damaged at line {number}: {what}", hint="mend or remove the line; nothing was changed")
