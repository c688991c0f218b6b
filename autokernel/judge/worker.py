"""The judge's handle of one child: inputs in, outputs back, deadlines held, faults turned into verdicts."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from autokernel.errors import WorkerError
from autokernel.judge import answers, wire
from autokernel.judge.exchange import Exchange, encode
from autokernel.judge.forkserver import ForkServer, kill_group
from autokernel.judge.refresh import Change
from autokernel.judge.rejected import SIGKILLED, Rejected
from autokernel.records import Scalar, TensorMeta, Verdict
from autokernel.spec import Inputs

if TYPE_CHECKING:
    from autokernel.target import Target

T = TypeVar("T")

FAILURES = {"oom": Verdict.OOM, "delegates": Verdict.DELEGATES, "fail": Verdict.FAIL}
"""What a child says of its own failure, where that is no crash."""

LOAD_DEADLINE_S = 150.0
CALL_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """One block of `calls` calls: timed ones and those before by the child's clock, the whole by the judge's; us.

    `idle_us` is what the child's clock itself took (flushing caches), `host_us` the host's part of each GPU call.
    """

    calls: int
    calls_us: tuple[float, ...]
    warm_us: float
    host_us: tuple[float, ...]
    idle_us: float
    wall_us: float

    @property
    def latency_us(self) -> float:
        """Median of the calls: a preempted call or two do not move it."""
        return statistics.median(self.calls_us)

    @property
    def unclaimed_us(self) -> float:
        """Of the judge's time for a call, warm-up calls included, what the child's clock does not account for."""
        claimed_us = self.warm_us + self.idle_us + sum(self.calls_us)
        return (self.wall_us - claimed_us) / self.calls


class Worker:
    """A child process with one loaded callable.

    `scratch` is the only folder that the child is meant to write; it is kept between children of the same kernel text,
    so that a library is compiled once.
    """

    def __init__(
        self, server: ForkServer, target: dict[str, Any], scratch: Path, *, compiling_for: Target | None = None
    ) -> None:
        """One that is `compiling_for` a GPU has none itself, and is only there to `compile`."""
        scratch.mkdir(parents=True, exist_ok=True)
        self._server, self.scratch, self.device = server, scratch, server.device
        self.pid, self._sock = server.spawn(scratch, compiling_for=compiling_for)
        self._exchange = Exchange(server.device)
        self._peak_bytes: int | None = None
        self._closed = False
        self.alive = True
        """Until it is killed, or was found to have died."""
        self._number = 0
        with contextlib.suppress(OSError):  # a child that is dead already is noticed by `load`
            wire.send(self._sock, {"target": target, "scratch": str(scratch)})

    def load(self, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Wait until the child has imported (and compiled) its target.

        Raises: Rejected; WorkerError when the child did not come as far as being in its sandbox.
        """
        self._await_sandbox(deadline_s)
        self._receive(deadline_s)

    def run(
        self,
        calls: Sequence[Inputs],
        output: Sequence[TensorMeta],
        *,
        deadline_s: float = CALL_DEADLINE_S,
        guarded: bool = True,
        recorded: bool = True,
    ) -> tuple[list[Tensor], set[str]]:
        """Call the kernel on each of `calls`, all outputs alive together; outputs, and the ATen operators used.

        `output` says what each call must return. The outputs are copies in the judge's memory. `guarded` puts red zones
        round what the kernel allocates; without, its memory is what it will be in a model. Not `recorded` calls are not
        guarded either, and no operators are told.
        Raises: Rejected for a fault, a changed input, a write outside its buffers, or an output of another kind.
        """
        slots, out_offsets, out_bytes = self._exchange.lay_out(calls, output)
        arena, offer, fds = self._exchange.write(calls, slots, out_offsets[-1] + out_bytes)
        inputs_end = out_offsets[0]
        before = arena.bytes[:inputs_end].clone()
        message = {
            "command": "run",
            "calls": encode(calls, slots),
            **offer,
            "out_offsets": out_offsets,
            "out_bytes": out_bytes,
            "poison": [secrets.randbelow(254) + 1 for _ in calls],
            "guarded": guarded,
            "recorded": recorded,
        }
        answer = self._ask(message, deadline_s, fds)
        self._exchange.check_inputs(arena, before, slots)
        described = self._parsed(lambda: answers.outputs(answer, len(calls)))
        outputs = [self._exchange.collect(*each) for each in zip(described, out_offsets, output, strict=True)]
        return outputs, self._parsed(lambda: answers.names(answer, "aten"))

    def switch(self, kernel: Path, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Have another kernel file, in a folder below `scratch`, take the place of the last. For kernels whose times
        prove nothing yet, as one could spoil the other. Raises: Rejected."""
        self._ask({"command": "switch", "kernel": str(kernel)}, deadline_s)

    def compile(self, arguments: Sequence[TensorMeta | Scalar], deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Have the kernel called for what that compiles, on tensors that hold nothing; no result is looked at.

        Raises: Rejected.
        """
        described = [asdict(value) if isinstance(value, TensorMeta) else value for value in arguments]
        self._ask({"command": "compile", "arguments": described}, deadline_s)

    def prepare(self, key: str, sets: Sequence[Inputs]) -> None:
        """Give the child its own copies of `sets`, to be timed under `key`. Raises: Rejected."""
        slots, offsets, _ = self._exchange.lay_out(sets, [])
        _, offer, fds = self._exchange.write(sets, slots, offsets[0] if offsets else wire.RED_ZONE_BYTES)
        message = {"command": "prepare", "key": key, "calls": encode(sets, slots), **offer}
        self._ask(message, CALL_DEADLINE_S, fds)

    def time(
        self,
        key: str,
        order: Sequence[int],
        changes: Sequence[Sequence[Change]],
        *,
        warm: int,
        keep: int,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> TimedBlock:
        """Time one block of calls over the prepared sets in `order`, the first `warm` of them for warming up only.

        Before each call its `changes` are made; the output of timed call number `keep` stays for `fetch`.
        Raises: Rejected, also for times that cannot be.
        """
        message = {"command": "time", "key": key, "order": list(order), "warm": warm, "keep": keep, "changes": changes}
        start = time.perf_counter()
        answer = self._ask(message, deadline_s)
        wall_us = (time.perf_counter() - start) * 1e6
        timed = len(order) - warm
        block = self._parsed(
            lambda: TimedBlock(
                calls=len(order),
                calls_us=answers.numbers(answer, "calls_us", (timed,)),
                warm_us=answers.number(answer, "warm_us"),
                host_us=answers.numbers(answer, "host_us", (timed, 0)),
                idle_us=answers.number(answer, "idle_us"),
                wall_us=wall_us,
            )
        )
        if not min(block.calls_us) > 0:
            raise Rejected(Verdict.TAMPER, "reports calls that took no time")
        return block

    def load_bulk(self, key: str, steps: Sequence[int]) -> None:
        """Have the first prepared set copied once for each of `steps`, moved on by so much. Raises: Rejected."""
        self._ask({"command": "load", "key": key, "steps": list(steps)}, CALL_DEADLINE_S)

    def capture_bulk(self) -> None:
        """Have the bulk's calls captured in a CUDA graph. Raises: Rejected when they cannot be."""
        self._ask({"command": "graph"}, CALL_DEADLINE_S)

    def run_bulk(self) -> float:
        """Have all of the bulk's calls made; our own wall time for that in us. Raises: Rejected."""
        return self._walled("bulk")

    def answer_us(self) -> float:
        """Our wall time in us for a command that does nothing. Raises: Rejected."""
        return self._walled("nothing")

    def kernel_names(self, key: str) -> set[str]:
        """Names of the GPU's kernels in one call on the first prepared set; empty on a CPU, or where the child may not
        trace. Raises: Rejected."""
        if self.device == "cpu":
            return set()
        answer = self._ask({"command": "kernels", "key": key}, CALL_DEADLINE_S)
        return self._parsed(lambda: answers.names(answer, "kernels"))

    def fetch(self, expected: TensorMeta, number: int | None = None) -> Tensor:
        """The output kept from the last timed block, or of call `number` of the bulk. Raises: Rejected."""
        _, offsets, nbytes = self._exchange.lay_out([], [expected])
        _, offer, fds = self._exchange.write([], [], offsets[0] + nbytes)
        message = {"command": "fetch", "which": number, **offer, "out_offsets": offsets, "out_bytes": nbytes}
        answer = self._ask(message, CALL_DEADLINE_S, fds)
        (described,) = self._parsed(lambda: answers.outputs(answer, 1))
        return self._exchange.collect(described, offsets[0], expected)

    def peak_memory_mb(self) -> float | None:
        """Most GPU memory that the child says it was handed, or its largest resident size; None where unknown."""
        if self.device != "cpu":
            return None if self._peak_bytes is None else round(self._peak_bytes / 2**20, 1)
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    return round(int(line.split()[1]) / 1024, 1)
        return None

    def close(self) -> None:
        """Kill the child's whole process group and reap it."""
        if self._closed:
            return
        self.kill()
        self._closed = True
        self._sock.close()
        self._server.reap(self.pid)
        self._exchange.close()

    def kill(self) -> None:
        """Kill the child's whole process group; `close` reaps it, and its number may be another's after that."""
        if self._closed:
            return
        self.alive = False
        kill_group(self.pid)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the conversation

    def _ask(self, message: dict[str, Any], deadline_s: float, fds: Sequence[int] = ()) -> dict[str, Any]:
        self._number += 1
        try:
            wire.send(self._sock, {**message, "number": self._number}, fds)
        except OSError:
            raise self._death() from None
        return self._receive(deadline_s)

    def _parsed(self, read: Callable[[], T]) -> T:
        """What `read` makes of an answer. Raises: Rejected when the child sent something else than it is asked for."""
        try:
            return read()
        except ValueError as error:
            self.kill()
            raise Rejected(Verdict.TAMPER, f"the child sent what it may not: {error}") from None

    def _walled(self, command: str) -> float:
        start = time.perf_counter()
        self._ask({"command": command}, CALL_DEADLINE_S)
        return (time.perf_counter() - start) * 1e6

    def _await_sandbox(self, deadline_s: float) -> None:
        """The child's word that it is confined: nothing of the candidate has run before it."""
        self._sock.settimeout(deadline_s)
        try:
            answer, _ = wire.receive(self._sock)
        except (EOFError, OSError, ValueError) as error:
            self.kill()
            raise WorkerError(f"a child ended before it loaded anything: {error}", hint="run `autokernel doctor`")
        if answer.get("kind") == "oom":
            raise Rejected(Verdict.OOM, str(answer["reason"]))
        if not answer.get("ok"):
            raise WorkerError(str(answer.get("reason")), hint="run `autokernel doctor`; --sandbox off goes without one")

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        self._sock.settimeout(deadline_s)
        try:
            answer, _ = wire.receive(self._sock)
        except TimeoutError:
            self.kill()
            raise Rejected(Verdict.TIMEOUT, f"no answer within {deadline_s:g} s; the process group was killed")
        except ValueError as error:
            self.kill()
            raise Rejected(Verdict.TAMPER, f"the child sent what it may not: {error}")
        except (EOFError, OSError):
            raise self._death() from None
        if answer.get("number") != self._number:
            self.kill()
            raise Rejected(
                Verdict.TAMPER, f"the child gave an answer that was not asked for ({answer.get('number')!r})"
            )
        if answer.get("ok"):
            if "peak_bytes" in answer:
                self._peak_bytes = round(self._parsed(lambda: answers.number(answer, "peak_bytes")))
            return answer
        verdict = FAILURES.get(str(answer.get("kind")), Verdict.CRASH)
        raise Rejected(verdict, str(answer.get("reason", "no reason given")))

    def _death(self) -> Rejected:
        """What the exit status of a child that hung up says."""
        self.alive = False
        status, excess = self._server.reap(self.pid)
        if excess:
            return Rejected(Verdict.CRASH, f"{excess}; its processes were killed")
        if status is None or status >= 0:
            return Rejected(Verdict.CRASH, f"the process ended by itself (exit code {status})")
        name = signal.Signals(-status).name
        if -status == signal.SIGKILL:
            return Rejected(Verdict.OOM, SIGKILLED)
        return Rejected(Verdict.CRASH, f"the process died by {name}")
