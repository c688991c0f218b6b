"""One measured configuration, who measures it and who chooses it: what all parts of the tuner speak in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from autokernel.records import KernelResources
from autokernel.tuner.space import Point


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    """Timed, and its output was right as far as the provider looks."""
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    """It compiled, and the device refused it or faulted: too much shared memory, an illegal access."""
    TIMEOUT = "timeout"
    WRONG = "wrong"
    """It ran and its output is wrong: a bug of the kernel, not a slow configuration."""
    CENSORED = "censored"
    """It runs, and was stopped for being far slower than the best; `latency_us` is a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one configuration. `latency_us` is there when OK or CENSORED; costs are wall time.

    `digest` names the compiled binary: trials of one digest are one kernel.
    """

    point: Point
    status: Status
    latency_us: float | None = None
    compile_s: float = 0.0
    timing_s: float = 0.0
    digest: str | None = None
    resources: KernelResources | None = None
    error: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether the configuration runs and is right, fast or not."""
        return self.status in (Status.OK, Status.CENSORED)


class Strategy(Protocol):
    """Chooses what to measure next."""

    def propose(self, trials: Sequence[Trial], count: int) -> list[Point]:
        """At most `count` distinct points that are not in `trials`, most promising first; empty when none is left.

        A function of its arguments and the strategy's own seed alone, so that a search that is resumed goes on exactly.
        """
        ...


class Provider(Protocol):
    """Turns points into trials. Only `measure` is a must: a class that inherits from this one has the others."""

    def measure(self, points: Sequence[Point]) -> list[Trial]:
        """One trial per point, in their order. A configuration that fails is a trial, not an exception."""
        ...

    def prepare(self, points: Sequence[Point]) -> None:
        """Begin to compile what may be measured later, and return at once."""

    def digests(self, points: Sequence[Point]) -> list[str | None]:
        """Names of the points' binaries, compiled if need be; None where it is not known without measuring."""
        return [None for _ in points]

    def confirm(self, points: Sequence[Point]) -> list[list[float]]:
        """Latencies in us of each point, of rounds that go through all points in turn; no rounds: it cannot tell."""
        return [[] for _ in points]
