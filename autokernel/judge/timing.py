"""A candidate against its incumbent, in pairs of new processes whose rounds are taken together.

Two processes of one text do not take the same time: where their memory happens to lie makes a small kernel some percent
faster or slower for as long as they live, and the same holds for rounds within them. So there are several pairs. As
intervals are made of order statistics they span what the pairs disagree by. Both children of a pair are of one age.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from autokernel.judge.children import EarlyChild, close_all
from autokernel.judge.contest import LYING, Contest
from autokernel.judge.rejected import Rejected
from autokernel.judge.worker import Worker
from autokernel.records import Clocks, TimedCase, Timing, Verdict
from autokernel.spec import KernelSpec
from autokernel.stats import MIN_BLOCKS, median_interval, pooled_interval

CANDIDATE, INCUMBENT = "candidate", "incumbent"
SCREEN_ROUNDS, GPU_SCREEN_ROUNDS = 6, 9
"""Beside a GPU's screening compilers are at work: of nine rounds one may be out of line, of six none."""

LONG_US = 1_000.0
"""Where calls take this long on the average, where memory happens to lie makes no difference that counts."""

AT_ONCE_BYTES = 256 << 20
"""Pairs whose calls move more than this get ready one after the other, and the child of the stages ends before."""

FIRST_CALL_DEADLINE_S = 60.0


def contest_of(
    spec: KernelSpec,
    timed: Sequence[TimedCase],
    worker: Worker,
    rival: Worker,
    known: Mapping[str, list[int]] | None = None,
) -> Contest:
    """A contest of two loaded children, no round run yet; `known` are the calls of another one. Raises: Rejected."""
    workers = {CANDIDATE: worker, INCUMBENT: rival}
    return Contest(spec, timed, workers, first_deadline_s=FIRST_CALL_DEADLINE_S, known=known)


def are_large(spec: KernelSpec, timed: Sequence[TimedCase]) -> bool:
    """Whether the timed calls move so much that few children at a time should have copies of their inputs."""
    return sum(spec.bytes_moved(item.case) for item in timed) > AT_ONCE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Pairs, rounds of each, pairs to confirm a winner, and whether each of those is one sample."""

    pairs: int
    rounds: int
    confirming: int
    pair_by_pair: bool


def schedule(call_us: float) -> Schedule:
    """For timed calls that take so long on the average, in us."""
    if call_us < LONG_US:
        return Schedule(pairs=3, rounds=4, confirming=MIN_BLOCKS, pair_by_pair=True)
    return Schedule(pairs=1, rounds=8, confirming=2, pair_by_pair=False)


class Duel:
    """Pairs of children, the candidate's and the incumbent's; use as a context manager, which ends them."""

    def __init__(
        self,
        spec: KernelSpec,
        timed: Sequence[TimedCase],
        start: tuple[Callable[[], Worker], Callable[[], Worker]],
        get_ready: Callable[[Worker], None],
        inspect: Callable[[Worker], None],
        known: Mapping[str, list[int]] | None,
    ) -> None:
        """`start` starts a child of the candidate and one of the incumbent, `get_ready` is called with each beside
        something else, and `inspect` with each of the former after its rounds. `known` are the calls of a contest of
        the same two texts."""
        self._spec, self._timed, self._start = spec, timed, start
        self._get_ready, self._inspect, self._known = get_ready, inspect, known
        self._stack = ExitStack()
        self._waiting = list[list[EarlyChild]]()
        self._contests = list[Contest]()
        self._hidden_us = 0.0

    def __enter__(self) -> Duel:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, pairs: int) -> None:
        """Start the children of so many pairs: they get ready while something else is done."""
        for _ in range(pairs):
            early = [EarlyChild(begin(), self._get_ready) for begin in self._start]
            self._waiting.append([self._stack.enter_context(child) for child in early])

    def run(self, rounds: int) -> None:
        """Time so many rounds of the pairs that were prepared. One pair, no child can know which, is held against our
        own clock.

        Raises: Rejected when a child fails, or when its clock or its results are wrong.
        """
        pairs = [[child.ready() for child in pair] for pair in self._waiting]
        self._waiting = []
        groups = [[pair] for pair in pairs] if are_large(self._spec, self._timed) else [pairs]
        checked = secrets.choice(groups)
        for group in groups:
            self._run(group, rounds, secrets.randbelow(len(group)) if group is checked else None)

    def _run(self, group: Sequence[Sequence[Worker]], rounds: int, checked: int | None) -> None:
        with ThreadPoolExecutor(len(group)) as pool:
            contests = list(
                pool.map(lambda pair: contest_of(self._spec, self._timed, pair[0], pair[1], self._known), group)
            )
        for _ in range(rounds):
            for contest in contests:
                contest.run(1)
        for contest, (worker, _) in zip(contests, group, strict=True):
            contest.verify(CANDIDATE)
            self._inspect(worker)
        if checked is not None:
            self._hidden_us = max(self._hidden_us, _hidden_us(contests, checked))
        for contest in contests:
            contest.forget_inputs()
        self._contests += contests
        close_all(chain.from_iterable(group))

    def timing(self, *, pair_by_pair: bool = False) -> Timing:
        """What all rounds say so far; with `pair_by_pair`, the interval is that of the pairs' medians.

        Raises: Rejected.
        """
        hidden_us = max(self._hidden_us, unclaimed_us(self._contests))
        return pooled(self._contests, hidden_us, pair_by_pair=pair_by_pair)


def unclaimed_us(contests: Sequence[Contest]) -> float:
    """Us of a round that our clock surely saw beyond what the candidate claims, and the incumbent's not; 0 if none.

    On a GPU, where the device works on while the host waits, it says nothing. Raises: Rejected.
    """
    if not contests[0].on_cpu:
        return 0.0
    more_us = [us for contest in contests for us in contest.unclaimed_us(CANDIDATE, INCUMBENT)]
    more, claimed_us = median_interval(more_us), statistics.median(each.latency_us(CANDIDATE) for each in contests)
    _require_little(more.low, claimed_us, "timed")
    return more.estimate if more.low > 0 else 0.0


def _hidden_us(contests: Sequence[Contest], number: int) -> float:
    """Us of a round that a child hides in many calls in one go, by one pair; on a CPU another must agree, as the memory
    of one process may lie badly. Raises: Rejected."""
    hidden_us = contests[number].hidden_us(CANDIDATE, INCUMBENT)
    if hidden_us <= 0 or not contests[number].on_cpu or len(contests) == 1:
        return hidden_us
    hidden_us = min(hidden_us, contests[number - 1].hidden_us(CANDIDATE, INCUMBENT))
    _require_little(hidden_us, contests[number].latency_us(CANDIDATE), "many in one go")
    return hidden_us


def _require_little(hidden_us: float, claimed_us: float, when: str) -> None:
    """Raises: Rejected when a good part of the time is hidden."""
    if hidden_us > LYING * claimed_us:
        raise Rejected(
            Verdict.TAMPER,
            f"claims {claimed_us:.1f} us for a forward's calls, which {when} take {hidden_us:.1f} us more by our clock",
        )


def pooled(contests: Sequence[Contest], hidden_us: float = 0.0, *, pair_by_pair: bool = False) -> Timing:
    """What the contests say together: medians over all of their rounds, the candidate's longer by `hidden_us` us."""
    ours = [[us + hidden_us for us in contest.rounds[CANDIDATE]] for contest in contests]
    theirs = [contest.rounds[INCUMBENT] for contest in contests]
    return Timing(
        candidate_us=statistics.median(us for rounds in ours for us in rounds),
        incumbent_us=statistics.median(us for rounds in theirs for us in rounds),
        speedup=pooled_interval(theirs, ours, pair_by_pair=pair_by_pair),
        blocks=sum(len(rounds) for rounds in ours),
        host_us=_median([contest.host_us(CANDIDATE) for contest in contests]),
        graph_us=next((us for contest in contests if (us := contest.graph_us(CANDIDATE)) is not None), None),
        clocks=Clocks.joined(contest.clocks.summary() for contest in contests),
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Their median; None where one is unknown."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None
