"""PyTorch's own ways to compute an op, timed beside its first kernel."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from autokernel.errors import MeasurementError
from autokernel.judge.contest import Contest
from autokernel.judge.rejected import SIGKILLED, Rejected
from autokernel.judge.timing import CANDIDATE
from autokernel.judge.worker import Worker
from autokernel.records import Baseline, TimedCase
from autokernel.spec import KernelSpec

log = logging.getLogger(__name__)

BASELINE_ROUNDS = 8
COMPILE_DEADLINE_S = 240.0
"""torch.compile of a baseline builds C++ in its first call."""


def targets(spec: KernelSpec, *, compiled: bool) -> dict[str, dict[str, Any]]:
    """What a child loads for each way, torch.compile of the eager one among them if `compiled`."""
    op = {"op": spec.op, "source": spec.source}
    found: dict[str, dict[str, Any]] = {name: {**op, "baseline": name} for name in spec.baselines}
    if compiled:
        found["compile"] = {**op, "baseline": "eager", "compile": True}
    return found


def measure(spec: KernelSpec, timed: Sequence[TimedCase], workers: Mapping[str, Worker]) -> tuple[Baseline, float]:
    """Latencies in us of the ways by name, and of the child called CANDIDATE, interleaved.

    Raises: Rejected when that one fails, or another is killed; MeasurementError when no way can be timed.
    """
    contest = _surviving(spec, timed, workers)
    contest.run(BASELINE_ROUNDS)
    latencies = {name: contest.latency_us(name) for name in contest.rounds if name != CANDIDATE}
    if not latencies:
        raise MeasurementError(f"PyTorch itself cannot run {spec.op} here", hint="see the log")
    return Baseline(latencies_us=latencies), contest.latency_us(CANDIDATE)


def _surviving(spec: KernelSpec, timed: Sequence[TimedCase], workers: Mapping[str, Worker]) -> Contest:
    """A contest of those children that can be timed at all."""
    alive = dict(workers)
    for name, worker in workers.items():
        try:
            worker.load()
            Contest(spec, timed, {name: worker}, first_deadline_s=COMPILE_DEADLINE_S)
        except Rejected as rejected:
            if name == CANDIDATE or SIGKILLED in rejected.reason:
                raise
            log.warning("baseline %r of %s cannot be timed: %s", name, spec.op, rejected.reason)
            del alive[name]
    return Contest(spec, timed, alive, first_deadline_s=COMPILE_DEADLINE_S)
