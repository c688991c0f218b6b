"""`Experiments`: those of one op as a sequence that takes little memory, as a night has thousands; no torch."""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from autokernel.records import Experiment

BLOCK = 100
"""Experiments that are packed at a time. As records they take 1.3 kB each and more, packed 0.1."""


@dataclass(frozen=True, slots=True, eq=False)
class Experiments(Sequence[Experiment]):
    """Grows by `with_one`, which leaves the sequence itself as it is.

    All but the newest (one block, or nearly two) are packed: to read one of them takes its block's time, 3 ms, and to
    read all of them holds no more than one block at a time.
    """

    packed: tuple[bytes, ...] = ()
    newest: tuple[Experiment, ...] = ()

    def with_one(self, experiment: Experiment) -> Experiments:
        """These and one more."""
        newest = (*self.newest, experiment)
        if len(newest) < 2 * BLOCK:
            return Experiments(self.packed, newest)
        return Experiments((*self.packed, _pack(newest[:BLOCK])), newest[BLOCK:])

    def __len__(self) -> int:
        return len(self.packed) * BLOCK + len(self.newest)

    def __iter__(self) -> Iterator[Experiment]:
        return itertools.chain(itertools.chain.from_iterable(map(_unpack, self.packed)), self.newest)

    def __reversed__(self) -> Iterator[Experiment]:
        yield from reversed(self.newest)
        for block in reversed(self.packed):
            yield from reversed(_unpack(block))

    @overload
    def __getitem__(self, index: int) -> Experiment: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Experiment, ...]: ...
    def __getitem__(self, index: int | slice) -> Experiment | tuple[Experiment, ...]:
        wanted = range(len(self))[index]
        if isinstance(wanted, int):
            block, place = divmod(wanted, BLOCK)
            packed = block < len(self.packed)
            return _unpack(self.packed[block])[place] if packed else self.newest[wanted - len(self.packed) * BLOCK]
        first = min(min(wanted, default=0) // BLOCK, len(self.packed))
        there = tuple(Experiments(self.packed[first:], self.newest))
        return tuple(there[place - first * BLOCK] for place in wanted)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def _pack(block: tuple[Experiment, ...]) -> bytes:
    return zlib.compress(pickle.dumps(block, pickle.HIGHEST_PROTOCOL), level=1)


def _unpack(block: bytes) -> tuple[Experiment, ...]:
    """Only what this process has packed is ever read: pickles from elsewhere could run code."""
    experiments: tuple[Experiment, ...] = pickle.loads(zlib.decompress(block))
    return experiments
