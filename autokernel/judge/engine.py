"""`Judge`: five stages, screening, interleaved timing and confirmation for the candidates of one op."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch

from autokernel.errors import WorkerError
from autokernel.judge import baselines, devicehealth, places, placing
from autokernel.judge.ahead import MOST_CONTEXTS, CompileAhead
from autokernel.judge.children import EarlyChild
from autokernel.judge.contest import Contest
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.imports import borrowed
from autokernel.judge.kernelnames import others_work
from autokernel.judge.margin import KEEP_MARGIN
from autokernel.judge.rejected import Rejected
from autokernel.judge.sanitizer import cases_for, sanitize
from autokernel.judge.stages import STAGES, Stage
from autokernel.judge.timing import (
    CANDIDATE,
    GPU_SCREEN_ROUNDS,
    SCREEN_ROUNDS,
    Duel,
    Schedule,
    are_large,
    contest_of,
    pooled,
    schedule,
)
from autokernel.judge.trial import Trial
from autokernel.judge.worker import Worker
from autokernel.records import Baseline, Case, Outcome, StageReport, TimedCase, Timing, Verdict
from autokernel.spec import KernelSpec
from autokernel.target import Target, of_index
from autokernel.timed import by_weight, timed_calls

log = logging.getLogger(__name__)

SCREEN_BELOW = 0.97
"""After smoke, a candidate whose speedup's upper bound is under this is plainly slower."""

SURELY_BELOW, STEADY = 0.6, 0.8
"""Under the first one pair of processes is enough to say so: memory that lies badly does not cost that much. But low to
high of its interval must be above the second: wider ones are of a machine that is busy with something else."""


class Judge:
    """Judges candidates for one op on the calls of one model; every child that it starts ends with the call."""

    def __init__(
        self,
        *,
        server: ForkServer,
        spec: KernelSpec,
        dtypes: tuple[str, ...],
        cases: Sequence[TimedCase],
        builds: Path,
    ) -> None:
        """`cases` are the model's calls: all are checked, and the few that move the most bytes are timed.

        `builds` is the folder under which every candidate gets a folder of its own to compile in.
        """
        self._server, self.spec, self._builds = server, spec, builds
        self._dtypes = dtypes
        self._cases, self.timed = by_weight(spec, cases), timed_calls(spec, cases)

    def evaluate(
        self, kernel_py: str, incumbent: str | None = None, *, timing: bool = True, all_stages: bool = True
    ) -> Outcome:
        """The verdict on a candidate. With `incumbent` (a kernel text) it is screened, timed against it and confirmed.

        Without an incumbent, or with `timing` off, only the stages run. `all_stages` off leaves out those after smoke,
        for a benchmark of the timing by kernels that are known to be right.
        """
        start = time.perf_counter()
        stages: list[StageReport] = []
        verdict, stage, reason = Verdict.PASS, "", ""
        measured: Timing | None = None
        usable = self._usable_bytes()
        worker = self._start(kernel_py)
        try:
            measured = self._experiment(worker, kernel_py, incumbent if timing else None, stages, all_stages=all_stages)
        except Rejected as rejected:
            verdict, reason = rejected.verdict, rejected.reason
            stage = stages[-1].stage if stages and stages[-1].verdict is not Verdict.PASS else "timing"
        except _Screened as screened:
            verdict, stage, reason, measured = Verdict.SCREENED, "screening", str(screened), screened.timing
        finally:
            peak = worker.peak_memory_mb()
            worker.close()
        if usable is not None:
            devicehealth.await_memory(usable)
            self._server.keep_ready(devicehealth.idle_children())
        return Outcome(
            verdict=verdict,
            stage=stage,
            reason=reason,
            stages=tuple(stages),
            timing=measured,
            peak_memory_mb=peak,
            seconds=time.perf_counter() - start,
        )

    def baseline(self, kernel_py: str, *, compiled: bool = True) -> tuple[Baseline, float]:
        """Latency of PyTorch's own ways and of `kernel_py` (the starter, already judged), interleaved, in us.

        A way that PyTorch cannot run here (no compiler for torch.compile, say) is left out with a warning.
        Raises: MeasurementError when none can be timed; WorkerError when a child is killed, or the starter fails now.
        """
        scratch = self._builds.parent / "pytorch"  # one for all ops: torch.compile keeps a precompiled header there
        workers = {
            name: Worker(self._server, target, scratch)
            for name, target in baselines.targets(self.spec, compiled=compiled).items()
        }
        workers[CANDIDATE] = self._start(kernel_py)
        try:
            return baselines.measure(self.spec, self.timed, workers)
        except Rejected as rejected:
            raise WorkerError(f"PyTorch's own ways could not be timed: {rejected.reason}", hint="run it again")
        finally:
            for worker in workers.values():
                worker.close()

    # -- parts

    def _experiment(
        self, worker: Worker, kernel_py: str, incumbent: str | None, stages: list[StageReport], *, all_stages: bool
    ) -> Timing | None:
        """Every stage, with screening after the first, then timing and confirmation. Raises: Rejected, _Screened."""
        with ExitStack() as stack:
            rival = None if incumbent is None else stack.enter_context(EarlyChild(self._start(incumbent), self._first))
            ahead = stack.enter_context(self._compile_ahead(kernel_py)) if all_stages and self._on_gpu else None
            self._run_stage(*STAGES[0], self._trial(worker), kernel_py, stages)
            if incumbent is None or rival is None:
                self._run_others(worker, kernel_py, stages, ahead, all_stages=all_stages)
                return None
            screening = self._screen(worker, rival, kernel_py, incumbent)
            plan = schedule(pooled([screening]).candidate_us / sum(item.calls for item in self.timed))
            known = screening.calls if self._on_gpu else None
            duel = stack.enter_context(self._duel(kernel_py, incumbent, self._watch, known))
            duel.prepare(plan.pairs)  # they get ready beside the stages
            self._run_others(worker, kernel_py, stages, ahead, all_stages=all_stages)
            if self._on_gpu and are_large(self.spec, self.timed):
                worker.close()
            measured = self._time(duel, plan)
        if measured.speedup.low <= 1 + KEEP_MARGIN:
            return measured
        if self._on_gpu:
            self._sanitize(kernel_py, worker.scratch, stages)
        return self._confirm(kernel_py, incumbent, plan, known)

    @property
    def _on_gpu(self) -> bool:
        return self._server.device != "cpu"

    def _first(self, child: Worker) -> None:
        """Have a child load its kernel and, on a GPU, make its first calls: compiled before, it loads what that left.

        Raises: Rejected.
        """
        child.load()
        if self._on_gpu:
            for item in self.timed:
                child.compile(list(self.spec.arguments(item.case).values()))

    def _compile_ahead(self, kernel_py: str) -> CompileAhead:
        gpu = of_index(torch.cuda.current_device())
        return CompileAhead(self.spec, self._cases_ahead(), lambda: self._start(kernel_py, compiling_for=gpu))

    def _run_others(
        self,
        worker: Worker,
        kernel_py: str,
        stages: list[StageReport],
        ahead: CompileAhead | None,
        *,
        all_stages: bool,
    ) -> None:
        """The stages after smoke, if asked for. Raises: Rejected."""
        if not all_stages:
            return
        with ExitStack() as stack:
            if ahead is not None and not ahead.works():
                on_gpu = CompileAhead(
                    self.spec, self._cases_ahead(), lambda: self._start(kernel_py), most=MOST_CONTEXTS
                )
                ahead = stack.enter_context(on_gpu)
            for name, run in STAGES[1:]:
                self._run_stage(name, run, self._trial(worker, ahead), kernel_py, stages)

    def _usable_bytes(self) -> int | None:
        return devicehealth.usable_bytes() if self._on_gpu else None

    def _start(self, kernel_py: str, *, compiling_for: Target | None = None) -> Worker:
        folder = places.of_text(self._builds, kernel_py)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            path = placing.place(kernel_py, folder)
        except OSError:  # an earlier child has made something else of its folder
            folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=self._builds))
            path = placing.place(kernel_py, folder)
        return Worker(self._server, {"kernel": str(path)}, folder, compiling_for=compiling_for)

    def _cases_ahead(self) -> list[Case]:
        """What the stages will call the kernel on, in their order. The first stage does not wait: while the candidate's
        own child compiles its first case, others compile its next ones."""
        own = [*self.spec.cases, self.spec.stress_case, *self.spec.edges]
        first, *others = ([case.with_dtype(dtype) for dtype in self._dtypes] for case in own)
        return [*first, *(item.case for item in self._cases), *chain.from_iterable(others)]

    def _run_stage(self, name: str, run: Stage, trial: Trial, kernel_py: str, stages: list[StageReport]) -> None:
        worker = trial.worker
        start, checked, verdict, reason = time.perf_counter(), 0, Verdict.PASS, ""
        try:
            if name == STAGES[0][0]:  # compile errors belong to the first stage
                placing.check_syntax(kernel_py)
                worker.load()
            checked = run(trial)
            if taken := borrowed(worker.scratch, self._server.device):
                raise Rejected(Verdict.DELEGATES, taken)
        except Rejected as rejected:
            verdict, reason = rejected.verdict, rejected.reason
            raise
        finally:
            seconds = time.perf_counter() - start
            stages.append(StageReport(stage=name, verdict=verdict, cases=checked, seconds=seconds, reason=reason))

    def _trial(self, worker: Worker, ahead: CompileAhead | None = None) -> Trial:
        return Trial(
            spec=self.spec,
            worker=worker,
            dtypes=self._dtypes,
            user_cases=tuple(item.case for item in self._cases),
            await_case=ahead.await_case if ahead else None,
        )

    def _screen(self, worker: Worker, rival: EarlyChild, kernel_py: str, incumbent: str) -> Contest:
        """End a candidate that is plainly slower, by a second and younger pair where the first does not say so loudly.

        The last contest, where it goes on.

        Raises: Rejected, _Screened.
        """
        rounds = GPU_SCREEN_ROUNDS if self._on_gpu else SCREEN_ROUNDS
        contests = [contest_of(self.spec, self.timed, worker, rival.ready())]
        contests[0].run(rounds)
        rival.kill()
        speedup = pooled(contests).speedup
        if speedup.high < SCREEN_BELOW and (speedup.high >= SURELY_BELOW or speedup.low < STEADY * speedup.high):
            with self._start(kernel_py) as ours, self._start(incumbent) as theirs:
                ours.load()
                theirs.load()
                contests.append(contest_of(self.spec, self.timed, ours, theirs))
                contests[1].run(rounds)
        for contest in contests:
            contest.forget_inputs()
        timing = pooled(contests)
        if timing.speedup.high < SCREEN_BELOW:
            if self._on_gpu:  # a context takes a while to end: all of them at once
                worker.kill()
            raise _Screened(timing)
        return contests[-1]

    def _duel(
        self, kernel_py: str, incumbent: str, inspect: Callable[[Worker], None], known: Mapping[str, list[int]] | None
    ) -> Duel:
        start = (lambda: self._start(kernel_py), lambda: self._start(incumbent))
        return Duel(self.spec, self.timed, start, self._first, inspect, known)

    def _time(self, duel: Duel, plan: Schedule) -> Timing:
        duel.run(plan.rounds)
        measured = duel.timing()
        if measured.speedup.low <= 1 + KEEP_MARGIN < measured.speedup.estimate:  # undecided: as many again
            duel.prepare(plan.pairs)
            duel.run(plan.rounds)
            measured = duel.timing()
        return measured

    def _watch(self, worker: Worker) -> None:
        """One more call of each timed case, with no guard or mode that a kernel could notice. Raises: Rejected."""
        trial = self._trial(worker)
        for item in self.timed:
            trial.check_outputs(item.case, [trial.inputs(item.case)], guarded=False)

    def _sanitize(self, kernel_py: str, scratch: Path, stages: list[StageReport]) -> None:
        """What compute-sanitizer says of a winner, where it is installed. Raises: Rejected."""
        start, cases = time.perf_counter(), cases_for(self.spec, self._cases)
        path = placing.place(kernel_py, scratch)
        findings = sanitize(path, cases, self._server.policy, scratch, self.spec.source)
        done = [finding for finding in findings if finding.failure is None]
        if not done:
            return
        faults = [f"{finding.tool}: {finding.fault}" for finding in done if finding.fault]
        verdict = Verdict.FAIL if faults else Verdict.PASS
        seconds, reason = time.perf_counter() - start, "; ".join(faults)
        stages.append(StageReport(stage="sanitizer", verdict=verdict, cases=len(cases), seconds=seconds, reason=reason))
        if faults:
            raise Rejected(verdict, reason)

    def _confirm(self, kernel_py: str, incumbent: str, plan: Schedule, known: Mapping[str, list[int]] | None) -> Timing:
        """Time a winner once more, in other processes on new inputs; this number is the one that counts."""

        def inspect(worker: Worker) -> None:
            self._watch(worker)
            for index in range(len(self.timed)):
                if work := others_work(worker.kernel_names(str(index)), kernel_py):
                    raise Rejected(Verdict.DELEGATES, f"the GPU's time goes to {work}")

        with self._duel(kernel_py, incumbent, inspect, known) as duel:
            duel.prepare(plan.confirming)
            duel.run(plan.rounds)
            return duel.timing(pair_by_pair=plan.pair_by_pair)


class _Screened(Exception):
    def __init__(self, timing: Timing) -> None:
        super().__init__(f"plainly slower than the incumbent: {timing.speedup}")
        self.timing = timing
