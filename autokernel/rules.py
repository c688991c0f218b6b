"""When to move on from an op: one small class per reason, each a question asked of the op's history.

A rule answers with the reason in one line, or None to go on. The loop asks all of them before each experiment. Limits
of the whole run (hours, number of experiments) are the loop's own affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from autokernel.errors import ConfigError
from autokernel.history import KernelHistory


class Rule(Protocol):
    """One reason to stop working on an op."""

    def reason_to_stop(self, history: KernelHistory) -> str | None:
        """Why to move on now, in one line; None to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """Move on after `patience` reverts in a row. Every reverted experiment counts, a screened or crashed one too."""

    patience: int = 5

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience = {self.patience!r} is not a positive count", hint="use 1 or more")

    def reason_to_stop(self, history: KernelHistory) -> str | None:
        """Fires on the revert that makes the row long enough."""
        reverts = history.reverts_in_a_row
        return f"{reverts} reverts in a row" if reverts >= self.patience else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NearPeak:
    """Move on when the incumbent reaches `fraction` of the ceiling that binds; never where ceilings are unknown."""

    fraction: float = 0.90

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction = {self.fraction!r} is not in (0, 1]", hint="0.9 means 90 % of the roofline")

    def reason_to_stop(self, history: KernelHistory) -> str | None:
        """Fires at or above the fraction."""
        reached = history.roofline_fraction
        if reached is None or reached < self.fraction:
            return None
        return f"{reached:.0%} of the roofline reached (limit {self.fraction:.0%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveTime:
    """Move on after `limit_s` seconds of work on this op, summed over all sessions of the run."""

    limit_s: float = 7200.0

    def __post_init__(self) -> None:
        if not (self.limit_s > 0 and math.isfinite(self.limit_s)):
            raise ConfigError(f"limit_s = {self.limit_s!r} is not a positive time", hint="give seconds above 0")

    def reason_to_stop(self, history: KernelHistory) -> str | None:
        """Fires once the time is used up."""
        if history.active_s < self.limit_s:
            return None
        return f"{history.active_s / 60:.1f} min of active time used (limit {self.limit_s / 60:.1f} min)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpeedup:
    """Move on when the incumbent is `factor` times as fast as the fastest way that PyTorch itself offers."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        if not (self.factor >= 1.0 and math.isfinite(self.factor)):
            raise ConfigError(f"factor = {self.factor!r} is not a speedup", hint="use 1.0 or more, 2.0 means 2x")

    def reason_to_stop(self, history: KernelHistory) -> str | None:
        """Fires at or above the factor."""
        speedup = history.speedup_vs_baseline
        if speedup < self.factor:
            return None
        return f"{speedup:.2f}x over PyTorch's {history.baseline.fastest} (target {self.factor:g}x)"


DEFAULT_RULES: tuple[Rule, ...] = (Plateau(), NearPeak(), ActiveTime(), TargetSpeedup())


def first_reason_to_stop(rules: Iterable[Rule], history: KernelHistory) -> str | None:
    """The first reason that any of `rules` gives, in their order; None when all of them would go on."""
    for rule in rules:
        if (reason := rule.reason_to_stop(history)) is not None:
            return reason
    return None
