"""One tunable number or choice of a kernel: its values, which of them lie side by side, and how a model sees them.

A knob knows nothing of kernels or of other knobs. Values are addressed by their index in TUNABLES; lists of numbers may
stand in any order there, and begin with values up to zero that mean "by shape" (0, -1) instead of an amount.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from autokernel.kernelfile import Value

_SIDES = re.compile(r"\d+(?:x\d+)+")  # a tile as text: 128x64


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob(ABC):
    """A name and its values, all distinct as text: True, 1 and 1.0 are equal to Python and differ in a kernel."""

    name: str
    values: tuple[Value, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers in rising or falling order, so that listed neighbours behave alike."""
        numbers = [v for v in self.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) and numbers in (sorted(numbers), sorted(numbers, reverse=True))

    def locate(self, value: Value) -> int | None:
        """Index of `value`, of the same text if listed, else of one that is equal; None when there is none."""
        texts = [repr(v) for v in self.values]
        if repr(value) in texts:
            return texts.index(repr(value))
        return self.values.index(value) if value in self.values else None

    @abstractmethod
    def neighbours(self, index: int, radius: int = 1) -> tuple[int, ...]:
        """Indices of the values at most `radius` steps from that at `index`, without itself; symmetric."""

    @abstractmethod
    def encode(self, index: int) -> tuple[float, ...]:
        """The value at `index` as numbers, equally many for every index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Amount(Knob):
    """A number. Leading values up to zero stand apart: next to every other value, as any of them may be meant."""

    @property
    def sentinels(self) -> int:
        """How many of the first values mean something else than an amount."""
        leading = sum(1 for _ in itertools.takewhile(lambda value: _number(value) <= 0, self.values))
        return leading if leading < len(self.values) else 0

    def neighbours(self, index: int, radius: int = 1) -> tuple[int, ...]:
        others = [i for i in range(len(self.values)) if i != index]
        if index < self.sentinels:
            return tuple(others)
        rank = {i: r for r, i in enumerate(self._rising())}
        return tuple(i for i in others if i < self.sentinels or abs(rank[i] - rank[index]) <= radius)

    def encode(self, index: int) -> tuple[float, ...]:
        apart = tuple(float(index == sentinel) for sentinel in range(self.sentinels))
        rising = self._rising()
        shown = index if index >= self.sentinels else rising[len(rising) // 2]
        return (self._scale(shown, rising), *apart)

    def _rising(self) -> list[int]:
        """Indices of the amounts, smallest first."""
        return sorted(range(self.sentinels, len(self.values)), key=lambda i: _number(self.values[i]))

    @abstractmethod
    def _scale(self, index: int, rising: Sequence[int]) -> float:
        """The amount at `index` on an even scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pow2(_Amount):
    """Powers of two: encoded as log2, a step is the next listed power."""

    def _scale(self, index: int, rising: Sequence[int]) -> float:
        return math.log2(_number(self.values[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(_Amount):
    """Other numbers: encoded as the position among them, in [0, 1]; a step is the next listed number."""

    def _scale(self, index: int, rising: Sequence[int]) -> float:
        return rising.index(index) / max(1, len(rising) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Knob):
    """Values without an order: each is next to each. One number per value, and the log2 of the sides of a tile."""

    def neighbours(self, index: int, radius: int = 1) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.values)) if i != index)

    def encode(self, index: int) -> tuple[float, ...]:
        hot = tuple(float(i == index) for i in range(len(self.values)))
        sides = [_sides(value) for value in self.values]
        width = max(map(len, sides))
        known = [side for side in sides if len(side) == width]
        if width == 0:
            return hot
        # A value that is no tile ("auto") gets the mean of the tiles, as far from all of them as from each.
        mean = tuple(sum(column) / len(known) for column in zip(*known, strict=True))
        return (*hot, *(sides[index] if len(sides[index]) == width else mean))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Knob):
    """Off or on, written as booleans or as 0 and 1."""

    def neighbours(self, index: int, radius: int = 1) -> tuple[int, ...]:
        return (1 - index,)

    def encode(self, index: int) -> tuple[float, ...]:
        return (float(bool(self.values[index])),)


def knob_of(name: str, values: Sequence[Value]) -> Knob:
    """The knob for a list of TUNABLES, of the kind that its values show. Values that repeat as text count once."""
    distinct = tuple({repr(value): value for value in values}.values())
    if len(distinct) == 2 and set(map(repr, distinct)) in ({"False", "True"}, {"0", "1"}):
        return Flag(name=name, values=distinct)
    numbers = [value for value in distinct if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) < len(distinct) or not all(map(math.isfinite, numbers)):
        return Choice(name=name, values=distinct)
    amounts = list(itertools.dropwhile(lambda number: number <= 0, numbers))
    if amounts and all(isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in amounts):
        return Pow2(name=name, values=distinct)
    return Span(name=name, values=distinct)


def _number(value: Value) -> float:
    assert isinstance(value, (int, float))
    return value


def _sides(value: Value) -> tuple[float, ...]:
    """log2 of the sides in `128x64`; empty for any other value."""
    if not isinstance(value, str) or not _SIDES.fullmatch(value):
        return ()
    sides = [int(side) for side in value.split("x")]
    return tuple(map(math.log2, sides)) if all(sides) else ()
