"""A tuning session on a recorded table: what a search would have seen, and what it would have cost.

Each configuration is read as one of its recorded medians, drawn by the session's seed, so that noise stays in; it is
scored by the median of all. Compilations go to a number of workers first come, first served; the GPU times one
configuration at a time, in the order in which it is asked and once that one is compiled. Failures cost what they cost.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tables import Cell, Table

from autokernel.records import KernelResources
from autokernel.tuner.space import Point
from autokernel.tuner.trials import Provider, Status, Trial

WORKERS = 14
"""Compilers at once: as many as made the tables."""

BUDGET = 200
"""Evaluations of a run; no table has fewer cells."""

CURVE = 64
"""Evaluations up to which regret is kept: a run that has found the best goes on that far."""

CONFIRM_ROUNDS, CONFIRM_CALLS, CALL_OVERHEAD_US = 8, 4, 100.0
"""A comparison of a few configurations in turns: rounds, calls of each in a round, and what stands between calls."""


class Over(BaseException):
    """The session is over: no search should take it for a failure of a configuration."""


@dataclass(frozen=True, slots=True)
class Step:
    """One evaluation: the cell and the session's clock once it was done."""

    cell: Cell
    at_s: float


@dataclass(kw_only=True)
class Session:
    """One search on one table."""

    table: Table
    seed: int
    budget: int = BUDGET
    until: float = 1.01
    """The session is over when CURVE evaluations are made and one came within this factor of the best."""
    steps: list[Step] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.cells = {cell.point: cell for cell in self.table.cells}
        self.truth = {cell.point: statistics.median(cell.us) for cell in self.table.cells if cell.status == "OK"}
        self.best_us = min(self.truth.values())
        self._compiled: dict[Point, float] = {}
        self._free = [0.0] * WORKERS
        self._read: dict[Point, float | None] = {}
        self._reached = False

    def compile(self, points: Sequence[Point], *, from_s: float = 0.0) -> None:
        """Begin to compile what is not begun yet, now or at a later `from_s` of the clock."""
        for point in points:
            if point in self._compiled or point not in self.cells:
                continue
            begin = max(self.now_s, from_s, heapq.heappop(self._free))
            self._compiled[point] = begin + self.cells[point].compile_s
            heapq.heappush(self._free, self._compiled[point])

    def wait(self, points: Sequence[Point]) -> None:
        """Let time pass until all of them are compiled."""
        self.compile(points)
        self.now_s = max([self.now_s, *(self._compiled[point] for point in points if point in self.cells)])

    def measure(self, points: Sequence[Point]) -> list[Cell | None]:
        """Evaluate each: its cell, or None for one that the constraints forbid. Repeats cost nothing. Raises: Over."""
        self.compile(points)
        for point in points:
            if point in self._read or point not in self.cells:
                continue
            if len(self.steps) >= self.budget or (self._reached and len(self.steps) >= CURVE):
                raise Over
            self.wait([point])
            cell = self.cells[point]
            self.now_s += cell.timing_s
            self._read[point] = (
                random.Random(f"{self.table.name}/{self.seed}/{point}").choice(cell.us) if cell.us else None
            )
            self.steps.append(Step(cell, self.now_s))
            self._reached = self._reached or self.truth.get(point, float("inf")) <= self.until * self.best_us
        return [self.cells.get(point) for point in points]

    def reading(self, point: Point) -> float | None:
        """What the search saw, in us; None where it failed or was not measured."""
        return self._read.get(point)

    def again(self, points: Sequence[Point]) -> list[list[float]]:
        """Readings of each over some rounds that go through all in turn, charged."""
        rng = random.Random(f"{self.table.name}/{self.seed}/{len(self.steps)}/{points}")
        rounds = [[rng.choice(self.cells[point].us) for _ in range(CONFIRM_ROUNDS)] for point in points]
        calls = CONFIRM_ROUNDS * CONFIRM_CALLS
        self.now_s += sum(calls * (self.truth[point] + CALL_OVERHEAD_US) for point in points) / 1e6
        return rounds


STATUS = {
    "OK": Status.OK,
    "COMPILE_ERROR": Status.COMPILE_ERROR,
    "LAUNCH_ERROR": Status.LAUNCH_ERROR,
    "TIMEOUT": Status.TIMEOUT,
    "WRONG": Status.WRONG,
}


class TableProvider(Provider):
    """The tuner's own view of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def measure(self, points: Sequence[Point]) -> list[Trial]:
        """See `Provider`."""
        cells = self._session.measure(points)
        return [self._trial(point, cell) for point, cell in zip(points, cells, strict=True)]

    def prepare(self, points: Sequence[Point]) -> None:
        """See `Provider`."""
        self._session.compile(points)

    def digests(self, points: Sequence[Point]) -> list[str | None]:
        """See `Provider`."""
        self._session.wait(points)
        return [self._session.cells[point].digest for point in points]

    def confirm(self, points: Sequence[Point]) -> list[list[float]]:
        """See `Provider`."""
        return self._session.again(points)

    def _trial(self, point: Point, cell: Cell | None) -> Trial:
        if cell is None:
            raise ValueError(f"{point} is not allowed")
        taken = KernelResources(
            kernel=self._session.table.name,
            registers=cell.registers,
            stack_bytes=cell.stack_bytes,
            shared_bytes=cell.shared_bytes,
        )
        return Trial(
            point=point,
            status=STATUS[cell.status],
            latency_us=self._session.reading(point),
            compile_s=cell.compile_s,
            timing_s=cell.timing_s,
            digest=cell.digest,
            resources=taken,
            error=cell.error,
        )
