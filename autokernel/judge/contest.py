"""Interleaved timing of several children on the same inputs: who needs how long for one forward's worth of calls.

Every round gives each competitor one block per timed case, in random order, so that drift of clocks and neighbours
hits all alike. A block lasts several milliseconds; a competitor's latency in a round is the sum over cases of the
calls per forward times the latency of a call. The children's clocks are checked against the judge's.
"""

from __future__ import annotations

import logging
import random
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence

from autokernel.judge.clocks import ClockLog
from autokernel.judge.compare import mismatch
from autokernel.judge.trial import truth_of
from autokernel.judge.worker import Rejected, Worker
from autokernel.records import Interval, TimedCase, Verdict
from autokernel.spec import Inputs, KernelSpec
from autokernel.stats import ratio_interval

log = logging.getLogger(__name__)

BLOCK_US = 6_000.0
MAX_CALLS = 256
WARM_CALLS = 2
INPUT_SETS = 2
SETTLE_S = 0.0015
"""Pause before a block: the thread pool of the child that ran before spins about this long before it sleeps."""

WARM_UP_S = 0.25
WALL_FACTOR, WALL_SLACK_US = 1.5, 4_000.0
"""The judge's clock may read this much more than the child's (per block) before the child counts as lying."""


class Contest:
    """Children by name, timed against each other on fresh secret inputs."""

    def __init__(
        self, spec: KernelSpec, timed: Sequence[TimedCase], workers: Mapping[str, Worker], *, first_deadline_s: float
    ) -> None:
        """Prepare inputs in every child and find block lengths. `first_deadline_s` bounds each child's first call.

        Raises: Rejected when a child fails; `Rejected.reason` then starts with its name.
        """
        self._spec, self._timed, self._workers = spec, timed, workers
        self._rng = random.Random(secrets.randbits(64))
        device = next(iter(workers.values())).device
        self._sets: list[list[Inputs]] = [
            [spec.make_inputs(item.case, secrets.randbits(62), device) for _ in range(INPUT_SETS)] for item in timed
        ]
        self.rounds: dict[str, list[float]] = {name: [] for name in workers}
        self._claimed_us = dict.fromkeys(workers, 0.0)
        self._wall_us = dict.fromkeys(workers, 0.0)
        self._blocks = dict.fromkeys(workers, 0)
        self._host_us: dict[tuple[str, int], float] = {}
        self.clocks = ClockLog()
        self._kept: dict[str, tuple[int, int]] = {}
        self._calls = {name: self._calibrate(name, first_deadline_s) for name in workers}

    def run(self, rounds: int) -> None:
        """Add `rounds` rounds."""
        names = list(self._workers)
        for _ in range(rounds):
            totals = dict.fromkeys(names, 0.0)
            for index, item in enumerate(self._timed):
                self._rng.shuffle(names)
                for name in names:
                    totals[name] += item.calls * self._block(name, index)
            for name, total in totals.items():
                self.rounds[name].append(total)

    def latency_us(self, name: str) -> float:
        """Median over rounds of one forward's worth of calls."""
        return statistics.median(self.rounds[name])

    def speedup(self, name: str, over: str) -> Interval:
        """Latency of `over` / latency of `name`, paired by round."""
        return ratio_interval(self.rounds[over], self.rounds[name])

    def host_us(self, name: str) -> float | None:
        """What the host needs for one forward's worth of GPU calls, in us; None on a CPU, where it is the latency."""
        if self._workers[name].device == "cpu":
            return None
        return sum(item.calls * self._host_us[name, index] for index, item in enumerate(self._timed))

    def graph_us(self, name: str) -> float | None:
        """One forward's worth of calls in us, each in a replayed CUDA graph; None on a CPU or where it cannot be
        captured. Nothing of the child can be relied upon after a failed capture.
        """
        if self._workers[name].device == "cpu":
            return None
        try:
            return sum(item.calls * self._workers[name].graph_us(str(i)) for i, item in enumerate(self._timed))
        except Rejected as rejected:
            log.info("no CUDA graph of the %s: %s", name, rejected.reason)
            return None

    def verify(self, name: str) -> None:
        """Check the last kept timed output, and the child's clock against the judge's. Raises: Rejected."""
        case_index, set_index = self._kept[name]
        item = self._timed[case_index]
        truth, meta = truth_of(self._spec, self._sets[case_index][set_index])
        output = self._workers[name].fetch(meta)
        if reason := mismatch(output, truth, item.case.dtype, self._spec.tolerances[item.case.dtype]):
            raise Rejected(Verdict.TAMPER, f"wrong while timed, {item.case.name} ({item.case.label}): {reason}")
        claimed, wall = self._claimed_us[name], self._wall_us[name]
        if wall > WALL_FACTOR * claimed + WALL_SLACK_US * self._blocks[name]:
            raise Rejected(
                Verdict.TAMPER, f"claims {claimed / 1e3:.1f} ms for calls that took {wall / 1e3:.1f} ms by our clock"
            )

    def _block(self, name: str, index: int) -> float:
        """One timed block of case `index`; us per call."""
        calls = self._calls[name][index]
        order = [self._rng.randrange(INPUT_SETS) for _ in range(calls)]
        keep = self._rng.randrange(calls)
        time.sleep(SETTLE_S)
        warm = min(WARM_CALLS, calls)
        block = self._workers[name].time(str(index), order, warm=warm, keep=keep)
        if self._workers[name].device != "cpu":
            self.clocks.sample()
        self._kept[name] = (index, order[keep])
        self._claimed_us[name] += block.warm_us + block.idle_us + sum(block.calls_us)
        self._host_us[name, index] = statistics.median(block.host_us or [0.0])
        self._wall_us[name] += block.wall_us
        self._blocks[name] += 1
        return block.latency_us

    def _calibrate(self, name: str, first_deadline_s: float) -> list[int]:
        """Calls per block for each case, after warming up until allocations and clocks have settled."""
        worker, calls = self._workers[name], []
        for index, sets in enumerate(self._sets):
            worker.prepare(str(index), sets)
            worker.time(str(index), [0], warm=1, keep=0, deadline_s=first_deadline_s)
            start, latency_us = time.perf_counter(), float("inf")
            while time.perf_counter() - start < WARM_UP_S / len(self._sets):
                block = worker.time(str(index), [0, 1], warm=0, keep=0)
                latency_us = min(latency_us, block.latency_us)
            calls.append(max(1, min(MAX_CALLS, round(BLOCK_US / max(latency_us, 0.1)))))
        return calls
