"""The fork server's children: forked, watched while they live, and reaped with everything that they started.

A child may start compilers, but neither a horde of processes nor fill the disk; as no limit of the system covers both
for every user, the server looks four times a second. It looks closely only when the machine's totals have moved.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autokernel.judge import orphans, sandbox, wire
from autokernel.judge.orphans import MAX_PROCESSES
from autokernel.judge.sandbox import Policy

REAP_TIMEOUT_S = 5.0
MAX_SCRATCH_BYTES = 8 << 30
_WATCH_PERIOD_S = 0.25
_LOOK_AT_BYTES = 1 << 30  # growth of what the disk holds that makes the scratch folders worth measuring


@dataclass(slots=True)
class _Child:
    """One child: its scratch once known, its wait status once ended, and what it was ended for."""

    scratch: str | None = None
    status: int | None = None
    excess: str = ""


class Nursery:
    """All children of one server. `body` is what a child runs, given its socket and its setup."""

    def __init__(self, control: socket.socket, body: Callable[[socket.socket, dict[str, Any]], None]) -> None:
        self._control, self._body = control, body
        self._children: dict[int, _Child] = {}
        self._tasks, self._free_bytes = orphans.tasks_of_the_machine(), 0

    def wait_for_message(self) -> None:
        """Return when the judge has something to say; look after the children meanwhile."""
        while not select.select([self._control], [], [], _WATCH_PERIOD_S if self._alive() else None)[0]:
            self._look()

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        """Do what the judge asks, and answer where it waits for one."""
        if message["command"] == "spawn":
            self._spawn(fds[0], message["setup"])
        elif message["command"] == "watch":
            self._children[message["pid"]].scratch = message["scratch"]
            self._free_bytes = _free_bytes(message["scratch"])
        else:
            child = self._reap(message["pid"])
            wire.send(self._control, {"status": child.status, "excess": child.excess})

    def end_all(self) -> None:
        """Kill every child and whatever any of them started."""
        orphans.kill_trees(self._alive())
        orphans.kill_orphans(())

    def _spawn(self, fd: int, setup: dict[str, Any]) -> None:
        sandbox.prepare(Policy.from_json(setup["sandbox"]))
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            wire.send(self._control, {"error": str(error)})
            return
        if pid:
            os.close(fd)
            self._children[pid] = _Child()
            wire.send(self._control, {"pid": pid})
            return
        try:
            self._control.close()
            self._body(socket.socket(fileno=fd), setup)
        finally:
            os._exit(0)  # no atexit handler, no destructor of the candidate's gets to run

    def _reap(self, pid: int) -> _Child:
        """The child, ended with all that it started; asked for as often as the judge likes."""
        child = self._children.get(pid, _Child())
        deadline = time.monotonic() + REAP_TIMEOUT_S
        while child.status is None and pid in self._children and time.monotonic() < deadline:
            self._collect(pid, child)
            if child.status is None:
                time.sleep(0.002)
        orphans.kill_orphans(self._alive())
        return child

    def _collect(self, pid: int, child: _Child) -> None:
        with contextlib.suppress(ChildProcessError):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                child.status = os.waitstatus_to_exitcode(status)

    def _alive(self) -> list[int]:
        return [pid for pid, child in self._children.items() if child.status is None]

    def _look(self) -> None:
        """End children that take more than their share of processes or disk."""
        tasks, alive = orphans.tasks_of_the_machine(), self._alive()
        if tasks > self._tasks + MAX_PROCESSES:
            for pid, count in orphans.count_descendants(alive).items():
                if count > MAX_PROCESSES:
                    self._end(pid, f"it had started {count} processes; {MAX_PROCESSES} are allowed")
            orphans.kill_orphans(self._alive())
        else:
            self._tasks = min(self._tasks, tasks)
        for pid in alive:
            scratch = self._children[pid].scratch
            if scratch is not None and self._disk_shrinks(scratch) and (size := _size(scratch)) > MAX_SCRATCH_BYTES:
                limit = f"{MAX_SCRATCH_BYTES >> 30} GiB are allowed"
                self._end(pid, f"it had written {size / 2**30:.0f} GiB into its folder; {limit}")

    def _disk_shrinks(self, scratch: str) -> bool:
        return self._free_bytes - _free_bytes(scratch) > _LOOK_AT_BYTES

    def _end(self, pid: int, excess: str) -> None:
        self._children[pid].excess = excess
        orphans.kill_trees([pid])


def _free_bytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _size(folder: str) -> int:
    """Bytes that the files below `folder` take on the disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).lstat().st_blocks * 512
    return total
