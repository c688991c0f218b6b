"""`Bench`: the judge of the op at hand, with its server restarted when our own processes fail; and the op's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autokernel import timed
from autokernel.errors import AutokernelError, MeasurementError, OracleError, WorkerError
from autokernel.judge import devicehealth, devicememory
from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.rejected import SIGKILLED
from autokernel.loading import get_spec
from autokernel.numbers import Numbers
from autokernel.recording import Work
from autokernel.records import Baseline, Outcome, PlannedOp, Verdict
from autokernel.roofline import Ceilings
from autokernel.settings import device_of, dtypes_of
from autokernel.tuner.trials import Trial
from autokernel.tuner.tuning import Budget
from autokernel.usercode import first_line

if TYPE_CHECKING:
    from autokernel.tuner.kernel import KernelTuner

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_EVALUATIONS = 48
"""Of one search in the loop: a few dozen readings find what is to be found near the seeds."""

TUNING = "tuning"
"""Folder among an op's builds that the judge's own children never look into."""

WORKER_RETRIES = 2
"""How often a judge whose own processes fail is started anew before the run stops for a person."""


@contextmanager
def _memory_found() -> Iterator[None]:
    """Raises: MeasurementError in place of an error that says that this process, not a child of it, has no memory."""
    try:
        yield
    except (RuntimeError, MemoryError, OracleError) as error:
        if not devicememory.is_out_of_memory(error):
            raise
        devicememory.release_unused()
        raise MeasurementError(
            f"the judge has no memory for its inputs and results: {first_line(error)}",
            hint="free memory on the device, or give the model smaller inputs",
        ) from None


class Bench:
    """Judges candidates of one backend for one op at a time; use as a context manager."""

    def __init__(self, builds: Path, backend: str, sandbox: str = "auto") -> None:
        self._builds, self._backend, self._sandbox = builds, backend, sandbox
        self._server = self._start_server()
        self._planned: PlannedOp | None = None
        self._judge: Judge | None = None
        self._tuner: KernelTuner | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_tuner()
        self._server.close()

    def turn_to(self, planned: PlannedOp) -> None:
        """Judge candidates for this op from now on."""
        if self._judge is not None and planned == self._planned:
            return
        self._end_tuner()
        self._planned = planned
        spec = get_spec(planned.op)
        self._judge = Judge(
            server=self._server,
            spec=spec,
            dtypes=dtypes_of(self._backend, spec.dtypes),
            cases=planned.cases,
            builds=self._builds / planned.op,
        )

    def judge(self, kernel_py: str, incumbent: str | None) -> Outcome:
        """The verdict on a candidate, timed against `incumbent` if any. Raises: WorkerError after retries.

        A child that dies by SIGKILL may be the system's choice when something else took the memory: it is judged again.
        Where the judge itself finds no memory the verdict is OOM.
        """
        begin = time.perf_counter()
        try:
            outcome = self._insist(lambda judge: judge.evaluate(kernel_py, incumbent))
            if SIGKILLED in outcome.reason:
                log.warning("a child of the judge was killed; judging the kernel once more")
                outcome = self._insist(lambda judge: judge.evaluate(kernel_py, incumbent))
        except MeasurementError as error:
            return Outcome(
                verdict=Verdict.OOM,
                stage="",
                reason=str(error),
                stages=(),
                timing=None,
                peak_memory_mb=None,
                seconds=time.perf_counter() - begin,
            )
        return outcome

    def baseline(self, kernel_py: str, *, compiled: bool) -> tuple[Baseline, float]:
        """PyTorch's latencies and `kernel_py`'s, interleaved, in us.

        Raises: MeasurementError when no way of PyTorch's can be timed, or there is no memory for them.
        """
        return self._insist(lambda judge: judge.baseline(kernel_py, compiled=compiled))

    def tune(
        self, kernel_py: str, seconds: float, *, seed: int, journal: Path, parent: Sequence[Trial]
    ) -> Numbers | None:
        """The best configuration of `kernel_py` that is found in so long, for what is timed; None where there is no
        search to speak of: its results are wrong, or our own processes fail, which is logged."""
        from autokernel.tuner.kernel import WrongResults

        try:
            with _memory_found():
                tuning = self._tuner_of(self._current()).tune(
                    kernel_py,
                    Budget(seconds=seconds, evaluations=MOST_EVALUATIONS),
                    seed=seed,
                    journal=journal,
                    parent=parent,
                    right_only=True,
                )
        except WrongResults:
            return None  # the judge says so, too, and why
        except AutokernelError as error:
            log.warning("the search for the best configuration failed (%s); the kernel is judged as it is", error)
            self._end_tuner()
            return None
        return tuning.numbers

    @property
    def work(self) -> Work:
        """FLOPs and bytes of what is timed."""
        return timed.work_of(self._current().spec, self._current().timed)

    def floor_us(self, ceilings: Ceilings) -> float | None:
        """Least time that the measured ceilings allow for what is timed; None when one is unknown."""
        return timed.floor_us(self._current().spec, self._current().timed, ceilings)

    def _tuner_of(self, judge: Judge) -> KernelTuner:
        if self._tuner is None:
            from autokernel.tuner.kernel import KernelTuner  # with Triton and scikit-learn: for runs that tune

            assert self._planned is not None
            folder = self._builds / self._planned.op / TUNING
            self._tuner = KernelTuner(
                judge.spec, judge.timed, server=self._server, folder=folder, sandbox=self._sandbox
            )
        return self._tuner

    def _end_tuner(self) -> None:
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.close()

    def _start_server(self) -> ForkServer:
        return ForkServer(device_of(self._backend), sandbox=self._sandbox, builds=self._builds)

    def _current(self) -> Judge:
        assert self._judge is not None, "turn to an op first"
        return self._judge

    def _insist(self, step: Callable[[Judge], T]) -> T:
        """What `step` gives, with the judge's processes started anew when they fail.

        Raises: WorkerError after retries; MeasurementError when this process finds no memory.
        """
        for attempt in range(WORKER_RETRIES + 1):
            try:
                with _memory_found():
                    return step(self._current())
            except WorkerError as error:
                if attempt == WORKER_RETRIES:
                    raise
                log.warning("the judge's processes failed (%s); starting them anew", error)
                planned, self._judge = self._planned, None
                assert planned is not None
                self._end_tuner()
                self._server.close()
                if self._server.device != "cpu":
                    devicehealth.wait_until_it_answers()
                self._server = self._start_server()
                self.turn_to(planned)
        raise AssertionError("unreachable")
