"""What the judge's own clock says of a child's kernel: the time of many calls in one go, divided by their number."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autokernel.judge.rejected import Rejected
from autokernel.judge.worker import Worker

log = logging.getLogger(__name__)

BULK_US = 8_000.0
"""What the calls should take together: far more than a message and its answer."""

MOST_CALLS, MOST_BYTES = 512, {"cpu": 64 << 20, "cuda": 1 << 30}
"""Calls in one go, and what their inputs and outputs may occupy together."""

REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkTimes:
    """Shortest wall time of a call in us: started one by one, and within a CUDA graph (None: cannot be captured).

    `steps` are those of the inputs of the last calls, in their order.
    """

    call_us: float
    graph_us: float | None
    steps: tuple[int, ...]


class ColdCopy:
    """What it costs our own process that inputs are in no cache: a little, or much where others use the memory.

    A kernel that computes for long hides that cost behind its work, and one that is bound by memory cannot.
    """

    def __init__(self, call_bytes: int, claimed_us: float) -> None:
        """As many copies, of as many bytes read and written, as a kernel with such calls makes in one go.

        Of fewer bytes where they would take too much memory: the cost is scaled then.
        """
        half = max(1, min(call_bytes, MOST_BYTES["cpu"] // 2) // 2)
        count = _count("cpu", 2 * half, claimed_us)
        self._share = call_bytes / (2 * half)
        self._pairs = [
            (torch.ones(half, dtype=torch.uint8), torch.zeros(half, dtype=torch.uint8)) for _ in range(count)
        ]

    def extra_us(self) -> float:
        """Us that one of these copies takes more, each after the last one, than when it is repeated at once."""
        for pair in self._pairs:
            for tensor in pair:
                tensor.add_(1)
        together_us = _us(lambda: [target.copy_(source) for source, target in self._pairs])
        source, target = self._pairs[-1]
        at_once_us = min(_us(lambda: target.copy_(source)) for _ in range(REPEATS))
        return self._share * max(0.0, together_us / len(self._pairs) - at_once_us)


def _us(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def bulk_times(worker: Worker, key: str, *, call_bytes: int, claimed_us: float, rng: random.Random) -> BulkTimes:
    """Time the calls of the first set prepared under `key`, of which each moves `call_bytes` bytes.

    Raises: Rejected when the child fails (but not when the calls cannot be captured).
    """
    count = _count(worker.device, call_bytes, claimed_us)
    _load(worker, key, count, rng)
    worker.run_bulk()  # memory for all outputs is allocated here
    call_us, steps = _shortest_us(worker, key, count, rng)
    graph_us = None
    if worker.device != "cpu":
        try:
            worker.capture_bulk()
            graph_us, steps = _shortest_us(worker, key, count, rng)
        except Rejected as rejected:
            log.info("no CUDA graph: %s", rejected.reason)
    # What the kernel has not done by now it can no longer do: its inputs are overwritten before the outputs are seen.
    _load(worker, key, count, rng)
    return BulkTimes(call_us=call_us, graph_us=graph_us, steps=tuple(steps))


def _count(device: str, call_bytes: int, claimed_us: float) -> int:
    room = MOST_BYTES["cpu" if device == "cpu" else "cuda"] // max(1, call_bytes)
    return max(2, min(MOST_CALLS, room, round(BULK_US / max(claimed_us, 0.1))))


def _load(worker: Worker, key: str, count: int, rng: random.Random) -> list[int]:
    steps = rng.sample(range(1, 1 << 20), count)
    worker.load_bulk(key, steps)
    return steps


def _shortest_us(worker: Worker, key: str, count: int, rng: random.Random) -> tuple[float, list[int]]:
    """Time of a call in the fastest of several goes, each on new content, and the last go's steps."""
    best, steps = float("inf"), list[int]()
    for _ in range(REPEATS):
        steps = _load(worker, key, count, rng)
        answer_us = min(worker.answer_us() for _ in range(3))
        best = min(best, max(0.0, worker.run_bulk() - answer_us) / count)
    return best, steps
