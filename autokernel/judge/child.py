"""What runs in a candidate's process: load one callable, then call or time it as the judge asks.

Nothing here is trusted by the judge. Expected values, tolerances and verdicts never enter this process, and what it
reports is checked against the judge's own clock and memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autokernel.judge import audit, malloc, refresh, sandbox, wire
from autokernel.judge.bulk import Bulk
from autokernel.judge.compileonly import compile_only
from autokernel.judge.devicememory import is_out_of_memory, release_unused
from autokernel.judge.folders import inherit_launchers, keep_files_in, settle
from autokernel.judge.guarded import Guards, OutOfBounds
from autokernel.judge.recorder import OpRecorder
from autokernel.judge.refresh import private_copy
from autokernel.judge.sandbox import Policy
from autokernel.judge.stopwatch import DeviceStopwatch, HostStopwatch, Kernel
from autokernel.records import TensorMeta
from autokernel.spec import DTYPE_NAMES, unfilled

if TYPE_CHECKING:
    from autokernel.spec import KernelSpec

MAX_REASON_CHARS = 4000


def preload(device: str) -> None:
    """Import once, in the server, what each child would spend seconds on."""
    import torch._dynamo  # noqa: F401 - one to two seconds, in the first recorded call

    preload_to_call(device)


def preload_to_call(device: str) -> None:
    """Import what a kernel's call needs."""
    import autokernel.native

    if device != "cpu":
        with contextlib.suppress(ImportError):  # CUDA C++ needs no Triton
            import autokernel.offgpu

        import autokernel.target  # noqa: F401


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Enter the sandbox, get the device ready, load what the judge names, then serve it until it hangs up."""
    with compile_only(setup["compiling_for"]) if "compiling_for" in setup else contextlib.nullcontext():
        _serve(sock, Policy.from_json(setup["sandbox"]), setup["device"], setup["memory_bytes"])


def _serve(sock: socket.socket, policy: Policy, device: str, memory_bytes: int) -> None:
    session = _Session(device)
    try:
        if device != "cpu" and policy.builds:
            # Triton compiles a part of its driver before `scratch` is known.
            keep_files_in(Path(policy.builds) / "warm")
        sandbox.begin(policy, device, memory_bytes)
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
        session.warm_up()
        first, _ = wire.receive(sock)
        # Closed first: what an earlier child of this text left in the folder, a symbolic link say, is hostile, too.
        sandbox.enter(policy, device, Path(first["scratch"]), trusted="kernel" not in first["target"])
        settle(Path(first["scratch"]))
        wire.send(sock, {"ok": True, "number": 0})  # what fails from here on is the candidate's fault
        if "kernel" in first["target"]:
            audit.install(Path(first["scratch"]))
        session.kernel = load_target(first["target"])
    except EOFError:
        return
    except BaseException as error:
        wire.send(sock, _answered(0, failure(error)))
        return
    wire.send(sock, _answered(0, {"ok": True}))
    while True:
        try:
            message, fds = wire.receive(sock, max_fds=1)
        except EOFError:
            return
        try:
            answer = session.answer(message, fds)
        except BaseException as error:
            answer = failure(error)
        wire.send(sock, _answered(message["number"], answer))


def _answered(number: int, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with its message's number; what the candidate tried and may not is worse than any other failure."""
    if audit.violations:
        answer = {"ok": False, "kind": "delegates", "reason": audit.violations[0]}
    return {**answer, "number": number}


def load_target(target: dict[str, Any]) -> Kernel:
    """The callable that the judge named: a kernel file's `kernel_fn`, or a baseline of reference.py."""
    if "kernel" in target:
        from autokernel.loading import load_file

        module = load_file(Path(target["kernel"]), "autokernel_candidate")
        return module.kernel_fn  # type: ignore[no-any-return]
    baseline = known_spec(target["op"], target.get("source")).baselines[target["baseline"]]
    if not target.get("compile"):
        return baseline
    return torch.compile(baseline, dynamic=False)


def known_spec(op: str, source: str | None) -> KernelSpec:
    """The op's spec; that of a captured subgraph from the text of its file, written into this child's own folder."""
    from autokernel.loading import REFERENCE, get_spec, look_in

    if source is not None:
        folder = Path("ops").resolve()
        (folder / op).mkdir(parents=True, exist_ok=True)
        (folder / op / REFERENCE).write_text(source)
        look_in(folder)
    return get_spec(op)


class _Session:
    """The judge's view of this process: one kernel, one arena, and the inputs prepared for timing."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.kernel: Kernel
        self._arena: wire.Arena | None = None
        self._prepared: dict[str, list[list[Any]]] = {}
        self._stopwatch: HostStopwatch | DeviceStopwatch = HostStopwatch()
        self._kept: Any = None
        self._bulk = Bulk()
        self._folder: Path | None = None
        self._loaded: dict[str, Kernel] = {}
        self._commands: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "run": self._run,
            "switch": self._switch,
            "compile": self._compile,
            "prepare": self._prepare,
            "time": self._time,
            "load": self._load,
            "graph": lambda _message: self._bulk.capture(self.kernel),
            "bulk": lambda _message: self._bulk.run(self.kernel),
            "nothing": lambda _message: None,
            "kernels": self._kernels,
            "fetch": self._fetch,
        }

    def warm_up(self) -> None:
        """Create the GPU's context and load Triton's driver: half a second that the candidate need not wait."""
        if self._device == "cpu":
            return
        torch.zeros(1, device=self._device)
        with contextlib.suppress(ImportError):  # CUDA C++ needs no Triton
            from triton.runtime import driver

            driver.active.get_current_target()

    def answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if "arena" in message:
            if self._arena is not None:
                self._arena.detach()
            self._arena = wire.Arena.attach(message["arena"], fds)
        answer = {"ok": True, **(self._commands[message["command"]](message) or {})}
        self._synchronize()
        return answer

    def _arguments(self, call: list[Any]) -> list[Any]:
        values: list[Any] = []
        for value in call:
            if isinstance(value, dict):
                assert self._arena is not None, "tensors arrive by arena"
                values.append(self._arena.tensor(wire.Slot.from_json(value)))
            else:
                values.append(tuple(value) if isinstance(value, list) else value)
        return values

    def _switch(self, message: dict[str, Any]) -> None:
        """Another kernel in place of the last; one that was here before comes back as it was."""
        path = message["kernel"]
        before, self._folder = self._folder, Path(path).parent
        keep_files_in(self._folder)
        if path not in self._loaded:
            if before is not None:
                inherit_launchers(before, self._folder)
            self._loaded[path] = load_target({"kernel": path})
        self.kernel = self._loaded[path]

    def _compile(self, message: dict[str, Any]) -> None:
        self.kernel(*[self._blank(value) for value in message["arguments"]])
        release_unused()  # this child may wait for long while others need the memory

    def _blank(self, value: Any) -> Any:
        """An argument that is no tensor, or a tensor as described, of zeros on a GPU and of anything elsewhere."""
        if not isinstance(value, dict):
            return tuple(value) if isinstance(value, list) else value
        blank = unfilled(TensorMeta(**value), self._device)
        return blank if self._device == "cpu" else blank.zero_()

    def _prepare(self, message: dict[str, Any]) -> None:
        """Copies of the judge's inputs in memory of our own, for timing."""
        sets = [[private_copy(value) for value in self._arguments(call)] for call in message["calls"]]
        self._prepared[message["key"]] = sets

    def _load(self, message: dict[str, Any]) -> None:
        if self._device == "cpu":
            malloc.keep_freed_memory()
        self._bulk.load(self._prepared[message["key"]][0], message["steps"])

    def _kernels(self, message: dict[str, Any]) -> dict[str, Any]:
        """Names of what runs on the GPU during a call, by the driver's own trace."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            self.kernel(*self._prepared[message["key"]][0])
            self._synchronize()
        return {"kernels": sorted({str(event.name) for event in profiler.events() or ()})}

    def _fetch(self, message: dict[str, Any]) -> dict[str, Any]:
        which = message["which"]
        kept = self._kept if which is None else self._bulk.outputs[which]
        return {"outputs": self._export([kept], message)}

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = [self._arguments(call) for call in message["calls"]]
        outputs, ops = [], set()
        try:
            for arguments, byte in zip(calls, message["poison"], strict=True):
                self._poison(byte, message["out_bytes"])
                if not message["recorded"]:
                    outputs.append(self.kernel(*arguments))
                    continue
                guards = Guards(byte) if message["guarded"] else None
                with OpRecorder(guards) as recorder:
                    outputs.append(self.kernel(*arguments))
                ops |= recorder.names
                if guards:
                    self._synchronize()
                    guards.check()
            self._synchronize()
        finally:
            if self._device == "cpu":
                malloc.poison(0)
        return {"outputs": self._export(outputs, message), "aten": sorted(ops), **self._memory()}

    def _poison(self, byte: int, nbytes: int) -> None:
        """Fill memory that the kernel will get with a known byte, so that an element it forgets to write is seen."""
        if self._device == "cpu":
            malloc.poison(byte)
        elif nbytes:  # PyTorch hands freed memory of that size out again
            torch.empty(nbytes, dtype=torch.uint8, device=self._device).fill_(byte)

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
        self._synchronize()
        return described

    def _time(self, message: dict[str, Any]) -> dict[str, Any]:
        """Time calls over the prepared inputs, rotating; keeps one output for the judge to look at."""
        if self._device != "cpu" and isinstance(self._stopwatch, HostStopwatch):
            self._stopwatch = DeviceStopwatch()
        sets = self._prepared[message["key"]]
        schedule = [sets[i] for i in message["order"]]
        changes = message["changes"]
        block = self._stopwatch.block(
            self.kernel,
            schedule,
            warm=message["warm"],
            keep=message["keep"],
            before=lambda number: refresh.apply(schedule[number], changes[number]),
        )
        self._kept = block.kept
        times = {"calls_us": block.calls_us, "warm_us": block.warm_us, "host_us": block.host_us}
        return {**times, "idle_us": block.idle_us, **self._memory()}

    def _memory(self) -> dict[str, Any]:
        """Most GPU memory that PyTorch has handed out here so far; nothing on a CPU, where the judge looks itself."""
        return {} if self._device == "cpu" else {"peak_bytes": torch.cuda.max_memory_allocated()}

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def failure(error: BaseException) -> dict[str, Any]:
    """One message for the judge: kind, text, and the line of the candidate's file where it happened."""
    text = str(error) or type(error).__name__
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith("kernel.py"):
            where = f" (kernel.py line {frame.lineno}: {frame.line})"
            break
    reason = f"{type(error).__name__}: {text}{where}"
    kind = "fail" if isinstance(error, OutOfBounds) else "oom" if is_out_of_memory(error) else "crash"
    return {"ok": False, "kind": kind, "reason": reason[:MAX_REASON_CHARS]}
