"""The built-in agent without an LLM: changes CONFIG within TUNABLES, guided by what the history has measured.

It keeps no state of its own: the same history and seed give the same proposal, so a resumed run goes on as if it had
never stopped. It knows nothing of what a knob means; the order of TUNABLES is taken as the author's order of promise.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autokernel.agents import Agent, AgentOptions
from autokernel.agents.evidence import Evidence, changes, gather
from autokernel.errors import AgentError, ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import with_config, without_config
from autokernel.records import Proposal
from autokernel.structure import twin_of
from autokernel.tuner.space import Point

# All in log latency, where 0.01 is about one per cent. Chosen on synthetic landscapes (see tests/unit/test_search.py).
KNOB_SPREAD = 0.15  # what a knob of which nothing is known may gain or lose
LEAST_SPREAD = 0.04  # what an unmeasured value may still do when the knob's other values made no difference
MEASURED_SPREAD = 0.015  # how far a measured effect may be off next to another incumbent
STEP_COST = 0.03  # drawback of a jump over a knob's whole range: far values more often fail or spill
CHANGE_COST = 0.01  # drawback of each further knob in one proposal: knobs interact
TREND = 0.5  # share of the last slope that is expected to go on beyond the measured values
FAR_SAMPLES = 48  # random configurations looked at per proposal, two or three knobs away
SCAN_LIMIT = 256  # open configurations compared when nothing near is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A setting that could replace the incumbent's: expected change of log latency, how uncertain, and why to try."""

    knob: int
    choice: int
    gain: float  # negative is faster
    spread: float
    cost: float
    measured: bool
    why: str

    @property
    def score(self) -> float:
        """Optimistic log latency; the smallest is tried first."""
        return self.gain - self.spread + self.cost


@dataclass(slots=True, kw_only=True)
class SearchAgent:
    """Proposes configurations of the incumbent; None when every configuration was tried or is known to fail."""

    seed: int
    name: str = "search"

    def propose(self, history: KernelHistory) -> Proposal | None:
        """The next configuration to try.

        Raises: AgentError when the incumbent cannot be read; nothing could be proposed from it.
        """
        try:
            kernel, _ = without_config(history.incumbent)
        except ConfigError as error:
            raise AgentError(
                f"the incumbent of {history.op} cannot be read: {error}",
                hint=f"mend the starter; {error.hint}",
            ) from error
        evidence = gather(history, kernel)
        if evidence is None:
            return None
        rng = random.Random(f"{self.seed}/{history.op}/{len(history.experiments)}")
        for point, why in _ranked(evidence, rng):
            text = with_config(history.incumbent, evidence.space.config_at(point))
            if twin_of(history, text) is None:
                return Proposal(hypothesis=_describe(evidence, point, why), kernel_py=text)
        return None


def build(options: AgentOptions) -> Agent:
    """The agent for a run. Raises: ConfigError when an argument is given, as it takes none."""
    if options.argument:
        raise ConfigError(f"the search agent takes no argument, got {options.argument!r}", hint="use --agent search")
    return SearchAgent(seed=options.seed)


def _ranked(evidence: Evidence, rng: random.Random) -> Iterator[tuple[Point, str]]:
    """Open points, best first: near ones by optimistic score, then whatever is left of the space."""
    moves = _moves(evidence)
    singles = [(move.score, _moved(evidence.incumbent, [move]), move.why) for move in moves]
    combined = _combinations(evidence, [move for move in moves if move.measured], rng)
    # Sorting is stable, so equal scores keep the order of TUNABLES and single changes come before combinations.
    for _, point, why in sorted([*singles, *combined], key=lambda entry: entry[0]):
        if evidence.is_open(point):
            yield point, why
    yield from _rest(evidence, moves)


def _moves(evidence: Evidence) -> list[Move]:
    """All single changes from the incumbent."""
    found = []
    for number, knob in enumerate(evidence.space.knobs):
        known = evidence.known(number)
        choices = [choice for choice in range(len(knob.values)) if choice != evidence.incumbent[number]]
        # Upwards first: of two steps that promise the same, more unrolling or wider blocks is the usual win.
        for choice in sorted(choices, reverse=True):
            found.append(_move(evidence, number, choice, known, knob.is_ordered))
    return sorted(found, key=lambda move: move.knob)


def _move(evidence: Evidence, knob: int, choice: int, known: dict[int, float], ordered: bool) -> Move:
    if choice in known:
        gain = known[choice]
        why = f"expected {_percent(gain)} from earlier measurements, untried with the other settings of now"
        return Move(knob=knob, choice=choice, gain=gain, spread=MEASURED_SPREAD, cost=0.0, measured=True, why=why)
    last, current = len(evidence.space.knobs[knob].values) - 1, evidence.incumbent[knob]
    nearest = min(known, key=lambda value: (abs(value - choice), value)) if ordered else current
    # Relative to the longest step that is open: a knob that stands in the middle is no less promising for that.
    reach = abs(choice - nearest) / max(current, last - current) if ordered else 1.0
    scale = KNOB_SPREAD if len(known) == 1 else max(LEAST_SPREAD, *map(abs, known.values()))
    gain = _expected(choice, known) if ordered else 0.0
    return Move(
        knob=knob,
        choice=choice,
        gain=gain,
        spread=min(scale, KNOB_SPREAD) * math.sqrt(reach),
        cost=STEP_COST * reach,
        measured=False,
        why=_why(known, gain, ordered),
    )


def _expected(choice: int, known: dict[int, float]) -> float:
    """Change of log latency at an unmeasured value of an ordered knob, from the measured ones on either side."""
    below = sorted((v for v in known if v < choice), reverse=True)
    above = sorted(v for v in known if v > choice)
    if below and above:
        low, high = below[0], above[0]
        return known[low] + (known[high] - known[low]) * (choice - low) / (high - low)
    near, *beyond = below or above
    if not beyond:
        return 0.0
    slope = (known[near] - known[beyond[0]]) / (near - beyond[0])
    return known[near] + TREND * slope * math.copysign(1.0, choice - near)


def _why(known: dict[int, float], gain: float, ordered: bool) -> str:
    if len(known) == 1:
        return "nothing is known of this knob yet"
    if not ordered:
        return "another of its values, untried so far"
    if gain < 0:
        return f"the trend of its measured values promises {_percent(gain)}"
    return "between or beyond its measured values, untried so far"


def _combinations(evidence: Evidence, moves: Sequence[Move], rng: random.Random) -> list[tuple[float, Point, str]]:
    """Pairs of measured moves, and random configurations two or three measured moves away."""
    groups: list[tuple[Move, ...]] = [pair for pair in itertools.combinations(moves, 2) if pair[0].knob != pair[1].knob]
    if len({move.knob for move in moves}) > 2:
        triples = (tuple(rng.sample(moves, 3)) for _ in range(FAR_SAMPLES))
        groups += [triple for triple in triples if len({move.knob for move in triple}) == 3]
    return [(_score(group), _moved(evidence.incumbent, group), _together(group)) for group in groups]


def _score(group: Sequence[Move]) -> float:
    spread = math.sqrt(sum(move.spread**2 for move in group))
    return sum(move.gain + move.cost for move in group) - spread + CHANGE_COST * (len(group) - 1)


def _together(group: Sequence[Move]) -> str:
    parts = ", ".join(_percent(move.gain) for move in group)
    return f"expected {parts} alone; perhaps they add up"


def _rest(evidence: Evidence, moves: Sequence[Move]) -> Iterator[tuple[Point, str]]:
    """Every open point, in chunks that are sorted by what the single moves promise."""
    gain = {(move.knob, move.choice): move.gain + move.cost for move in moves}
    domains = [
        [choice for choice in range(len(knob.values)) if frozenset({(number, choice)}) not in evidence.faults]
        for number, knob in enumerate(evidence.space.knobs)
    ]
    points = (point for point in itertools.product(*domains) if evidence.is_open(point))
    while chunk := list(itertools.islice(points, SCAN_LIMIT)):
        chunk.sort(key=lambda point: sum(gain[setting] for setting in changes(evidence.incumbent, point)))
        for point in chunk:
            yield point, "one of the configurations that are left"


def _moved(origin: Point, moves: Sequence[Move]) -> Point:
    point = list(origin)
    for move in moves:
        point[move.knob] = move.choice
    return tuple(point)


def _describe(evidence: Evidence, point: Point, why: str) -> str:
    """One line that says what changes and why: `UNROLL 4 -> 8: nothing is known of this knob yet`."""
    origin = evidence.incumbent
    steps = []
    for number, choice in changes(origin, point):
        knob = evidence.space.knobs[number]
        steps.append(f"{knob.name} {knob.values[origin[number]]} -> {knob.values[choice]}")
    return f"{', '.join(steps)}: {why}"


def _percent(log_change: float) -> str:
    speed = math.expm1(-log_change)
    return f"{abs(speed):.1%} {'faster' if speed > 0 else 'slower'}"
