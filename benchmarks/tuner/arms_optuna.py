"""Optuna's TPE on a recorded table, by ask and tell in batches."""

from __future__ import annotations

import math
import warnings
from typing import Any

from simulated import Over, Session

from autokernel.tuner.space import Point

BATCH = 8
"""Configurations asked for before the first of them is told; the sampler takes those under way for bad ones."""

ASKS_PER_EVALUATION = 10
"""It may ask again for what is known or forbidden, which costs nothing; so often before the run is ended."""

FAILED = 10.0
"""A failure is told as so many times the slowest latency so far."""


def tpe(session: Session) -> None:
    """One run, the kernel's CONFIG first. Ordered knobs are integers, others categories; latencies are told as logs."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(seed=session.seed, multivariate=True, constant_liar=True)
    space = session.table.space
    distributions: dict[str, Any] = {
        knob.name: optuna.distributions.IntDistribution(0, len(knob.values) - 1)
        if knob.is_ordered
        else optuna.distributions.CategoricalDistribution(list(range(len(knob.values))))
        for knob in space.knobs
    }
    study = optuna.create_study(sampler=sampler)
    default = space.locate(session.table.default)
    if default is not None:
        study.enqueue_trial(dict(zip(distributions, default, strict=True)))
    try:
        for _ in range(ASKS_PER_EVALUATION * session.budget // BATCH):
            asked = [study.ask(distributions) for _ in range(BATCH)]
            points = [tuple(trial.params[name] for name in distributions) for trial in asked]
            session.measure(points)
            for trial, point in zip(asked, points, strict=True):
                value = _told(session, point)
                study.tell(trial, value, state=None if value is not None else optuna.trial.TrialState.FAIL)
    except Over:
        pass


def _told(session: Session, point: Point) -> float | None:
    """None for what the constraints forbid."""
    if point not in session.cells:
        return None
    us = session.reading(point)
    slowest = max((session.reading(step.cell.point) or 0.0 for step in session.steps), default=0.0)
    return math.log(us if us is not None else FAILED * max(slowest, 1.0))
