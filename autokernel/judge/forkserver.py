"""A server that has imported torch once and forks a fresh child for each candidate in about 15 ms.

It runs with a scrubbed environment under `python -I`, starts no thread and touches no accelerator, so that a forked
child is as good as a new process. On a GPU a child needs half a second more for its context, and longer where several
make theirs at once, so some idle children are kept ready between candidates. When the judge dies, its socket closes and
the server takes all children with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autokernel.errors import WorkerError
from autokernel.judge import enforcement, orphans, wire
from autokernel.judge.nursery import Nursery
from autokernel.loading import PACKAGE_ROOT

if TYPE_CHECKING:
    from autokernel.target import Target

CANDIDATES = "autokernel.judge.child"
"""The body of children that run candidates."""

START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 30.0
END_TIMEOUT_S = 15.0

PASSED_VARIABLES = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "CXX", "CC", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")
PASSED_PREFIXES = ("LC_", "NVIDIA_", "ROCR_", "HIP_", "OMP_", "KMP_", "MKL_", "GOMP_", "OPENBLAS_")
"""All of the judge's environment that a child gets: what finds compilers and sets thread pools. No key can match."""


def scrubbed_environment() -> dict[str, str]:
    """The allow-listed part of this process's environment."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIXES)
    }


class ForkServer:
    """The judge's handle of the server process, whose children work on `device`; use as a context manager.

    `sandbox` is how they are confined (`auto`, `strict` or `off`), `builds` the folder in which all their scratch
    folders will lie: without it, the threads of a GPU's driver are not confined to any folder. `body` names the module
    of what they do: its `preload(device)` imports what all of them need, `main(socket, setup)` is one child's life.
    Raises: ConfigError for `strict` where this machine cannot enforce everything; WorkerError.
    """

    def __init__(
        self, device: str = "cpu", *, sandbox: str = "auto", builds: Path | None = None, body: str = CANDIDATES
    ) -> None:
        self.policy = enforcement.decide(sandbox, device, builds=builds).to_json()
        ours, theirs = socket.socketpair()
        self._sock, self.device = ours, device
        self._spares: list[tuple[int, socket.socket]] = []
        self._lock = threading.Lock()  # a question and its answer belong together
        code = (
            f"import sys; sys.path.append({str(PACKAGE_ROOT.parent)!r}); "
            f"from autokernel.judge.forkserver import serve; serve({theirs.fileno()}, {device!r}, {body!r})"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                env=scrubbed_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"cannot start the judge's server: {error}", hint="check memory and process limits")
        finally:
            theirs.close()
        self._ready = False

    def spawn(self, scratch: Path, *, compiling_for: Target | None = None) -> tuple[int, socket.socket]:
        """A child that waits to be told its target: its process id and our end of its socket.

        One that is `compiling_for` a GPU has none itself: whatever it is told to call is compiled and not run.
        The server ends it when it fills `scratch` or starts too many processes.
        Raises: WorkerError when the server cannot fork.
        """
        with self._lock:
            spare = self._spares and compiling_for is None
            child = self._spares.pop(0) if spare else self._fork(compiling_for)
            self._send({"command": "watch", "pid": child[0], "scratch": str(scratch)})
        return child

    def keep_ready(self, count: int) -> None:
        """Have `count` idle children on a GPU, whose contexts are made while nothing is timed. Raises: WorkerError."""
        with self._lock:
            while self.device != "cpu" and len(self._spares) < count:
                self._spares.append(self._fork(None))

    def _fork(self, compiling_for: Target | None) -> tuple[int, socket.socket]:
        self._wait_ready()
        ours, theirs = socket.socketpair()
        setup = {"device": self.device, "memory_bytes": default_memory_bytes(), "sandbox": self.policy}
        if compiling_for is not None:
            setup |= {"device": "cpu", "compiling_for": asdict(compiling_for)}
        try:
            self._send({"command": "spawn", "setup": setup}, [theirs.fileno()])
            answer = self._receive()
        finally:
            theirs.close()
        if "pid" not in answer:
            ours.close()
            raise WorkerError(f"cannot fork a child: {answer.get('error')}", hint="check memory and process limits")
        return answer["pid"], ours

    def reap(self, pid: int) -> tuple[int | None, str]:
        """Wait status of a child that has ended (negative: killed by that signal; None if it will not end), and what
        the server ended it for, if it did. Whatever the child has started is gone, too."""
        with self._lock:
            self._send({"command": "reap", "pid": pid})
            answer = self._receive()
        return answer["status"], answer["excess"]

    def close(self) -> None:
        """End the server and every child."""
        for _, sock in self._spares:
            sock.close()
        self._sock.close()
        try:
            self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self) -> None:
        if not self._ready:
            self._sock.settimeout(START_TIMEOUT_S)
            self._receive()
            self._ready = True
            self._sock.settimeout(REPLY_TIMEOUT_S)

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            wire.send(self._sock, message, fds)
        except OSError as error:
            raise WorkerError(f"the judge's server is gone: {error}", hint="run `autokernel doctor`") from None

    def _receive(self) -> dict[str, Any]:
        try:
            return wire.receive(self._sock)[0]
        except (EOFError, TimeoutError, OSError) as error:
            raise WorkerError(f"the judge's server does not answer: {error}", hint="run `autokernel doctor`") from None


def kill_group(pid: int) -> None:
    """Kill a child with all that it started; its group may not exist yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def serve(fd: int, device: str, body: str) -> None:
    """Body of the server process: fork on request until the judge hangs up."""
    children = importlib.import_module(body)
    children.preload(device)
    control = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    orphans.adopt()
    gc.collect()
    gc.freeze()  # children share these pages as long as no collection touches them
    nursery = Nursery(control, children.main)
    try:
        wire.send(control, {"ready": True})
        while True:
            nursery.wait_for_message()
            message, fds = wire.receive(control, max_fds=1)
            nursery.obey(message, fds)
    except (EOFError, OSError):
        pass
    nursery.end_all()
    os._exit(0)  # what was imported for the children has nothing to tidy up here


def default_memory_bytes() -> int:
    """Memory a child may allocate: four fifths of the machine's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total * 4 // 5
