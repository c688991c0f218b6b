"""How long each value of a kernel lives, and how many bytes live in registers at once.

A value lives from where it is made to its last use; one that a loop uses lives to the end of the loop. Operands of
products that a loop loads lie in shared memory and are not counted, nor are constants, addresses and masks, which are
computed where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from autokernel.tuner.ttir import Loop, Op, Program, Tile

LOADS = ("tt.load", "tt.descriptor_load", "tt.experimental_descriptor_load", "tt.descriptor_gather")
ALIASES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout")
"""They name what their operand holds in another way."""

FREE = ("arith.constant", "tt.make_range", "arith.cmpi", "arith.cmpf", "arith.andi", "tt.get_program_id", "tt.addptr")
"""They cost no register of their own: constants, addresses and masks that are computed where they are used."""


@dataclass(slots=True)
class _Value:
    """Something that takes registers, from the operation that makes it to the last that needs it."""

    nbytes: float
    first: int
    last: int


def live_bytes(program: Program, staged: frozenset[str]) -> float:
    """The most bytes that live in registers at once; `staged` are the names of loaded operands of products."""
    return _Walk(program, staged).peak()


class _Walk:
    """Goes through the operations in their order and notes which values they make and need."""

    def __init__(self, program: Program, staged: frozenset[str]) -> None:
        self._program, self._staged = program, staged
        self._values: list[_Value] = []
        self._named: dict[str, list[int]] = {}  # what holds a name's bytes: several values for a loop's results
        self._kept: dict[int, set[int]] = {number: set() for number in range(len(program.loops))}
        starts = {loop.start: loop for loop in program.loops}
        for index, op in enumerate(program.ops):
            needed = self._use(op, index)
            if index in starts:
                self._enter(starts[index], op, index)
                continue
            if op.name == "scf.yield" and op.loop is not None:
                self._carry_on(program.loops[op.loop], needed)
            self._make(op, index, needed)
        for number, kept in self._kept.items():
            for value in kept:
                self._extend(value, program.loops[number].end)

    def peak(self) -> float:
        """The most that lives just after some operation."""
        changes = [0.0] * (len(self._program.ops) + 2)
        for value in self._values:
            changes[value.first] += value.nbytes
            changes[max(value.last, value.first + 1)] -= value.nbytes
        most = live = 0.0
        for change in changes:
            live += change
            most = max(most, live)
        return most

    def _use(self, op: Op, index: int) -> list[int]:
        """The values that an operation needs, which live at least until then."""
        needed = [value for name in op.operands for value in self._named.get(name.partition("#")[0], ())]
        for value in needed:
            self._extend(value, index)
            loop = op.loop
            while loop is not None:
                if self._values[value].first < self._program.loops[loop].start:
                    self._kept[loop].add(value)
                loop = self._program.loops[loop].outer
        return needed

    def _enter(self, loop: Loop, op: Op, index: int) -> None:
        for (name, _), tile in zip(loop.carried, op.types, strict=False):
            self._add(name, _register_bytes(op, tile), index)

    def _carry_on(self, loop: Loop, needed: list[int]) -> None:
        """What an iteration leaves to the next lives to the end of the loop, and is the loop's result."""
        for value in needed:
            self._extend(value, loop.end)
        self._named.update({name: needed for name in self._program.ops[loop.start].results})

    def _make(self, op: Op, index: int, needed: list[int]) -> None:
        for name, tile in zip(op.results, op.types, strict=False):
            if op.name in ALIASES:
                self._named[name] = needed
                continue
            free = op.name in FREE or (name in self._staged and op.loop is not None)
            self._add(name, 0.0 if free else _register_bytes(op, tile), index)

    def _add(self, name: str, nbytes: float, index: int) -> None:
        self._values.append(_Value(nbytes, index, index))
        self._named[name] = [len(self._values) - 1]

    def _extend(self, value: int, index: int) -> None:
        self._values[value].last = max(self._values[value].last, index)


def _register_bytes(op: Op, tile: Tile) -> float:
    if not tile.sides or tile.is_pointer or tile.element_bytes < 1:
        return 0.0
    return tile.nbytes if tile.is_float or op.name in LOADS else 0.0
