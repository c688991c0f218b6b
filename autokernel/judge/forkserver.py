"""A server that has imported torch once and forks a fresh child for each candidate in about 15 ms.

It runs with a scrubbed environment under `python -I`, starts no thread and touches no accelerator, so that a forked
child is as good as a new process. On a GPU a child needs half a second more for its context, so one idle child is
always kept ready. When the judge dies, its socket closes and the server takes all children with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from autokernel.errors import WorkerError
from autokernel.judge import wire
from autokernel.loading import PACKAGE_ROOT

START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 30.0
REAP_TIMEOUT_S = 5.0

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
    """The judge's handle of the server process, whose children work on `device`; use as a context manager."""

    def __init__(self, device: str = "cpu") -> None:
        ours, theirs = socket.socketpair()
        self._sock, self.device = ours, device
        self._spare: tuple[int, socket.socket] | None = None
        code = (
            f"import sys; sys.path.append({str(PACKAGE_ROOT.parent)!r}); "
            f"from autokernel.judge.forkserver import serve; serve({theirs.fileno()}, {device!r})"
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

    def spawn(self) -> tuple[int, socket.socket]:
        """A child that waits to be told its target: its process id and our end of its socket.

        Raises: WorkerError when the server cannot fork.
        """
        child = self._spare or self._fork()
        self._spare = None
        if self.device != "cpu":
            self._spare = self._fork()
        return child

    def _fork(self) -> tuple[int, socket.socket]:
        self._wait_ready()
        ours, theirs = socket.socketpair()
        setup = {"device": self.device, "memory_bytes": default_memory_bytes()}
        try:
            wire.send(self._sock, {"command": "spawn", "setup": setup}, [theirs.fileno()])
            answer = self._receive()
        finally:
            theirs.close()
        if "pid" not in answer:
            ours.close()
            raise WorkerError(f"cannot fork a child: {answer.get('error')}", hint="check memory and process limits")
        return answer["pid"], ours

    def reap(self, pid: int) -> int | None:
        """Wait status of a child that has ended (negative: killed by that signal), None if it will not end."""
        wire.send(self._sock, {"command": "reap", "pid": pid})
        status: int | None = self._receive()["status"]
        return status

    def close(self) -> None:
        """End the server and every child."""
        if self._spare is not None:
            self._spare[1].close()
        self._sock.close()
        try:
            self._process.wait(timeout=REAP_TIMEOUT_S)
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

    def _receive(self) -> dict[str, Any]:
        try:
            return wire.receive(self._sock)[0]
        except (EOFError, TimeoutError, OSError) as error:
            raise WorkerError(f"the judge's server does not answer: {error}", hint="run `autokernel doctor`") from None


def serve(fd: int, device: str) -> None:
    """Body of the server process: fork on request until the judge hangs up."""
    import autokernel.judge.child as child  # imports torch, once for all children
    import autokernel.native

    if device != "cpu":
        with contextlib.suppress(ImportError):  # CUDA C++ needs no Triton
            import triton  # noqa: F401

        import autokernel.target  # noqa: F401

    control = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    gc.collect()
    gc.freeze()  # children share these pages as long as no collection touches them
    alive: dict[int, int | None] = {}  # child -> wait status, None while it runs
    wire.send(control, {"ready": True})
    while True:
        try:
            message, fds = wire.receive(control, max_fds=1)
        except (EOFError, OSError):
            break
        if message["command"] == "spawn":
            _spawn(control, fds[0], message["setup"], alive, child)
        else:
            wire.send(control, {"status": _reap(message["pid"], alive)})
    for pid, status in alive.items():
        if status is None:
            _kill_group(pid)


def _spawn(control: socket.socket, fd: int, setup: dict[str, Any], alive: dict[int, int | None], child: Any) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        os.close(fd)
        wire.send(control, {"error": str(error)})
        return
    if pid:
        os.close(fd)
        alive[pid] = None
        wire.send(control, {"pid": pid})
        return
    try:
        control.close()
        child.main(socket.socket(fileno=fd), setup)
    finally:
        os._exit(0)  # no atexit handler, no destructor of the candidate's gets to run


def _reap(pid: int, alive: dict[int, int | None]) -> int | None:
    """Exit status of a child (negative: the signal), asked for as often as the judge likes; None if it will not end."""
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while alive.get(pid) is None and time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            alive[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.002)
    return alive.get(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def default_memory_bytes() -> int:
    """Memory a child may allocate: four fifths of the machine's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total * 4 // 5
