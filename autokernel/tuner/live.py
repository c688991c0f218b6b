"""Measures configurations of one kernel on this machine: compiled side by side, then timed one after the other.

All are called by one child, which switches from kernel to kernel; when one breaks it, a new child goes on. Such times
choose among configurations and prove nothing: the winner goes through the judge like any candidate.
"""

from __future__ import annotations

import math
import random
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from autokernel.judge import places
from autokernel.judge.compare import Truth, mismatch
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.rejected import Rejected
from autokernel.judge.trial import truth_of
from autokernel.judge.worker import Worker
from autokernel.kernelfile import with_config
from autokernel.records import TensorMeta, TimedCase, Verdict
from autokernel.spec import Inputs, KernelSpec
from autokernel.stats import MIN_BLOCKS
from autokernel.tuner.compiling import Compiled, Compiler
from autokernel.tuner.space import Point, Space
from autokernel.tuner.trials import Provider, Status, Trial

FEW_CALLS, ENOUGH_CALLS, READING_US = 3, 40, 5_000.0
"""A reading is the median of as many calls as take so long, within the first two."""

HOPELESS = 2.0
"""Times slower than the best so far: such a configuration is not timed any further."""

ROUNDS, ROUND_US = 2 * MIN_BLOCKS, 2_000.0
"""In turns between the best and those that come near it, and how long a turn is."""

FAULTS = {Verdict.FAIL: Status.WRONG, Verdict.TAMPER: Status.WRONG, Verdict.TIMEOUT: Status.TIMEOUT}
"""What a child's end means; anything else is a LAUNCH_ERROR."""


class LiveProvider(Provider):
    """Trials of `space`'s configurations of a kernel text, on the calls in `timed`; close it at the end.

    `folder` is where `compiler` leaves what it compiles, and holds nothing else. One forward's worth of calls is one
    latency.
    """

    def __init__(
        self,
        text: str,
        space: Space,
        spec: KernelSpec,
        timed: Sequence[TimedCase],
        *,
        server: ForkServer,
        compiler: Compiler,
        folder: Path,
        told: Callable[[Trial], None] = lambda _trial: None,
    ) -> None:
        """`told` hears of every trial as it ends."""
        self._text, self._space, self._spec, self._timed = text, space, spec, timed
        self._server, self._compiler, self._folder, self._told = server, compiler, folder, told
        self._compiling: dict[Point, Future[Compiled]] = {}
        self._measured: dict[Point, Trial] = {}  # before anybody asked
        self._child: Worker | None = None
        self._best_us = math.inf
        self._usual_us: dict[tuple[Point, int], float] = {}  # of a call of each case
        self._known: list[tuple[Inputs, Truth, TensorMeta]] = []

    def get_ready(self, first: Point | None) -> None:
        """Make inputs and truths, and have a child's GPU context made: what can be done before anything is compiled.

        On a GPU `first`, which is being compiled, is measured as well, for whoever will ask; a CPU may be busy with
        what this is done beside. Raises: WorkerError.
        """
        self._server.keep_ready(1)
        ahead = [] if first is None or self._server.device == "cpu" else [first]
        self._known = [self._case(item) for item in self._timed]
        self._measured = {point: self._measure(point) for point in ahead}

    def prepare(self, points: Sequence[Point]) -> None:
        """Begin to compile; on a CPU not before they are wanted, as compilers would disturb what is timed."""
        if self._server.device != "cpu":
            self._begin(points)

    def digests(self, points: Sequence[Point]) -> list[str | None]:
        """See `Provider`."""
        self._begin(points)
        return [self._compiled(point).digest for point in points]

    def measure(self, points: Sequence[Point]) -> list[Trial]:
        """See `Provider`. Raises: WorkerError when the judge's own processes fail."""
        self._begin(points)
        if self._server.device == "cpu":
            for point in points:
                self._compiled(point)
        return [self._measured.pop(p) if p in self._measured else self._measure(p) for p in points]

    def confirm(self, points: Sequence[Point]) -> list[list[float]]:
        """See `Provider`; a point that fails now has infinite latencies."""
        self._begin(points)  # another process may have measured some, and left nothing
        rounds: list[list[float]] = [[] for _ in points]
        order, rng = list(range(len(points))), random.Random(secrets.randbits(64))
        for _ in range(ROUNDS):
            rng.shuffle(order)
            for number in order:
                try:
                    rounds[number].append(self._reading(points[number], ROUND_US))
                except Rejected:
                    self._end_child()
                    rounds[number].append(math.inf)
        return rounds

    def by_case(self) -> dict[Point, tuple[float, ...]]:
        """The last reading of a call of each timed case in us, for every configuration that was timed."""
        timed = dict.fromkeys(point for point, _ in self._usual_us)
        return {point: tuple(self._usual_us[point, index] for index in range(len(self._timed))) for point in timed}

    def close(self) -> None:
        """End the child, and what is still compiled; the files go, too."""
        self._end_child()
        running = [compiling for compiling in self._compiling.values() if not compiling.cancel()]
        self._compiler.interrupt()
        wait(running)
        for path in self._folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    # -- parts

    def _begin(self, points: Sequence[Point]) -> None:
        for point in points:
            if point not in self._compiling:
                text = with_config(self._text, self._space.config_at(point))
                self._compiling[point] = self._compiler.start(text)

    def _compiled(self, point: Point) -> Compiled:
        return self._compiling[point].result()

    def _place(self, point: Point) -> Path:
        return places.of_text(self._folder, self._compiled(point).text)

    def _measure(self, point: Point) -> Trial:
        compiled = self._compiled(point)
        status, latency_us, error = compiled.status, None, compiled.error
        start = time.perf_counter()
        if status is Status.OK:
            try:
                status, latency_us = self._first(point)
            except Rejected as rejected:
                self._end_child()
                status, error = FAULTS.get(rejected.verdict, Status.LAUNCH_ERROR), rejected.reason
        trial = Trial(
            point=point,
            status=status,
            latency_us=latency_us,
            compile_s=compiled.compile_s,
            timing_s=time.perf_counter() - start,
            digest=compiled.digest,
            resources=compiled.hungriest,
            error=error,
        )
        self._told(trial)
        return trial

    def _first(self, point: Point) -> tuple[Status, float]:
        """Check a configuration's results and time it. Raises: Rejected."""
        child = self._switched(point)
        for inputs, truth, meta in self._known:
            (output,), _ = child.run([inputs], [meta], recorded=False)
            dtype = meta.dtype
            if reason := mismatch(output, truth, dtype, self._spec.tolerances[dtype]):
                raise Rejected(Verdict.FAIL, reason)
        few_us = self._reading(point, 0.0)
        if few_us > HOPELESS * self._best_us:
            return Status.CENSORED, few_us
        latency_us = self._reading(point, READING_US)
        self._best_us = min(self._best_us, latency_us)
        return Status.OK, latency_us

    def _reading(self, point: Point, long_us: float) -> float:
        """Us of one forward's calls, each a median over about `long_us`. Raises: Rejected."""
        child, total_us = self._switched(point), 0.0
        for index, item in enumerate(self._timed):
            usual_us = self._usual_us.get((point, index), math.inf)
            calls = min(ENOUGH_CALLS, max(FEW_CALLS, round(long_us / usual_us)))
            block = child.time(str(index), [0] * (calls + 1), [[]] * (calls + 1), warm=1, keep=0)
            self._usual_us[point, index] = statistics.median(block.calls_us)
            total_us += item.calls * self._usual_us[point, index]
        return total_us

    def _switched(self, point: Point) -> Worker:
        """The child, with a configuration's kernel in place. Raises: Rejected."""
        path = self._place(point) / "kernel.py"
        if self._child is not None:
            self._child.switch(path)
            return self._child
        self._child = Worker(self._server, {"kernel": str(path)}, self._folder)
        self._child.load()
        self._child.switch(path)
        for index, (inputs, _, _) in enumerate(self._known):
            self._child.prepare(str(index), [inputs])
        return self._child

    def _case(self, item: TimedCase) -> tuple[Inputs, Truth, TensorMeta]:
        inputs = self._spec.make_inputs(item.case, secrets.randbits(62), self._server.device)
        truth, meta = truth_of(self._spec, inputs)
        return inputs, truth, meta

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
