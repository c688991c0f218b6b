"""What runs in a candidate's process: load one callable, then call or time it as the judge asks.

Nothing here is trusted by the judge. Expected values, tolerances and verdicts never enter this process, and what it
reports is checked against the judge's own clock and memory.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autokernel.judge import wire
from autokernel.spec import DTYPE_NAMES

MAX_REASON_CHARS = 4000
MAX_FILE_BYTES = 1 << 30
_M_PERTURB = -6  # glibc's mallopt parameter: fill fresh memory with ~byte and freed memory with byte
_PR_SET_PDEATHSIG = 1

Kernel = Callable[..., Any]


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Enter the sandbox, load the target, then serve the judge until it hangs up."""
    _confine(Path(setup["scratch"]), setup["memory_bytes"])
    torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    session = _Session(sock)
    try:
        session.kernel = load_target(setup["target"])
    except BaseException as error:
        wire.send(sock, _failure(error))
        return
    wire.send(sock, {"ok": True})
    while True:
        try:
            message, fds = wire.receive(sock, max_fds=1)
        except EOFError:
            return
        try:
            answer = session.answer(message, fds)
        except BaseException as error:
            answer = _failure(error)
        wire.send(sock, answer)


def load_target(target: dict[str, Any]) -> Kernel:
    """The callable that the judge named: a kernel file's `kernel_fn`, or a baseline of reference.py."""
    if "kernel" in target:
        from autokernel.loading import load_file

        module = load_file(Path(target["kernel"]), "autokernel_candidate")
        return module.kernel_fn  # type: ignore[no-any-return]
    from autokernel.loading import get_spec

    baseline = get_spec(target["op"]).baselines[target["baseline"]]
    if not target.get("compile"):
        return baseline
    return torch.compile(baseline, dynamic=False)


class _Session:
    """The judge's view of this process: one kernel, one arena, and the inputs prepared for timing."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.kernel: Kernel
        self._arena: wire.Arena | None = None
        self._prepared: dict[str, list[list[Any]]] = {}
        self._kept: Any = None

    def answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if fds:
            self._arena = wire.Arena(fds[0], message["arena_size"])
        command = message["command"]
        if command == "run":
            return self._run(message)
        if command == "prepare":
            self._prepared[message["key"]] = [[_private(v) for v in self._arguments(c)] for c in message["calls"]]
            return {"ok": True}
        if command == "time":
            return self._time(message)
        if command == "fetch":
            return {"ok": True, "outputs": self._export([self._kept], message)}
        raise ValueError(f"unknown command {command!r}")

    def _arguments(self, call: list[Any]) -> list[Any]:
        values: list[Any] = []
        for value in call:
            if isinstance(value, dict):
                assert self._arena is not None, "tensors arrive by arena"
                values.append(self._arena.tensor(wire.Slot.from_json(value)))
            else:
                values.append(tuple(value) if isinstance(value, list) else value)
        return values

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = [self._arguments(call) for call in message["calls"]]
        outputs, ops = [], set()
        try:
            for number, arguments in enumerate(calls):
                _poison_malloc(message["poison"][number])
                if message.get("trace"):
                    with _OpRecorder() as recorder:
                        outputs.append(self.kernel(*arguments))
                    ops |= recorder.names
                else:
                    outputs.append(self.kernel(*arguments))
        finally:
            _poison_malloc(0)
        return {"ok": True, "outputs": self._export(outputs, message), "aten": sorted(ops)}

    def _export(self, outputs: list[Any], message: dict[str, Any]) -> list[dict[str, Any]]:
        """Describe outputs and copy those that fit into the arena, all after the last call."""
        described: list[dict[str, Any]] = []
        for output, offset in zip(outputs, message["out_offsets"], strict=True):
            if type(output) is not Tensor:
                described.append({"type": type(output).__name__})
                continue
            described.append(
                {
                    "type": "Tensor",
                    "shape": list(output.shape),
                    "dtype": DTYPE_NAMES.get(output.dtype, str(output.dtype)),
                    "stride": list(output.stride()),
                    "device": output.device.type,
                    "grad": output.requires_grad,
                    "storage_bytes": output.untyped_storage().nbytes(),
                }
            )
            nbytes = output.numel() * output.element_size()
            if 0 < nbytes <= message["out_bytes"] and self._arena is not None and output.layout is torch.strided:
                flat = output.detach().contiguous().reshape(-1).view(torch.uint8)
                self._arena.bytes[offset : offset + nbytes].copy_(flat)
        return described

    def _time(self, message: dict[str, Any]) -> dict[str, Any]:
        """Time `calls` calls over the prepared inputs, rotating; keeps one output for the judge to look at."""
        sets, kernel = self._prepared[message["key"]], self.kernel
        schedule = [sets[i] for i in message["order"]]
        keep = message["keep"]
        clock = time.perf_counter_ns
        begin = clock()
        for arguments in schedule[: message["warm"]]:
            kernel(*arguments)
        kept = out = None
        stamps = [clock()]
        for number, arguments in enumerate(schedule):
            out = kernel(*arguments)
            stamps.append(clock())
            if number == keep:
                kept = out
        del out
        self._kept = kept
        call_ns = [after - before for before, after in itertools.pairwise(stamps)]
        return {"ok": True, "warm_ns": stamps[0] - begin, "call_ns": call_ns}


def _private(value: Any) -> Any:
    """A copy in memory of the usual kind: what a model's own activations would be."""
    if not isinstance(value, Tensor):
        return value
    elements = wire.storage_elements(value.shape, value.stride())
    storage = torch.empty(elements, dtype=value.dtype)
    if elements:
        storage.copy_(value.as_strided((elements,), (1,)))
    return storage.as_strided(value.shape, value.stride())


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the ATen operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def _poison_malloc(byte: int) -> None:
    """Fill memory that the kernel will get with a known byte, so that an element it forgets to write is seen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_PERTURB, byte)


def _confine(scratch: Path, memory_bytes: int) -> None:
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    os.chdir(scratch)
    log = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        HOME=str(scratch), TMPDIR=str(scratch), AUTOKERNEL_BUILD_DIR=str(scratch / "build"), PYTHONDONTWRITEBYTECODE="1"
    )


def _failure(error: BaseException) -> dict[str, Any]:
    """One message for the judge: kind, text, and the line of the candidate's file where it happened."""
    text = str(error) or type(error).__name__
    oom = isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text.lower()
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith("kernel.py"):
            where = f" (kernel.py line {frame.lineno}: {frame.line})"
            break
    reason = f"{type(error).__name__}: {text}{where}"
    return {"ok": False, "kind": "oom" if oom else "crash", "reason": reason[:MAX_REASON_CHARS]}
