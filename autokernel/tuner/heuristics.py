"""A good configuration with no search, seeds for one, and the reasons for both.

All allowed configurations of the knobs whose role is known are ranked by the cost model; a knob of the kernel's own
stays at CONFIG's value. Nothing is measured. Where a kernel cannot be studied (CUDA, C++) the ranks come from the
amounts that `autokernel.tuner.preferences` gives each role.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from autokernel.tuner import preferences
from autokernel.tuner.costmodel import Estimate, estimate
from autokernel.tuner.kinds import Kind, Launch
from autokernel.tuner.roles import Role, is_left_to_kernel
from autokernel.tuner.space import Point
from autokernel.tuner.studies import Facts, amounts_of

FEWEST_SEEDS, MOST_SEEDS = 4, 20
MOST_RANKED = 20_000
ALIKE = 0.5
"""How much slower a seed may be than one that has the same values in every knob but one, and be taken before it."""

GROUPED_ROWS = 8  # of tiles, in walks of products: operands of 8 x 8 tiles of 128 x 64 are 2 MB, little of any L2
GROUP_COST = 0.02  # per factor of two away from that: a tie break, not a measurement

FEATURES = (
    "log2 tile elements",
    "log2 bytes loaded per iteration",
    "log2 elements per thread",
    "log2 waves",
    "wave efficiency",
    "share of shared memory",
    "predicted occupancy",
    "register pressure",
    "log2 predicted us",
)
"""Names of what `features` returns, in its order."""


Prediction = tuple[Launch, Estimate]


class Heuristics:
    """Ranks the configurations of one kernel by its facts."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.space = facts, facts.space
        self._known: dict[Point, tuple[Prediction, ...] | None] = {}  # by what the study depends on
        self._costs: dict[Point, float] = {}

    def default(self) -> Point:
        """The configuration that is thought to be the fastest; CONFIG's where nothing is known."""
        return self.ranked[0]

    def seeds(self, count: int = 12) -> list[Point]:
        """`count` (4 to 20) configurations, or as many as fit: the default first, then ones that are both promising
        and unlike those before. Of those that launch the same there is one, the best."""
        count = min(MOST_SEEDS, max(FEWEST_SEEDS, count))
        nearest = dict.fromkeys(self._unlike(self.ranked)[: 50 * count], 0.0)
        taken = [self.ranked[0]]
        while len(nearest) > 1 and len(taken) < count:
            del nearest[taken[-1]]
            nearest = {point: max(alike, _alike(point, taken[-1])) for point, alike in nearest.items()}
            taken.append(min(nearest, key=lambda point: (self.cost(point) * (1 + ALIKE * nearest[point]), point)))
        return taken

    def _unlike(self, points: Sequence[Point]) -> list[Point]:
        """The first of those whose launches are the same, as far as they are known."""
        first: dict[object, Point] = {}
        for point in points:
            first.setdefault(tuple(launch for launch, _ in self._predicted(point) or ()) or point, point)
        return list(first.values())

    def cost(self, point: Point) -> float:
        """Predicted us, or another measure where no kernel could be studied; infinite where no block fits."""
        if point not in self._costs:
            self._costs[point] = self._cost(point)
        return self._costs[point]

    def _cost(self, point: Point) -> float:
        estimates = self.estimates(point)
        if estimates is None:
            return preferences.distance(self.facts, point) if not self.facts.studies else math.inf
        if not all(each.fits for each in estimates):
            return math.inf
        return sum(each.us for each in estimates) * self._group_cost(point)

    def estimates(self, point: Point) -> tuple[Estimate, ...] | None:
        """What is predicted for each launch of a configuration; None where that was not studied."""
        predicted = self._predicted(point)
        return None if predicted is None else tuple(each for _, each in predicted)

    def _predicted(self, point: Point) -> tuple[Prediction, ...] | None:
        key = tuple(index for k, index in enumerate(point) if k in self._studied_knobs)
        if key not in self._known:
            device, launches = self.facts.device, self.facts.launches(point)
            known = None
            if device is not None and launches is not None:
                size = self.facts.input_bytes
                known = tuple((each, estimate(each.work, each.warps, each.stages, device, size)) for each in launches)
            self._known[key] = known
        return self._known[key]

    @functools.cached_property
    def _studied_knobs(self) -> frozenset[int]:
        """The knobs that change what is known of a configuration's launches."""
        own = {k for k, role in enumerate(self.facts.roles) if role in (Role.WARPS, Role.STAGES)}
        return frozenset(own.union(self.facts.shaping))

    @functools.cached_property
    def ranked(self) -> tuple[Point, ...]:
        """All configurations that were looked at and fit, the best first; CONFIG's alone where there is none."""
        costs = {point: self.cost(point) for point in self._candidates()}
        config = self.space.canonical(self.space.locate(self.space.config) or self.facts.base)
        fitting = [point for point, cost in costs.items() if cost < math.inf]
        fitting.sort(key=lambda point: (costs[point], -_alike(point, config), point))  # nothing is changed for nothing
        return tuple(fitting) or (config,)

    def features(self, point: Point) -> tuple[float, ...]:
        """Numbers that a model of latencies can learn from, named by `FEATURES`; zeros where nothing is known."""
        predicted, device = self._predicted(point), self.facts.device
        if not predicted or device is None:
            return (0.0,) * len(FEATURES)
        launch, each = max(predicted, key=lambda one: one[1].us)
        threads = launch.warps * device.lanes
        return (
            math.log2(max(1, launch.work.elements)),
            math.log2(max(1.0, launch.work.iteration_bytes)),
            math.log2(max(1, launch.work.elements) / threads),
            math.log2(max(each.waves, 2**-10)),
            each.wave_efficiency,
            each.shared_bytes / device.limits.shared_bytes_per_block,
            each.occupancy,
            min(4.0, each.pressure),
            math.log2(max(sum(one.us for _, one in predicted), 2**-10)),
        )

    def explain(self, point: Point) -> list[str]:
        """Lines for people: the kind of kernel, what the configuration takes, and for each knob what bound it."""
        facts = self.facts
        lines = [f"kind: {facts.kind or 'unknown'}"]
        for launch, each in self._predicted(point) or ():
            lines.append(
                f"{launch.kernel}: {launch.work.programs} blocks of {launch.warps} warps, {each.blocks_per_sm} on a "
                f"multiprocessor; at most {each.shared_bytes} bytes of shared memory and about {each.registers} "
                f"registers; {each.waves:.2f} waves, {each.wave_efficiency:.0%} of the last one used; longest: "
                f"{_longest(each)}"
            )
        for k, knob in enumerate(self.space.knobs):
            value = knob.values[point[k]]
            if self._is_free(k, point):
                lines.append(f"{knob.name} = {value!r}: {'; '.join(self._alternatives(point, k)) or 'no other value'}")
            elif facts.roles[k] in (Role.OTHER, Role.FLAG):
                lines.append(f"{knob.name} = {value!r}: as in CONFIG; what it does is not known")
            else:
                lines.append(f"{knob.name} = {value!r}: left to the kernel, which chooses by shape")
        return lines

    # -- the parts of this

    def _candidates(self) -> Iterator[Point]:
        """Allowed configurations that differ from CONFIG's in knobs of known roles alone."""
        options: list[Sequence[int]] = []
        config = self.space.locate(self.space.config) or self.facts.base
        for k, knob in enumerate(self.space.knobs):
            options.append(amounts_of(knob) if self._is_free(k, config) else [config[k]])
        count = 0
        for point in self._combinations(options):
            if self.space.allowed(point) and self.space.canonical(point) == point:
                count += 1
                yield point
                if count == MOST_RANKED:
                    return

    def _is_free(self, k: int, config: Point) -> bool:
        """Whether a knob is ours to choose: flags only where a study shows what they do."""
        role = self.facts.roles[k]
        if role is Role.FLAG:
            return bool(self.facts.studies) and k in self.facts.shaping
        return role is not Role.OTHER and not is_left_to_kernel(self.space.knobs[k].values[config[k]])

    def _combinations(self, options: Sequence[Sequence[int]]) -> Iterator[Point]:
        """Combinations of the options, of the shaping knobs only those that were studied."""
        shaping = self.facts.shaping
        if not self.facts.studies:
            yield from itertools.product(*options)
            return
        for choice in self.facts.studies:
            fixed = dict(zip(shaping, choice, strict=True))
            yield from itertools.product(*([fixed[k]] if k in fixed else each for k, each in enumerate(options)))

    def _group_cost(self, point: Point) -> float:
        cost = 1.0
        for k, role in enumerate(self.facts.roles):
            value = self.space.knobs[k].values[point[k]]
            if role is Role.GROUP and isinstance(value, int) and value > 0:
                wanted = GROUPED_ROWS if self.facts.kind in (Kind.MATMUL, Kind.MIXED) else 1
                cost *= 1 + GROUP_COST * abs(math.log2(value / wanted))
        return cost

    def _alternatives(self, point: Point, k: int) -> Iterator[str]:
        """What the next smaller and the next larger value of a knob would do."""
        knob = self.space.knobs[k]
        rising = sorted(amounts_of(knob), key=lambda index: float(knob.values[index]))
        at = rising.index(point[k])
        for step, word in ((-1, "less"), (1, "more")):
            if 0 <= at + step < len(rising):
                index = rising[at + step]
                yield f"{word} ({knob.values[index]}) {self._compared(point, (*point[:k], index, *point[k + 1 :]))}"

    def _compared(self, point: Point, other: Point) -> str:
        if not self.space.allowed(other):
            return "is against the kernel's constraints"
        here, there = self.estimates(point), self.estimates(other)
        if here is None or there is None:
            if self.facts.studies:
                return "was not looked at"
            return "is further from the usual" if self.cost(other) > self.cost(point) else "is as usual"
        for each in there:
            if not each.fits:
                return f"does not fit: up to {each.shared_bytes} bytes of shared memory, {each.registers} registers"
        ratio = self.cost(other) / self.cost(point)
        if ratio < 1.005:
            return f"is as good ({ratio:.2f}x)" if ratio > 0.995 else f"is thought faster ({ratio:.2f}x)"
        grown = _grown(here, there)
        return f"is {ratio:.2f}x as long" + (f" ({grown})" if grown else "")


def _alike(point: Point, other: Point) -> float:
    """Share of knobs in which two configurations have the same value."""
    return sum(a == b for a, b in zip(point, other, strict=True)) / max(1, len(point))


def _total(estimates: Sequence[Estimate], of: Callable[[Estimate], float]) -> float:
    return sum(map(of, estimates))


def _grown(here: Sequence[Estimate], there: Sequence[Estimate]) -> str:
    """The part of the time that is longer by most."""
    names = {name for each in (*here, *there) for name in each.parts}

    def growth(name: str) -> float:
        return _total(there, lambda e: e.parts.get(name, 0.0)) - _total(here, lambda e: e.parts.get(name, 0.0))

    best = max(sorted(names), key=growth, default="")
    return best if best and growth(best) > 0 else ""


def _longest(each: Estimate) -> str:
    return max(each.parts, key=lambda name: each.parts[name])
