"""`Bench`: the judge of the op at hand, with its server restarted when our own processes fail; and the op's work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from autokernel import timed
from autokernel.errors import WorkerError
from autokernel.judge import devicehealth
from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.loading import get_spec
from autokernel.recording import Work
from autokernel.records import Baseline, Outcome, PlannedOp
from autokernel.roofline import Ceilings
from autokernel.settings import DTYPES_OF_BACKEND, device_of

log = logging.getLogger(__name__)
T = TypeVar("T")

WORKER_RETRIES = 2
"""How often a judge whose own processes fail is started anew before the run stops for a person."""


class Bench:
    """Judges candidates of one backend for one op at a time; use as a context manager."""

    def __init__(self, builds: Path, backend: str, sandbox: str = "auto") -> None:
        self._builds, self._backend, self._sandbox = builds, backend, sandbox
        self._server = self._start_server()
        self._planned: PlannedOp | None = None
        self._judge: Judge | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def turn_to(self, planned: PlannedOp) -> None:
        """Judge candidates for this op from now on."""
        if self._judge is not None and planned == self._planned:
            return
        self._planned = planned
        self._judge = Judge(
            server=self._server,
            spec=get_spec(planned.op),
            dtypes=DTYPES_OF_BACKEND[self._backend],
            cases=planned.cases,
            builds=self._builds / planned.op,
        )

    def judge(self, kernel_py: str, incumbent: str | None) -> Outcome:
        """The verdict on a candidate, timed against `incumbent` if any. Raises: WorkerError after retries."""
        return self._insist(lambda judge: judge.evaluate(kernel_py, incumbent))

    def baseline(self, kernel_py: str, *, compiled: bool) -> tuple[Baseline, float]:
        """PyTorch's latencies and `kernel_py`'s, interleaved, in us."""
        return self._insist(lambda judge: judge.baseline(kernel_py, compiled=compiled))

    @property
    def work(self) -> Work:
        """FLOPs and bytes of what is timed."""
        return timed.work_of(self._current().spec, self._current().timed)

    def floor_us(self, ceilings: Ceilings) -> float | None:
        """Least time that the measured ceilings allow for what is timed; None when one is unknown."""
        return timed.floor_us(self._current().spec, self._current().timed, ceilings)

    def _start_server(self) -> ForkServer:
        return ForkServer(device_of(self._backend), sandbox=self._sandbox, builds=self._builds)

    def _current(self) -> Judge:
        assert self._judge is not None, "turn to an op first"
        return self._judge

    def _insist(self, step: Callable[[Judge], T]) -> T:
        for attempt in range(WORKER_RETRIES + 1):
            try:
                return step(self._current())
            except WorkerError as error:
                if attempt == WORKER_RETRIES:
                    raise
                log.warning("the judge's processes failed (%s); starting them anew", error)
                planned, self._judge = self._planned, None
                assert planned is not None
                self._server.close()
                if self._server.device != "cpu":
                    devicehealth.wait_until_it_answers()
                self._server = self._start_server()
                self.turn_to(planned)
        raise AssertionError("unreachable")
