"""Numbers by search in the loop: which kernels are searched, for how long, what comes of it, and what an earlier search
gives the next; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autokernel.errors import AutokernelError, ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import Value, parse_kernel, with_config
from autokernel.kerneltext import by_digest
from autokernel.records import Decision, Proposal
from autokernel.rundir import RunDir
from autokernel.settings import OUTSIDE
from autokernel.structure import structure
from autokernel.tuner.journal import TrialLog
from autokernel.tuner.space import Space
from autokernel.tuner.trials import Trial

SHARE_OF_REST = 0.1
"""Of the run's time that is left: so much may one search take at most."""

LOOKED_BACK = 40
"""Experiments: a structure from before them is searched once more, which is cheaper than to read a night's texts."""

TUNER = "tuner"
"""Who proposes the starter with better numbers."""

LEAST_S = 5.0
"""A search that may take less is not worth beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a search came to. `config` is the winner, None where the kernel's own is best; `words` are for the agent."""

    config: Mapping[str, Value] | None
    own_us: float | None
    best_us: float | None
    evaluations: int
    seconds: float
    words: str

    @property
    def gain(self) -> str:
        """`24 configurations: 71.2 -> 63.0 us`."""
        if self.best_us is None:
            return f"{self.evaluations} configurations, none runs"
        before = "" if self.own_us is None or self.config is None else f"{self.own_us:.1f} -> "
        return f"{self.evaluations} configurations: {before}{self.best_us:.1f} us"

    def to_json(self) -> dict[str, Any]:
        """A JSON object whose fields `Numbers` takes."""
        return {
            "config": None if self.config is None else dict(self.config),
            "own_us": self.own_us,
            "best_us": self.best_us,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "words": self.words,
        }


def searches_starters(agent: str) -> bool:
    """Whether a run of this agent begins an op with a search over its starter: not one that plays what was recorded, or
    is driven from outside, where every turn opens the run anew."""
    return agent != OUTSIDE and not agent.startswith("replay")


def improved(kernel_py: str, numbers: Numbers) -> Proposal | None:
    """The kernel with the configuration that a search found, as an experiment; None where its own is best."""
    if numbers.config is None:
        return None
    text = with_config(kernel_py, numbers.config)
    return Proposal(hypothesis=f"numbers by search, {numbers.gain}", kernel_py=text, agent=TUNER, numbers=numbers.words)


def may_take_s(tune_s: float, left_s: float) -> float:
    """Seconds for one search, 0 for none, where `tune_s` is the user's limit and `left_s` what the run has left."""
    seconds = min(tune_s, SHARE_OF_REST * left_s)
    return seconds if seconds >= LEAST_S else 0.0


def has_knobs(text: str) -> bool:
    """Whether the kernel.py has knobs with a choice."""
    try:
        return bool(Space.read(text).knobs)
    except ConfigError:
        return False  # the judge says what is wrong with it


def is_new_structure(history: KernelHistory, text: str) -> bool:
    """Whether `text` differs by more than CONFIG from the starter, the incumbent and the op's newest experiments."""
    newest = (each.proposal.kernel_py for each in history.experiments[-LOOKED_BACK:])
    earlier = (history.incumbent, history.starter, *newest)
    return _skeleton(text) not in {_skeleton(kernel) for kernel in earlier if kernel is not None}


def parents_trials(run_dir: RunDir, history: KernelHistory, text: str) -> list[Trial]:
    """What the search of the incumbent measured, as trials of `text`'s own space; those that it does not have are left
    out, and all of them where the incumbent was not searched."""
    # An experiment that only changed CONFIG has no search of its own: that of the structure before it counts.
    kept = [0, *(each.number for each in history.experiments if each.decision is Decision.KEEP)]
    paths = [path for number in kept if (path := run_dir.tuning_path(history.op, number)).is_file()]
    if not paths:
        return []
    path = paths[-1]
    try:
        theirs, ours = Space.read(history.incumbent), Space.read(text)
        return [
            trial
            for old in TrialLog.trials_of(path)
            if len(old.point) == len(theirs.knobs) and (trial := _moved(old, theirs, ours)) is not None
        ]
    except AutokernelError:
        return []  # a hint only; a damaged one is no reason to stop a night


def _moved(trial: Trial, theirs: Space, ours: Space) -> Trial | None:
    point = ours.locate({**ours.config, **theirs.config_at(trial.point)})
    return None if point is None else replace(trial, point=ours.canonical(point), digest=None)


@by_digest(maxsize=2 * LOOKED_BACK)
def _skeleton(text: str) -> str:
    try:
        return structure(with_config(text, {}) if parse_kernel(text).config else text)
    except ConfigError:
        return structure(text)
