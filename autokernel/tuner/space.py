"""All configurations of one kernel: its knobs, the conditions on them, and which configurations are the same.

A configuration is a `Point`. Conditions stand in kernel.py as literals beside TUNABLES and CONFIG:

    CONSTRAINTS = ["BLOCK_M * BLOCK_N <= 32768"]      # every one of them must hold
    UNUSED = {"STAGES": "PERSISTENT == -1"}           # when this holds, STAGES makes no difference
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autokernel.kernelfile import KernelFile, Value, parse_kernel
from autokernel.tuner.knobs import Knob, knob_of
from autokernel.tuner.rules import Rule

Point = tuple[int, ...]
"""Index of the chosen value of each knob, in the order of TUNABLES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The knobs that have a choice: in TUNABLES with two distinct values or more, and set in CONFIG."""

    knobs: tuple[Knob, ...]
    config: Mapping[str, Value]
    """The kernel's CONFIG: the origin of what no knob covers, and of the values that stay."""
    constraints: tuple[Rule, ...] = ()
    unused: Mapping[int, Rule] = field(default_factory=dict)
    """Number of a knob -> when its value makes no difference."""

    @classmethod
    def of(cls, kernel: KernelFile) -> Space:
        """The space of `kernel`. Raises: ConfigError for a rule that cannot be used."""
        knobs = tuple(knob_of(name, values) for name, values in kernel.tunables.items() if name in kernel.config)
        knobs = tuple(knob for knob in knobs if len(knob.values) > 1)
        numbers = {knob.name: number for number, knob in enumerate(knobs)}
        unused = {name: Rule.of(text, kernel.config) for name, text in kernel.unused.items()}
        return cls(
            knobs=knobs,
            config=kernel.config,
            constraints=tuple(Rule.of(text, kernel.config) for text in kernel.constraints),
            unused={numbers[name]: rule for name, rule in unused.items() if name in numbers},
        )

    @classmethod
    def read(cls, text: str) -> Space:
        """The space of a kernel.py. Raises: ConfigError as `parse_kernel` and `of` do."""
        return cls.of(parse_kernel(text))

    @property
    def size(self) -> int:
        """Number of combinations of values, allowed or not."""
        return math.prod(len(knob.values) for knob in self.knobs)

    def points(self) -> Iterator[Point]:
        """Every allowed configuration once, in the order of TUNABLES."""
        for point in itertools.product(*(range(len(knob.values)) for knob in self.knobs)):
            if (not self.unused or self.canonical(point) == point) and self.allowed(point):
                yield point

    def allowed(self, point: Point) -> bool:
        """Whether `point` meets every constraint."""
        if not self.constraints:
            return True
        config = self._written(point)
        return all(rule.holds(config) for rule in self.constraints)

    def canonical(self, point: Point) -> Point:
        """The one point that stands for all that differ from `point` only in knobs that make no difference.

        Such a knob takes its first value; knobs are gone through in order until none changes, at most once each.
        """
        settled: set[int] = set()
        while True:
            config = self._written(point)
            idle = next((k for k, rule in self.unused.items() if k not in settled and rule.holds(config)), None)
            if idle is None:
                return point
            settled.add(idle)
            point = (*point[:idle], 0, *point[idle + 1 :])

    def locate(self, config: Mapping[str, Value]) -> Point | None:
        """The point of `config`, as it is written; None when it lacks a knob or has a value that is not listed."""
        found = [knob.locate(config[knob.name]) if knob.name in config else None for knob in self.knobs]
        point = tuple(index for index in found if index is not None)
        return point if len(point) == len(self.knobs) else None

    def config_at(self, point: Point) -> dict[str, Value]:
        """The whole CONFIG of `point`. A value that stays is left as CONFIG writes it."""
        config = dict(self.config)
        for knob, index in zip(self.knobs, point, strict=True):
            if knob.locate(config[knob.name]) != index:
                config[knob.name] = knob.values[index]
        return config

    def neighbours(self, point: Point, radius: int = 1) -> list[Point]:
        """Allowed, canonical points that differ from `point` in one knob by at most `radius` steps."""
        moved = [
            self.canonical((*point[:k], index, *point[k + 1 :]))
            for k, knob in enumerate(self.knobs)
            for index in knob.neighbours(point[k], radius)
        ]
        return [near for near in dict.fromkeys(moved) if near != point and self.allowed(near)]

    def encode(self, point: Point) -> tuple[float, ...]:
        """The point as numbers, knob by knob."""
        return tuple(itertools.chain.from_iterable(_codes(knob)[i] for knob, i in zip(self.knobs, point, strict=True)))

    def _written(self, point: Point) -> dict[str, Value]:
        chosen = {knob.name: knob.values[index] for knob, index in zip(self.knobs, point, strict=True)}
        return {**self.config, **chosen}


@functools.lru_cache(maxsize=256)
def _codes(knob: Knob) -> tuple[tuple[float, ...], ...]:
    return tuple(knob.encode(index) for index in range(len(knob.values)))
