"""Processes that a candidate left behind: found wherever they hid in the process tree, and killed.

The fork server becomes a subreaper, so that a process whose parent ends becomes its child, whatever session or group it
made for itself. All of it is Linux's; elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

MAX_PROCESSES = 512
"""Of one child: many times what a compiler on all cores starts."""

_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_LIMIT_S = 10.0


def adopt() -> bool:
    """Become the parent of all orphans among this process's descendants; whether the system does that."""
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def kill_orphans(known: Collection[int]) -> None:
    """Kill the children of this process that are not `known`, with all their descendants, until none is left."""
    deadline = time.monotonic() + _SWEEP_LIMIT_S
    while (orphans := set(_children()) - set(known)) and time.monotonic() < deadline:
        kill_trees(orphans)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def kill_trees(roots: Iterable[int]) -> None:
    """SIGKILL to `roots` and to all their descendants, by group where that cannot hit another: a fork in a group that
    is being killed fails, so a fork bomb cannot outrun it."""
    parents, groups = _process_table()
    doomed = _descendants(set(roots), parents)
    spared = {group for pid, group in groups.items() if pid not in doomed}
    for group in {groups[pid] for pid in doomed if pid in groups} - spared:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def count_descendants(roots: Iterable[int]) -> dict[int, int]:
    """Processes below each of `roots`."""
    parents, _ = _process_table()
    return {root: len(_descendants({root}, parents)) - 1 for root in roots}


def tasks_of_the_machine() -> int:
    """Processes and threads of the whole machine, by one small file; 0 where there is none."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def _children() -> list[int]:
    """This process's children: by the kernel's own list where it keeps one, else from the table of all."""
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()]
    except OSError:
        parents, _ = _process_table()
        return [pid for pid, parent in parents.items() if parent == own]


def _process_table() -> tuple[dict[int, int], dict[int, int]]:
    """(pid -> parent, pid -> process group) of every process that is not dead already."""
    parents: dict[int, int] = {}
    groups: dict[int, int] = {}
    try:
        names = os.listdir("/proc")  # noqa: PTH208
    except OSError:
        return parents, groups
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command in parentheses may itself contain any character.
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents[int(name)], groups[int(name)] = int(fields[1]), int(fields[2])
    return parents, groups


def _descendants(roots: set[int], parents: dict[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = set(roots), list(roots)
    while waiting:
        fresh = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found.update(fresh)
        waiting += fresh
    return found
