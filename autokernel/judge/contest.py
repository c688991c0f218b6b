"""Interleaved timing of several children on the same inputs: who needs how long for one forward's worth of calls.

Every round gives each competitor one block per timed case, in random order, so that drift of clocks and neighbours
hits all alike. A block lasts several milliseconds; a competitor's latency in a round is the sum over cases of the
calls per forward times the latency of a call. Inputs change before every call. The children's clocks are checked
against the judge's, one child's beside the other's, and outputs of timed calls against the truth.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from autokernel.judge import refresh
from autokernel.judge.clocks import ClockLog
from autokernel.judge.compare import mismatch
from autokernel.judge.devicememory import release_unused
from autokernel.judge.floor import physical_floor_us
from autokernel.judge.rejected import Rejected
from autokernel.judge.trial import output_elements, truth_of
from autokernel.judge.walltime import BulkTimes, ColdCopy, bulk_times
from autokernel.judge.worker import CALL_DEADLINE_S, TimedBlock, Worker
from autokernel.records import Interval, TimedCase, Verdict
from autokernel.spec import Inputs, KernelSpec
from autokernel.stats import ratio_interval

BLOCK_US, MAX_CALLS = 6_000.0, 256
BLOCK_WALL_US, ENOUGH_CALLS = 15_000.0, 24
"""A block takes no longer than the first, new inputs and flushes included, once it has the second's calls."""

WARM_CALLS = 2
INPUT_SETS = 2
SETTLE_S = 0.0015
"""Pause before a block: the thread pool of the child that ran before spins about this long before it sleeps."""

WARM_UP_S, GPU_WARM_UP_S, KNOWN_WARM_UP_S = 0.15, 0.06, 0.04
CPU_EXCESS, LYING, ENOUGH_PAIRS, WALL_PAIRS = 1.35, 0.2, 3, 6
"""Time of a call by our clock to that claimed: up to the first factor all is well, as the inputs of a bulk are in no
cache. Else both children are measured in turns, at most so many. Who hides more than this share is lying."""

GPU_EXCESS, GPU_SLACK_US, WALL_ATTEMPTS = 1.1, 0.5, 3

IMPOSSIBLE = 0.85
"""Below this share of the physical floor no measurement error can have brought a latency."""


class Contest:
    """Children by name, timed against each other on fresh secret inputs."""

    def __init__(
        self,
        spec: KernelSpec,
        timed: Sequence[TimedCase],
        workers: Mapping[str, Worker],
        *,
        first_deadline_s: float,
        known: Mapping[str, list[int]] | None = None,
    ) -> None:
        """Prepare inputs in every child and call it once. `first_deadline_s` bounds each child's first call.

        `known` are the `calls` of an earlier contest of the same kernels, which spares most of the warming up.
        Raises: Rejected when a child fails; `Rejected.reason` then starts with its name.
        """
        self._spec, self._timed, self._workers = spec, timed, workers
        self._rng = random.Random(secrets.randbits(64))
        device = next(iter(workers.values())).device
        self.on_cpu = device == "cpu"
        self._sets: list[list[Inputs]] = [
            [spec.make_inputs(item.case, secrets.randbits(62), device) for _ in range(INPUT_SETS)] for item in timed
        ]
        self._output_elements = [
            output_elements(spec, item.case, sets[0]) for item, sets in zip(timed, self._sets, strict=True)
        ]
        self._histories = {
            name: [
                [refresh.History(inputs, elements, self._rng) for inputs in sets]
                for sets, elements in zip(self._sets, self._output_elements, strict=True)
            ]
            for name in workers
        }
        self.rounds: dict[str, list[float]] = {name: [] for name in workers}
        self._unclaimed: dict[str, list[float]] = {name: [] for name in workers}
        self._bulk: dict[tuple[str, int], BulkTimes] = {}
        self._host_us: dict[tuple[str, int], float] = {}
        self.clocks = ClockLog()
        self._kept: dict[str, tuple[int, int, int]] = {}  # case, set, changes that the set had seen
        self._latency_us: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.calls: dict[str, list[int]] = {}
        """Of each child, how many calls a block of each case has."""
        self._known = known or {}
        release_unused()
        with ThreadPoolExecutor(len(workers)) as pool:  # what a first call costs is no work of the device
            list(pool.map(lambda name: self._prepare(name, first_deadline_s), workers))

    def run(self, rounds: int) -> None:
        """Add `rounds` rounds."""
        names = list(self._workers)
        for name in names:
            if name not in self.calls:
                self.calls[name] = self._warmed_up(name) if name in self._known else self._calibrate(name)
        for _ in range(rounds):
            totals, unclaimed = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
            for index, item in enumerate(self._timed):
                self._rng.shuffle(names)
                for name in names:
                    block = self._block(name, index)
                    totals[name] += item.calls * block.latency_us
                    unclaimed[name] += item.calls * block.unclaimed_us
            for name in names:
                self.rounds[name].append(totals[name])
                self._unclaimed[name].append(unclaimed[name])

    def forget_inputs(self) -> None:
        """Free the judge's own inputs: what was measured stays, and no more can be."""
        self._sets, self._histories = [], {}
        release_unused()

    def latency_us(self, name: str) -> float:
        """Median over rounds of one forward's worth of calls."""
        return statistics.median(self.rounds[name])

    def speedup(self, name: str, over: str) -> Interval:
        """Latency of `over` / latency of `name`, paired by round."""
        return ratio_interval(self.rounds[over], self.rounds[name])

    def host_us(self, name: str) -> float | None:
        """What the host needs for one forward's worth of GPU calls, in us; None on a CPU, where it is the latency."""
        if self.on_cpu:
            return None
        return sum(item.calls * self._host_us[name, index] for index, item in enumerate(self._timed))

    def graph_us(self, name: str) -> float | None:
        """One forward's worth of calls in us within replayed CUDA graphs, by our clock; None where that is unknown."""
        total_us = 0.0
        for index, item in enumerate(self._timed):
            bulk = self._bulk.get((name, index))
            if bulk is None or bulk.graph_us is None:
                return None
            total_us += item.calls * bulk.graph_us
        return total_us

    def unclaimed_us(self, name: str, beside: str) -> list[float]:
        """Of each round, us that our clock saw beyond what child `name` claims, less those of its neighbour.

        What is neither's time (messages, their reading, stalls) is in both. One whose blocks have more calls has less
        of it a call, so that a faster kernel is never at a disadvantage.
        """
        return [ours - theirs for ours, theirs in zip(self._unclaimed[name], self._unclaimed[beside], strict=True)]

    def verify(self, name: str) -> None:
        """Check the output of the last kept timed call, and that its latencies are possible. Raises: Rejected."""
        index, number, seen = self._kept[name]
        inputs = self._histories[name][index][number].inputs(seen)
        self._compare(name, index, inputs, None)
        for index, item in enumerate(self._timed):
            device, elements = self._workers[name].device, self._output_elements[index]
            floor_us = physical_floor_us(self._spec, item.case, elements, device)
            latency_us = self._median_us(name, index)
            if floor_us is not None and latency_us < IMPOSSIBLE * floor_us:
                raise Rejected(
                    Verdict.TAMPER,
                    f"claims {latency_us:.1f} us for {item.case.label}; the device needs {floor_us:.1f} us at least",
                )

    def hidden_us(self, name: str, beside: str) -> float:
        """Us of a round of child `name` that its clock does not tell, by our own over many calls; some outputs are
        checked as well.

        Where the clocks disagree and it cannot be told why, ours counts, not the child's: on a loaded CPU, or for GPU
        calls that cannot be captured and may need the host's time. `beside` was confirmed when it was kept.
        Raises: Rejected.
        """
        hidden = 0.0
        for index, item in enumerate(self._timed):
            excess = self._cpu_excess(name, beside, index) if self.on_cpu else self._gpu_excess(name, index)
            hidden += item.calls * (excess - 1) * self._median_us(name, index)
        return hidden

    def _cpu_excess(self, name: str, beside: str, index: int) -> float:
        """How many times longer than claimed a call takes by our clock; 1 when that is as it should be.

        Where threads wait for cores any of the numbers may be many times too large, those of an honest child as well;
        and inputs that are in no cache cost time, much of a fast kernel's, and nothing where a slow one computes
        meanwhile. So both children and a copy of our own are measured in turns, and what counts is what one hides more
        than its neighbour and than that costs the copy, each time.
        """
        wall_us, usual_us = self._wall_and_claim(name, index)
        if wall_us <= CPU_EXCESS * min(usual_us, self._median_us(name, index)):
            return 1.0
        hidden, theirs, claims = list[float](), list[float](), list[float]()
        copy = ColdCopy(self._spec.bytes_moved(self._timed[index].case), usual_us)
        for pairs in range(1, WALL_PAIRS + 1):
            wall_us, usual_us = self._wall_and_claim(name, index)
            their_wall_us, their_usual_us = self._wall_and_claim(beside, index)
            claims.append(usual_us)
            hidden.append(wall_us - usual_us)
            theirs.append(max(copy.extra_us(), their_wall_us - their_usual_us))
            more_us = statistics.median(hidden) - statistics.median(theirs)
            if pairs >= ENOUGH_PAIRS and more_us <= 0:
                return 1.0  # to count a difference would only ever be to the candidate's disadvantage
        surely = sorted(hidden)[1] > sorted(theirs)[-2]
        return 1 + more_us / statistics.median(claims) if surely else 1.0

    def _wall_and_claim(self, name: str, index: int) -> tuple[float, float]:
        """Us of a call by our clock, the shortest of several goes, and by the child's, the median of a block before."""
        block = self._timed_calls(name, index, self.calls[name][index], warm=1)
        return self._bulk_us(name, index), block.latency_us

    def _gpu_excess(self, name: str, index: int) -> float:
        """As `_cpu_excess`; in a graph calls follow one another faster than events can tell. Raises: Rejected."""
        claimed_us = self._median_us(name, index)
        for _ in range(WALL_ATTEMPTS):
            ours = self._bulk_us(name, index)
            if ours <= GPU_EXCESS * claimed_us + GPU_SLACK_US:
                return 1.0
            if self._bulk[name, index].graph_us is None:
                return ours / claimed_us
        raise Rejected(Verdict.TAMPER, f"claims {claimed_us:.1f} us for a call that takes {ours:.1f} us by our clock")

    # -- parts

    def _compare(self, name: str, index: int, inputs: Inputs, number: int | None) -> None:
        item = self._timed[index]
        truth, meta = truth_of(self._spec, inputs)
        output = self._workers[name].fetch(meta, number)
        if reason := mismatch(output, truth, item.case.dtype, self._spec.tolerances[item.case.dtype]):
            raise Rejected(Verdict.TAMPER, f"wrong while timed, {item.case.name} ({item.case.label}): {reason}")

    def _bulk_us(self, name: str, index: int) -> float:
        """Time of a call of case `index` by our clock; the last output and a random one are checked."""
        history = self._histories[name][index][0]
        nbytes, claimed_us = self._spec.bytes_moved(self._timed[index].case), self._median_us(name, index)
        bulk = bulk_times(self._workers[name], str(index), call_bytes=nbytes, claimed_us=claimed_us, rng=self._rng)
        self._bulk[name, index] = bulk
        last = len(bulk.steps) - 1  # work that is left to the next call is missing there
        base = history.inputs(history.count)
        for number in {last, self._rng.randrange(last + 1)}:
            self._compare(name, index, refresh.private_copies(base, bulk.steps[number]), number)
        return bulk.call_us if bulk.graph_us is None else min(bulk.call_us, bulk.graph_us)

    def _median_us(self, name: str, index: int) -> float:
        return statistics.median(self._latency_us[name, index])

    def _block(self, name: str, index: int) -> TimedBlock:
        """One timed block of case `index`."""
        calls = self.calls[name][index]
        time.sleep(SETTLE_S)
        block = self._timed_calls(name, index, calls, warm=min(WARM_CALLS, calls))
        if not self.on_cpu:
            self.clocks.sample()
        self._host_us[name, index] = statistics.median(block.host_us or [0.0])
        self._latency_us[name, index].append(block.latency_us)
        return block

    def _timed_calls(
        self, name: str, index: int, calls: int, *, warm: int, deadline_s: float = CALL_DEADLINE_S
    ) -> TimedBlock:
        """`calls` timed calls after `warm` others over the sets in random order, each on changed inputs."""
        histories = self._histories[name][index]
        order = [self._rng.randrange(INPUT_SETS) for _ in range(warm + calls)]
        keep = self._rng.choice((calls - 1, self._rng.randrange(calls)))
        changes = []
        for position, number in enumerate(order):
            changes.append(histories[number].draw())
            if position == warm + keep:
                self._kept[name] = (index, number, histories[number].count)
        return self._workers[name].time(str(index), order, changes, warm=warm, keep=keep, deadline_s=deadline_s)

    def _prepare(self, name: str, first_deadline_s: float) -> None:
        for index, sets in enumerate(self._sets):
            self._workers[name].prepare(str(index), sets)
            self._timed_calls(name, index, 1, warm=1, deadline_s=first_deadline_s)

    def _warmed_up(self, name: str) -> list[int]:
        """Calls per block as they are known, once blocks of them have settled a new process."""
        for index, calls in enumerate(self._known[name]):
            end = time.perf_counter() + KNOWN_WARM_UP_S / len(self._timed)
            while True:
                self._timed_calls(name, index, calls, warm=0)
                if time.perf_counter() > end:
                    break
        return self._known[name]

    def _calibrate(self, name: str) -> list[int]:
        """Calls per block for each case, after warming up until allocations and clocks have settled."""
        calls = []
        warm_up_s = WARM_UP_S if self.on_cpu else GPU_WARM_UP_S
        for index in range(len(self._timed)):
            start, latency_us, wall_us = time.perf_counter(), float("inf"), float("inf")
            while time.perf_counter() - start < warm_up_s / len(self._timed):
                block = self._timed_calls(name, index, 2, warm=0)
                latency_us, wall_us = min(latency_us, block.latency_us), min(wall_us, block.wall_us / 2)
            most = max(ENOUGH_CALLS, round(BLOCK_WALL_US / wall_us))
            calls.append(max(1, min(MAX_CALLS, most, round(BLOCK_US / max(latency_us, 0.1)))))
        return calls
