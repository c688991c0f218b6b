"""Triton's IR as text, read into operations: names, operands, result types, and the loops that they stand in.

Only what the analysis of `autokernel.tuner.kinds` asks for; an operation that is not known is kept with its types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

POINTER_BYTES = 8
_BITS = re.compile(r"[a-z]+(\d+)")
_RESULTS = re.compile(r"(%[\w$.-]+)(?::\d+)?(?:, (%[\w$.-]+))* = ")
_NAME = re.compile(r'"?([a-z_]+\.[a-z_.\d]+)"?')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(.+)>", re.DOTALL)
_ITERATED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_FOR = re.compile(r"scf\.for (?:unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)")
_STAGES = re.compile(r"tt\.num_stages = (\d+)")


@dataclass(frozen=True, slots=True)
class Tile:
    """Type of a value: sides (none for a scalar) and element. `is_pointer` elements point to `element_bytes` each."""

    sides: tuple[int, ...]
    element_bytes: float
    is_pointer: bool = False
    is_float: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for side in self.sides:
            count *= side
        return count

    @property
    def nbytes(self) -> float:
        """Bytes of the elements, or of what they point to."""
        return self.elements * self.element_bytes


@dataclass(slots=True)
class Loop:
    """A loop: its variable, bounds, (name in the loop, initial value) of what it carries, and the loop around it.

    `stages` is what the source says for this loop alone; `end` the number of the operation that ends it.
    """

    variable: str
    bounds: tuple[str, str, str] | None  # first, last, step; None for a `while`
    carried: tuple[tuple[str, str], ...]
    outer: int | None
    stages: int | None
    start: int
    end: int = 0


@dataclass(slots=True)
class Op:
    """One operation, with the loop that it stands in (by number)."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    types: tuple[Tile, ...]  # of the results
    operand_types: tuple[Tile, ...]  # as far as the text gives them
    loop: int | None
    text: str


@dataclass(slots=True)
class Program:
    """The operations of a kernel in their order, and its loops."""

    ops: list[Op] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)


def read(text: str) -> Program:
    """The operations of all functions in `text`."""
    program = Program()
    regions: list[tuple[str, int | None]] = []  # (what opened it, number of its loop or reduction)
    for raw in text.splitlines():
        line = _LOCATION.sub("", raw).strip()
        if not line or line.startswith(("#", "^", "module", "//")):
            continue
        loop = next((number for kind, number in reversed(regions) if kind == "loop"), None)
        if line.startswith("}"):
            _close(program, regions, line)
            continue
        op = _operation(line, loop)
        inside_reduction = any(kind == "op" for kind, _ in regions)
        if op is not None and not inside_reduction and op.name != "tt.func":
            program.ops.append(op)
        if line.endswith("{"):
            _open(program, regions, line, op, loop)
    return program


def _open(program: Program, regions: list[tuple[str, int | None]], line: str, op: Op | None, loop: int | None) -> None:
    if op is not None and op.name in ("scf.for", "scf.while"):
        bounds = _FOR.search(line)
        stages = _STAGES.search(line)
        carried = tuple(_ITERATED.findall(line.partition("iter_args(")[2].partition(")")[0]))
        if bounds:  # names in a loop are its own, and another loop may have the same
            op.operands = (bounds[2], bounds[3], bounds[4].rstrip(","), *(initial for _, initial in carried))
        program.loops.append(
            Loop(
                variable=bounds[1] if bounds else "",
                bounds=(bounds[2], bounds[3], bounds[4].rstrip(",")) if bounds else None,
                carried=carried,
                outer=loop,
                stages=int(stages[1]) if stages else None,
                start=len(program.ops) - 1,
            )
        )
        regions.append(("loop", len(program.loops) - 1))
    elif op is not None and line.endswith("({"):
        regions.append(("op", len(program.ops) - 1))
    else:
        regions.append(("other", None))


def _close(program: Program, regions: list[tuple[str, int | None]], line: str) -> None:
    """End a region; a reduction's types and a loop's attributes stand on the line that does so."""
    if not regions:
        return
    kind, number = regions.pop()
    if kind == "op" and number is not None:
        op = program.ops[number]
        operands, result = _types(line.lstrip("})"))
        op.types, op.operand_types = result, operands
    elif kind == "loop" and number is not None:
        loop = program.loops[number]
        loop.end = len(program.ops)
        if stages := _STAGES.search(line):
            loop.stages = int(stages[1])
    if line.endswith("{"):  # } else {
        regions.append(("other", None))


def _operation(line: str, loop: int | None) -> Op | None:
    results: tuple[str, ...] = ()
    rest = line
    if found := _RESULTS.match(line):
        results = tuple(_VALUE.findall(line[: found.end()]))
        rest = line[found.end() :]
    name = _NAME.match(rest)
    if name is None:
        return None
    body, _, _ = rest.partition(" : ") if name[1] != "scf.for" else (rest, "", "")
    operands, types = _types(rest, name[1])
    return Op(
        name=name[1],
        results=results,
        operands=tuple(_VALUE.findall(body)),
        types=types if results else (),
        operand_types=operands,
        loop=loop,
        text=rest,
    )


def _types(text: str, name: str = "") -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """(operand types, result types) as an operation's text gives them behind its last colon at the top level."""
    if name in ("scf.for", "scf.if", "scf.while"):
        return (), tuple(map(_tile, _split(text.partition("-> (")[2].rpartition(")")[0].partition(")  :")[0])))
    _, colon, listed = _last_colon(text)
    if not colon:
        return (), ()
    before, arrow, after = listed.partition(" -> ")
    if not arrow:
        before, arrow, after = listed.partition(" to ")
    operands = tuple(map(_tile, _split(before.replace(" * ", ", ").strip("() "))))
    if arrow:
        return operands, tuple(map(_tile, _split(after.strip("() "))))
    return operands, (_only_result(name, text, operands),) if operands else ()


def _only_result(name: str, text: str, operands: tuple[Tile, ...]) -> Tile:
    """The result's type where the text gives the operands' alone."""
    if name == "tt.load":
        return Tile(operands[0].sides, operands[0].element_bytes, is_float=operands[0].is_float)
    if name in ("arith.cmpi", "arith.cmpf"):
        return Tile(operands[0].sides, 1 / 8)
    return operands[0] if name == "tt.addptr" else operands[-1]


def _last_colon(text: str) -> tuple[str, str, str]:
    """`text` parted at the colon before its types: not one of an attribute."""
    depth, at = 0, -1
    for index, char in enumerate(text):
        if char in "{[(<":
            depth += 1
        elif char in "}])" or (char == ">" and text[index - 1] != "-"):
            depth -= 1
        elif char == ":" and depth == 0:
            at = index
    return (text[:at], ":", text[at + 1 :].strip().rstrip("{ ")) if at >= 0 else (text, "", "")


def _split(text: str) -> Iterator[str]:
    """Types parted by commas that stand in no brackets."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        if char in "<(":
            depth += 1
        elif char == ")" or (char == ">" and text[index - 1] != "-"):
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


def _tile(text: str) -> Tile:
    found = _TENSOR.search(text)
    if found is None or text.startswith("!tt.ptr"):
        return _scalar(text, ())
    return _scalar(found[2], tuple(int(side) for side in found[1].split("x") if side))


def _scalar(element: str, sides: tuple[int, ...]) -> Tile:
    pointer = element.startswith("!tt.ptr<")
    element = element.removeprefix("!tt.ptr<").rstrip(">") if pointer else element
    bits = _BITS.match(element)
    width = int(bits[1]) / 8 if bits else float(POINTER_BYTES)
    return Tile(sides, width, is_pointer=pointer, is_float=element.startswith(("f", "bf")))
