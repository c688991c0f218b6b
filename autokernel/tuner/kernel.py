"""Tunes a whole kernel.py on this machine: what is known of it, the search, and the text with the winner in CONFIG."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autokernel.backends import require_backend
from autokernel.ceilings import published
from autokernel.judge.forkserver import ForkServer
from autokernel.kernelfile import with_config
from autokernel.numbers import Numbers
from autokernel.records import TimedCase
from autokernel.settings import device_of
from autokernel.spec import KernelSpec
from autokernel.target import Target, of_index
from autokernel.tuner import forest
from autokernel.tuner.compiling import Compiler
from autokernel.tuner.heuristics import Heuristics
from autokernel.tuner.importance import in_words
from autokernel.tuner.live import LiveProvider
from autokernel.tuner.space import Point, Space
from autokernel.tuner.strategies import DEFAULT, Task, strategy_of
from autokernel.tuner.studies import gather
from autokernel.tuner.trials import Status, Trial
from autokernel.tuner.tuning import Budget, Tuned, tune

TIMING = "autokernel.tuner.timingchild"


class WrongResults(Exception):
    """The kernel's own configuration runs and its results are wrong: no other is worth a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What came of it. `text` is the kernel.py with the best CONFIG, the one that was there if none was faster.

    `guess` is the configuration that was expected to be best without measuring. `by_case` has the us of a call of each
    timed case for every configuration that ran.
    """

    text: str
    space: Space
    guess: Point
    outcome: Tuned
    by_case: dict[Point, tuple[float, ...]]
    explanation: list[str]
    """Why `guess`, line by line."""

    @property
    def is_faster(self) -> bool:
        """Whether another configuration than the kernel's own won."""
        return self.outcome.best is not None and self.outcome.best != self.space.locate(self.space.config)

    @property
    def own_us(self) -> float | None:
        """The reading of the CONFIG that was there, in us; None when it did not run."""
        own = self.space.locate(self.space.config)
        return next((t.latency_us for t in self.outcome.trials if t.point == own and t.is_valid), None)

    @property
    def numbers(self) -> Numbers:
        """The same for a run's journal."""
        return Numbers(
            config=self.outcome.config if self.is_faster else None,
            own_us=self.own_us,
            best_us=self.outcome.latency_us,
            evaluations=self.outcome.evaluations,
            seconds=self.outcome.elapsed_s,
            words=self.words,
        )

    @property
    def words(self) -> str:
        """Which knobs matter, the best configurations, and what fails: for whoever edits the kernel next."""
        return in_words(self.space, self.outcome.trials)


@contextmanager
def tuner_for(
    spec: KernelSpec, timed: Sequence[TimedCase], backend: str, sandbox: str = "auto"
) -> Iterator[KernelTuner]:
    """A tuner with a server and a folder of its own. Raises: ConfigError, DeviceError, WorkerError."""
    require_backend(backend)
    with (
        tempfile.TemporaryDirectory(prefix="autokernel-tune-") as builds,
        ForkServer(device_of(backend), sandbox=sandbox, builds=Path(builds), body=TIMING) as server,
        KernelTuner(spec, timed, server=server, folder=Path(builds) / "tuning", sandbox=sandbox) as tuner,
    ):
        yield tuner


class KernelTuner:
    """Tunes kernels of one op for the calls in `timed`; use as a context manager.

    The children that time come from `server`, which has the device; what is compiled lies in `folder`, below its own.
    """

    def __init__(
        self,
        spec: KernelSpec,
        timed: Sequence[TimedCase],
        *,
        server: ForkServer,
        folder: Path,
        sandbox: str = "auto",
    ) -> None:
        self._spec, self._timed, self._server, self._folder = spec, timed, server, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._gpu = published(server.device)
        target = Target() if server.device == "cpu" else of_index(torch.cuda.current_device())
        self._compiler = Compiler([item.case for item in timed], target, builds=folder, sandbox=sandbox)

    def tune(
        self,
        text: str,
        budget: Budget,
        *,
        search: str = DEFAULT,
        seed: int = 0,
        parent: Sequence[Trial] = (),
        journal: Path | None = None,
        told: Callable[[Trial], None] = lambda _trial: None,
        right_only: bool = False,
    ) -> Tuning:
        """Search the configurations of `text`, its own first and then those that promise most.

        `parent` are trials of the kernel that it was edited from, `told` hears of every new one. With a `journal` that
        holds the beginning of the same search, it goes on from there.
        Raises: ConfigError for a text with nothing to tune or an unknown search; LogError; WorkerError; with
        `right_only`, WrongResults.
        """
        space = Space.read(text)
        own = space.locate(space.config)

        def heard(trial: Trial) -> None:
            told(trial)
            if right_only and trial.point == own and trial.status is Status.WRONG:
                raise WrongResults(trial.error)

        provider = LiveProvider(
            text,
            space,
            self._spec,
            self._timed,
            server=self._server,
            compiler=self._compiler,
            folder=self._folder,
            told=heard,
        )
        with closing(provider), ThreadPoolExecutor(2) as beside:
            beside.submit(forest.preload)
            first = own if journal is None or not journal.exists() else None
            provider.prepare([] if first is None else [first])
            ready = beside.submit(provider.get_ready, first)
            facts = gather(text, self._timed[0].case, self._compiler, self._gpu)
            heuristics = Heuristics(facts)
            seeds = [point for point in (own, *heuristics.seeds()) if point is not None]
            # Until the GPU's child is ready there is nothing else to do.
            provider.prepare(seeds if budget.evaluations is None else seeds[: budget.evaluations])
            ready.result()
            features = heuristics.features if facts.studies else None
            task = Task(space=space, seed=seed, seeds=seeds, parent=parent, features=features)
            outcome = tune(space, provider, strategy_of(search, task), budget, seeds=seeds, journal_path=journal)
        return Tuning(
            text=text if outcome.config is None or outcome.best == own else with_config(text, outcome.config),
            space=space,
            guess=heuristics.default(),
            outcome=outcome,
            by_case=provider.by_case(),
            explanation=heuristics.explain(heuristics.default()),
        )

    def close(self) -> None:
        """End the compilers."""
        self._compiler.close()

    def __enter__(self) -> KernelTuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
