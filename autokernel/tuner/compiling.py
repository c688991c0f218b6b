"""Compile many configurations at once on the CPU's cores, for a GPU that need not be present.

Each candidate is compiled by a fresh, confined child of a server that has imported torch and Triton once: one that
hangs, crashes or lies costs its own configuration only. What children write stays in a folder per text, where a judge
with the same folder finds it again.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autokernel import gpus, resources
from autokernel.errors import ConfigError, WorkerError
from autokernel.judge import places, wire
from autokernel.judge.forkserver import ForkServer, kill_group
from autokernel.kernelfile import parse_kernel
from autokernel.records import Case, KernelResources
from autokernel.target import KNOWN_TARGETS, Target
from autokernel.tuner.kinds import Launch, Work
from autokernel.tuner.trials import Status

BODY = "autokernel.tuner.compilechild"
DEADLINE_S = 60.0
MAX_KERNELS = 64  # of one candidate, whose resources are kept
MAX_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiler made of one kernel text.

    `status` is OK, COMPILE_ERROR, TIMEOUT, or LAUNCH_ERROR where the target could not hold one block of it. `digest`
    is equal for texts that compile to the same code and launch it alike; None where that could not be told. `ttir` is
    Triton's IR of each kernel. `compile_s` is wall time.
    """

    text: str
    status: Status
    compile_s: float
    error: str = ""
    resources: tuple[KernelResources, ...] = ()
    digest: str | None = None
    ttir: tuple[str, ...] = ()

    @property
    def hungriest(self) -> KernelResources | None:
        """The kernel that takes the most: spills first, then registers, then shared memory."""
        return max(self.resources, default=None, key=_hunger)


class Compiler:
    """Compiles kernel texts of one backend for one target and the given cases; use as a context manager.

    `target` is a name of `KNOWN_TARGETS` or a described GPU; C++ is for this machine whatever it says. `builds` is
    where compiled files stay (a temporary folder if None), `sandbox` how children are confined (`auto`, `strict` or
    `off`), `processes` how many compile at a time, the CPUs of this process if None.
    Raises: ConfigError for an unknown target or a sandbox that cannot be had.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        target: str | Target,
        *,
        builds: Path | None = None,
        processes: int | None = None,
        sandbox: str = "auto",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if isinstance(target, str) and target not in KNOWN_TARGETS:
            raise ConfigError(f"unknown target {target!r}", hint=f"known targets: {', '.join(KNOWN_TARGETS)}")
        self.target = KNOWN_TARGETS[target] if isinstance(target, str) else target
        self.cases, self.deadline_s = tuple(cases), deadline_s
        self._temporary = tempfile.TemporaryDirectory(prefix="autokernel-compile-") if builds is None else None
        self._builds = Path(self._temporary.name) if self._temporary else Path(builds or "")
        self._server = ForkServer("cpu", sandbox=sandbox, builds=self._builds, body=BODY)
        self._processes = processes or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._processes, thread_name_prefix="compile")
        self._running, self._lock = set[int](), threading.Lock()

    @property
    def arch(self) -> str:
        """The target's architecture: sm_90, gfx942."""
        return f"sm_{self.target.arch}" if self.target.vendor == "cuda" else f"gfx{self.target.arch:x}"

    def compile(self, texts: Sequence[str], *, deadline_s: float | None = None) -> list[Compiled]:
        """One answer per text, in their order; a text that fails is an answer. Raises: WorkerError."""
        return [future.result() for future in [self.start(text, deadline_s=deadline_s) for text in texts]]

    def start(self, text: str, *, deadline_s: float | None = None) -> Future[Compiled]:
        """Begin with one text, as soon as a process is free. The result raises WorkerError."""
        return self._pool.submit(self._compile, text, self.deadline_s if deadline_s is None else deadline_s)

    def study(self, texts: Sequence[str], case: Case) -> list[list[Launch] | str]:
        """The launches of each Triton kernel text for `case`, or why they are not known; no machine code is made.

        Raises: WorkerError.
        """
        share = max(1, -(-len(texts) // self._processes))
        parts = [texts[first : first + share] for first in range(0, len(texts), share)]
        return [study for part in self._pool.map(lambda part: self._study(part, case), parts) for study in part]

    def _study(self, texts: Sequence[str], case: Case) -> list[list[Launch] | str]:
        # One text may be compiled meanwhile, in the folder of its name.
        folder = places.of_text(self._builds, "\0".join(["studied", *texts]))
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"studied_{number}.py" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        request = {"command": "study", "kernels": [str(path) for path in paths], "case": case.to_json()}
        answer, _ = self._ask(request, folder, self.deadline_s)
        shutil.rmtree(folder, ignore_errors=True)
        said = answer.get("studies") if answer.get("ok") else str(answer.get("reason", ""))
        if not isinstance(said, list) or len(said) != len(texts):
            return [said[:MAX_ERROR_CHARS] if isinstance(said, str) else "not an answer"] * len(texts)
        return [_launches(study) for study in said]

    def interrupt(self) -> None:
        """Kill what is compiling now, whose result is a failure; what waits for a process goes on."""
        with self._lock:
            for pid in self._running:
                kill_group(pid)

    def close(self) -> None:
        """End the server, its children and the threads that wait for them."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._server.close()
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compile(self, text: str, deadline_s: float) -> Compiled:
        try:
            backend = parse_kernel(text).backend
        except ConfigError as error:
            return Compiled(text=text, status=Status.COMPILE_ERROR, compile_s=0.0, error=str(error))
        folder = places.of_text(self._builds, text)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.py").write_text(text)
        request = {
            "command": "compile",
            "kernel": str(folder / "kernel.py"),
            "backend": backend,
            "cases": [case.to_json() for case in self.cases],
        }
        answer, compile_s = self._ask(request, folder, deadline_s)
        return self._compiled(text, answer, compile_s)

    def _compiled(self, text: str, answer: Mapping[str, Any], compile_s: float) -> Compiled:
        if not answer.get("ok"):
            status = Status.TIMEOUT if answer.get("kind") == "timeout" else Status.COMPILE_ERROR
            error = str(answer.get("reason", "no reason given"))[:MAX_ERROR_CHARS]
            return Compiled(text=text, status=status, compile_s=compile_s, error=error)
        limits = gpus.limits(self.arch)
        kernels = tuple(resources.within(kernel, limits) for kernel in _resources(answer.get("kernels")))
        ttir, digest = answer.get("ttir"), answer.get("digest")
        unlaunchable = next(filter(None, (_refused(kernel, self.target) for kernel in kernels)), "")
        return Compiled(
            text=text,
            status=Status.LAUNCH_ERROR if unlaunchable else Status.OK,
            compile_s=compile_s,
            error=unlaunchable,
            resources=kernels,
            digest=digest if isinstance(digest, str) else None,
            ttir=tuple(map(str, ttir)) if isinstance(ttir, list) else (),
        )

    def _ask(self, request: dict[str, Any], scratch: Path, deadline_s: float) -> tuple[dict[str, Any], float]:
        """A child's answer, or one in its place that says how it failed, and its seconds. Raises: WorkerError."""
        pid, sock = self._server.spawn(scratch)
        with self._lock:
            self._running.add(pid)
        start = time.perf_counter()
        ended = ""
        try:
            sock.settimeout(deadline_s)
            wire.send(sock, {**request, "scratch": str(scratch), "target": asdict(self.target)})
            answer, _ = wire.receive(sock)
        except TimeoutError:
            answer = {"kind": "timeout", "reason": f"not compiled within {deadline_s:g} s"}
        except (EOFError, OSError):
            answer, ended = {}, "the process ended"
        except ValueError as error:
            answer = {"reason": f"the child sent what it may not: {error}"}
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._running.discard(pid)
            status, excess = self._end(pid, sock)
        if ended:
            answer = {"reason": excess or f"{ended} by itself ({_meaning(status)})"}
        if answer.get("kind") == "sandbox":
            raise WorkerError(str(answer.get("reason")), hint="run `autokernel doctor`; --sandbox off goes without one")
        return answer, seconds

    def _end(self, pid: int, sock: socket.socket) -> tuple[int | None, str]:
        """Kill a child with what it started: (its wait status, what the server had ended it for)."""
        kill_group(pid)
        sock.close()
        return self._server.reap(pid)


def _hunger(kernel: KernelResources) -> tuple[int, int, int]:
    return kernel.stack_bytes or 0, kernel.registers or 0, kernel.shared_bytes or 0


def _meaning(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit code {status}"


def _launches(study: object) -> list[Launch] | str:
    """What a child says of a kernel's launches, checked."""
    if not isinstance(study, list):
        return str(study)[:MAX_ERROR_CHARS]
    try:
        return [
            Launch(
                kernel=str(launch["kernel"]),
                warps=int(launch["warps"]),
                stages=int(launch["stages"]),
                work=Work.from_json(launch["work"]),
            )
            for launch in study[:MAX_KERNELS]
        ]
    except (TypeError, KeyError, ValueError):
        return "not an answer"


def _resources(said: object) -> list[KernelResources]:
    """What a child says of kernels, checked."""
    if not isinstance(said, list):
        return []
    kernels = []
    for row in said[:MAX_KERNELS]:
        if not isinstance(row, dict):
            continue
        numbers = {
            name: row.get(name) if type(row.get(name)) is int else None
            for name in ("registers", "stack_bytes", "shared_bytes", "threads")
        }
        kernels.append(KernelResources(kernel=str(row.get("kernel"))[:200], **numbers))
    return kernels


def _refused(kernel: KernelResources, target: Target) -> str:
    """Why no block of a kernel fits on the target; empty where one does, or it is not known."""
    if (kernel.shared_bytes or 0) > target.shared_bytes:
        return f"{kernel.kernel} takes {kernel.shared_bytes} bytes of shared memory; {target.shared_bytes} are allowed"
    if kernel.blocks_per_sm == 0:
        return f"{kernel.kernel} takes {kernel.registers} registers in each of {kernel.threads} threads: too many"
    return ""
