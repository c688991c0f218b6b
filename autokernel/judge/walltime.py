"""What the judge's own clock says of a child's kernel: the time of many calls in one go, divided by their number."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

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
