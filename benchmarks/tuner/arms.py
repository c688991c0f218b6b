"""The searches that are compared, by name: each runs one session until it stops by itself or the session is over."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from arms_helion import QUICK, helion_arm
from arms_kerneltuner import kernel_tuner_arm
from arms_optuna import tpe
from simulated import Over, Session, TableProvider

from autokernel.tuner.lfbo import Lfbo, Settings
from autokernel.tuner.proposing import Candidates
from autokernel.tuner.space import Point, Space
from autokernel.tuner.strategies import Task, strategy_of
from autokernel.tuner.trials import Strategy
from autokernel.tuner.tuning import Budget, tune

OURS = "lfbo"
RANDOM_BATCH = 16


KERNEL_TUNER = (
    "genetic_algorithm",
    "greedy_ils",
    "diff_evo",
    "simulated_annealing",
    "bayes_opt",
    "pso",
    "hybrid_vndx",
    "adaptive_tabu_greywolf",
)
"""All that were tried on the dev half."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A search. `package` is what must be installed for it; an `ablation` is ours with something left out."""

    run: Callable[[Session], None]
    package: str = ""
    ablation: bool = False


def _ours(make: Callable[[Session, Space, list[Point]], Strategy]) -> Callable[[Session], None]:
    """A strategy of the tuner in the tuner's own loop, with the kernel's CONFIG to begin with."""

    def run(session: Session) -> None:
        space = session.table.space
        default = space.locate(session.table.default)
        seeds = [default] if default is not None and space.allowed(default) else []
        strategy, budget = make(session, space, seeds), Budget(evaluations=session.budget)
        with contextlib.suppress(Over):
            tune(space, TableProvider(session), strategy, budget, seeds=seeds)

    return run


def _named(name: str) -> Arm:
    return Arm(
        run=_ours(lambda session, space, seeds: strategy_of(name, Task(space=space, seed=session.seed, seeds=seeds)))
    )


def _lfbo_with(settings: Settings) -> Arm:
    def make(session: Session, space: Space, seeds: list[Point]) -> Strategy:
        return Lfbo(space=space, seed=session.seed, seeds=seeds, settings=settings)

    return Arm(run=_ours(make), ablation=True)


def _random(session: Session) -> None:
    """Every allowed configuration is equally likely to be next, the default one too: the expectation is known."""
    space = session.table.space
    points = Candidates(space).open(set(), (), random.Random(0))
    order = random.Random(f"random/{session.table.name}/{session.seed}").sample(points, len(points))
    with contextlib.suppress(Over):
        for first in range(0, len(order), RANDOM_BATCH):
            session.measure(order[first : first + RANDOM_BATCH])


ARMS: dict[str, Arm] = {
    OURS: _named("lfbo"),
    "pattern": _named("pattern"),
    "random": Arm(run=_random),
    "lfbo, no Gaussian process": _lfbo_with(Settings(smooth=False)),
    "lfbo, no diversity": _lfbo_with(Settings(diversity=0.0)),
    "lfbo, no forest": _lfbo_with(Settings(forest_power=0.0)),
    "helion PatternSearch": Arm(run=helion_arm("PatternSearch"), package="helion"),
    "helion LFBOPatternSearch": Arm(run=helion_arm("LFBOPatternSearch"), package="helion"),
    "helion LFBOTreeSearch": Arm(run=helion_arm("LFBOTreeSearch"), package="helion"),
    "helion PatternSearch, quick": Arm(run=helion_arm("PatternSearch", **QUICK), package="helion"),
    "helion LFBOTreeSearch, quick": Arm(run=helion_arm("LFBOTreeSearch", **QUICK), package="helion"),
    "optuna TPE": Arm(run=tpe, package="optuna"),
    **{f"kernel_tuner {name}": Arm(run=kernel_tuner_arm(name), package="kernel_tuner") for name in KERNEL_TUNER},
}
