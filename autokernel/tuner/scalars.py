"""How often a kernel's loops run: its scalar arithmetic, worked out for some of its programs.

The bounds of loops are known once the arguments and the number of the program are. What depends on memory, or on an
operation that is not known, stays unknown.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from autokernel.tuner.ttir import Loop, Op, Program

SAMPLES = 16
"""Programs of a grid whose loops are counted: under a causal mask the first ones run fewer."""

GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly, and stay so in every axis of a grid

UNKNOWN_TRIPS = 8.0

_NUMBER = re.compile(r"(?:constant|dense<) ?(-?\d+)")
_AXIS = re.compile(r"\b([xyz])\b")
_ARGUMENT = re.compile(r"(\w+)=(-?\d+)")


def _quotient(a: int, b: int) -> int | None:
    return math.trunc(a / b) if b else None


_BINARY: Mapping[str, Callable[[int, int], int | None]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.divsi": _quotient,
    "arith.divui": _quotient,
    "arith.ceildivsi": lambda a, b: -(-a // b) if b else None,
    "arith.remsi": lambda a, b: a - b * math.trunc(a / b) if b else None,
    "arith.remui": lambda a, b: a % b if b else None,
    "arith.minsi": min,
    "arith.minui": min,
    "arith.maxsi": max,
    "arith.maxui": max,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.shli": lambda a, b: a << b if 0 <= b < 64 else None,
    "arith.shrsi": lambda a, b: a >> b if 0 <= b < 64 else None,
}
_SAME = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast")
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "slt": operator.lt,
    "sle": operator.le,
    "sgt": operator.gt,
    "sge": operator.ge,
    "ult": operator.lt,
    "ule": operator.le,
    "ugt": operator.gt,
    "uge": operator.ge,
}


def trips(program: Program, grid: Sequence[int], arguments: Sequence[str]) -> list[float]:
    """How often each loop of a program runs each time that it is reached, on average over programs of the grid.

    `arguments` are those of the launch as text, `K=4096`.
    """
    given = {f"%{name}": int(value) for name, value in filter(None, map(_argument, arguments))}
    sizes = (*grid, 1, 1, 1)[:3]
    total = math.prod(sizes)
    numbers = sorted({int(total * ((i + 0.5) * GOLDEN % 1)) for i in range(SAMPLES)})
    counted = [_of_one(program, given, _position(number, sizes), sizes) for number in numbers]
    return [sum(column) / len(counted) for column in zip(*counted, strict=True)] if program.loops else []


def _argument(text: str) -> tuple[str, str] | None:
    found = _ARGUMENT.fullmatch(text)
    return (found[1], found[2]) if found else None


def _position(number: int, sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y = number % sizes[0], number // sizes[0]
    return x, y % sizes[1], y // sizes[1]


def _of_one(program: Program, given: Mapping[str, int], position: Sequence[int], sizes: Sequence[int]) -> list[float]:
    values: dict[str, int | None] = dict(given)
    starts = {loop.start: number for number, loop in enumerate(program.loops)}
    counts = [UNKNOWN_TRIPS] * len(program.loops)
    for index, op in enumerate(program.ops):
        if index in starts:
            loop = program.loops[starts[index]]
            counts[starts[index]] = _trips(loop, values)
        elif len(op.results) == 1 and op.types and not op.types[0].sides:
            values[op.results[0]] = _value(op, values, position, sizes)
    return counts


def _trips(loop: Loop, values: dict[str, int | None]) -> float:
    bounds = [values.get(name) for name in loop.bounds] if loop.bounds else [None]
    first, last, step = bounds if len(bounds) == 3 else (None, None, None)
    if first is None or last is None or not step:
        return UNKNOWN_TRIPS
    count = max(0, -(-(last - first) // step))
    values[loop.variable] = first + count // 2 * step  # its middle, for loops inside
    return float(count)


def _value(op: Op, values: Mapping[str, int | None], position: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The value of a scalar operation; None where it cannot be told."""
    if op.name == "arith.constant":
        found = _NUMBER.search(op.text)
        return int(found[1]) if found else None
    if op.name in ("tt.get_program_id", "tt.get_num_programs"):
        axis = _AXIS.search(op.text.partition(" ")[2])
        return (position if op.name == "tt.get_program_id" else sizes)["xyz".index(axis[1])] if axis else None
    inputs = [values.get(name) for name in op.operands]
    if op.name == "arith.select" and len(inputs) == 3 and inputs[0] is not None:
        return inputs[1] if inputs[0] else inputs[2]
    known = [value for value in inputs if value is not None]
    if len(known) < len(inputs):
        return None
    if op.name in _SAME and known:
        return known[0]
    if len(known) != 2:
        return None
    if op.name == "arith.cmpi":
        relation = _COMPARED.get(op.text.split()[1].rstrip(","))
        return int(relation(*known)) if relation else None
    return _BINARY[op.name](*known) if op.name in _BINARY else None
