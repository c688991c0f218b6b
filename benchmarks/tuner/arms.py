"""The searches that are compared, by name: each runs one session until it stops by itself or the session is over."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from arms_helion import QUICK, helion_arm
from arms_kerneltuner import kernel_tuner_arm
from arms_optuna import tpe
from seeding import cost_s, heuristics_of
from simulated import Over, Session, TableProvider

from autokernel.tuner.coding import Features
from autokernel.tuner.lfbo import Lfbo, Settings
from autokernel.tuner.proposing import Candidates
from autokernel.tuner.space import Point
from autokernel.tuner.strategies import Pattern
from autokernel.tuner.trials import Strategy
from autokernel.tuner.tuning import FIRST_BATCH, Budget, tune

OURS = "ours"
SEEDS = 8
"""Of the heuristics."""

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


Make = Callable[[Session, list[Point], Features | None], Strategy]


def _tuner(make: Make, *, seeded: bool = True, featured: bool = True, batch: int | None = None) -> Callable[..., None]:
    """A strategy in the tuner's own loop, from the kernel's CONFIG and, if `seeded`, the heuristics' seeds."""

    def run(session: Session) -> None:
        space, provider = session.table.space, TableProvider(session)
        knowing = heuristics_of(session.table) if seeded or featured else None
        own = _config(session)
        seeds = [*own, *(knowing.seeds(SEEDS) if knowing and seeded else ())]
        strategy = make(session, seeds, knowing.features if knowing and featured else None)
        with contextlib.suppress(Over):
            if knowing:  # as `KernelTuner` does it: CONFIG is measured meanwhile
                session.compile(own)
                session.compile(seeds[:FIRST_BATCH], from_s=cost_s(knowing))
                provider.measure(own)
                session.now_s = max(session.now_s, cost_s(knowing))
            tune(
                space,
                provider,
                strategy,
                Budget(evaluations=session.budget),
                seeds=seeds,
                batch=batch,
            )

    return run


def _config(session: Session) -> list[Point]:
    default = session.table.space.locate(session.table.default)
    return [] if default is None else [default]


def _lfbo(settings: Settings | None = None) -> Make:
    def make(session: Session, seeds: list[Point], features: Features | None) -> Strategy:
        return Lfbo(
            space=session.table.space,
            seed=session.seed,
            seeds=seeds,
            features=features,
            settings=settings or Settings(),
        )

    return make


def _pattern(session: Session, seeds: list[Point], _features: Features | None) -> Strategy:
    return Pattern(space=session.table.space, seed=session.seed, seeds=seeds)


def _random(session: Session) -> None:
    """Every allowed configuration is equally likely to be next, the default one too: the expectation is known."""
    space = session.table.space
    points = Candidates(space).open(set(), (), random.Random(0))
    order = random.Random(f"random/{session.table.name}/{session.seed}").sample(points, len(points))
    with contextlib.suppress(Over):
        for first in range(0, len(order), RANDOM_BATCH):
            session.measure(order[first : first + RANDOM_BATCH])


ARMS: dict[str, Arm] = {
    OURS: Arm(run=_tuner(_lfbo())),
    "pattern": Arm(run=_tuner(_pattern, seeded=False, featured=False)),
    "random": Arm(run=_random),
    "ours without heuristics": Arm(run=_tuner(_lfbo(), seeded=False, featured=False), ablation=True),
    "ours without seeds": Arm(run=_tuner(_lfbo(), seeded=False), ablation=True),
    "ours without features": Arm(run=_tuner(_lfbo(), featured=False), ablation=True),
    "ours without Gaussian process": Arm(run=_tuner(_lfbo(Settings(smooth=False))), ablation=True),
    "ours without forest": Arm(run=_tuner(_lfbo(Settings(forest_power=0.0))), ablation=True),
    "ours without diversity": Arm(run=_tuner(_lfbo(Settings(diversity=0.0))), ablation=True),
    "ours in batches of 8": Arm(run=_tuner(_lfbo(), batch=8), ablation=True),
    "ours in batches of 14": Arm(run=_tuner(_lfbo(), batch=14), ablation=True),
    "pattern from our seeds": Arm(run=_tuner(_pattern, featured=False), ablation=True),
    "helion PatternSearch": Arm(run=helion_arm("PatternSearch"), package="helion"),
    "helion LFBOPatternSearch": Arm(run=helion_arm("LFBOPatternSearch"), package="helion"),
    "helion LFBOTreeSearch": Arm(run=helion_arm("LFBOTreeSearch"), package="helion"),
    "helion PatternSearch, quick": Arm(run=helion_arm("PatternSearch", **QUICK), package="helion"),
    "helion LFBOTreeSearch, quick": Arm(run=helion_arm("LFBOTreeSearch", **QUICK), package="helion"),
    "optuna TPE": Arm(run=tpe, package="optuna"),
    **{f"kernel_tuner {name}": Arm(run=kernel_tuner_arm(name), package="kernel_tuner") for name in KERNEL_TUNER},
}
