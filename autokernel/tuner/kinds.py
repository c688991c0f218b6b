"""What a kernel does, from its IR: products or reductions, how much it moves and computes, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autokernel.tuner import scalars, ttir
from autokernel.tuner.lifetimes import ALIASES, FREE, LOADS, live_bytes
from autokernel.tuner.ttir import Op, Program, Tile


class Kind(StrEnum):
    """What a kernel's time goes to."""

    MATMUL = "matmul"
    REDUCTION = "reduction"
    MIXED = "mixed"
    """Products and reductions: attention."""
    POINTWISE = "pointwise"


SPECIAL = frozenset(
    {"math.exp", "math.exp2", "math.log", "math.log2", "math.sqrt", "math.rsqrt", "math.sin", "math.cos", "math.erf"}
    | {"math.tanh", "arith.divf", "tt.precise_sqrt", "tt.precise_divf", "tt.extern_elementwise"}
)
"""Operations that take several times as long as a multiplication."""

MASKING = ("arith.cmpi", "arith.cmpf", "arith.andi")
"""Of whole tiles: they take no register, but time."""

STORES = (
    "tt.store",
    "tt.descriptor_store",
    "tt.experimental_descriptor_store",
    "tt.atomic_rmw",
    "tt.descriptor_reduce",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one program of a kernel does and holds. Bytes and floating-point operations are of the whole program.

    `ring_bytes` is what one iteration of the hungriest loop with products loads (each stage keeps as much in shared
    memory), `streamed_bytes` the same of loops that say themselves how many stages they have (`loop_stages`),
    `resident_bytes` other loaded operands of products, `left_bytes` the largest left operand that a loop computes,
    `scratch_bytes` and `loop_scratch_bytes` the largest other value that may change its layout through shared memory
    outside and inside of loops. `live_bytes` is the most that lives in registers at once, `accumulator_bytes` the
    results of products in loops. `iteration_bytes` is what the longest loop loads
    each time, or what is loaded at once without a loop. `arithmetic` and `special` are elements that ordinary and slow
    operations make, `reductions` how many values are reduced. `elements` is the largest tile, `row_bytes` the results
    of the largest reduction, `dot` rows, columns and depth of the largest product (zeros without one). `by_descriptor`
    says that tiles are loaded whole, by descriptors.
    """

    kind: Kind
    programs: int
    flops: float
    special: float
    arithmetic: float
    reductions: float
    load_bytes: float
    store_bytes: float
    iteration_bytes: float
    iterations: float
    ring_bytes: float
    streamed_bytes: float
    loop_stages: int
    resident_bytes: float
    scratch_bytes: float
    loop_scratch_bytes: float
    left_bytes: float
    live_bytes: float
    accumulator_bytes: float
    elements: int
    row_bytes: float
    by_descriptor: bool
    dot: tuple[int, int, int]

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Work:
        """Read what `dataclasses.asdict` wrote. Raises: KeyError, TypeError or ValueError for anything else."""
        rows, columns, depth = map(int, raw["dot"])
        fields = {
            name: (int if kind == "int" else float)(raw[name])
            for name, kind in Work.__annotations__.items()
            if kind in ("int", "float")
        }
        descriptors = bool(raw["by_descriptor"])
        return Work(kind=Kind(raw["kind"]), dot=(rows, columns, depth), by_descriptor=descriptors, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch that a Triton kernel makes: which kernel, its warps and stages, and the work of one program."""

    kernel: str
    warps: int
    stages: int
    work: Work


def work_of(text: str, grid: Sequence[int], arguments: Sequence[str]) -> Work:
    """What a kernel does, from its IR and how it is launched."""
    program = ttir.read(text)
    trips = scalars.trips(program, grid, arguments)
    times = _times(program, trips)
    dots = [op for op in program.ops if op.name == "tt.dot"]
    loads = [op for op in program.ops if op.name in LOADS and op.types]
    stores = [op for op in program.ops if op.name in STORES]
    reductions = [op for op in program.ops if op.name in ("tt.reduce", "tt.scan") and op.operand_types]
    staged = _operands_of(program, dots)
    ring, streamed, stages = _rings(program, loads, dots)
    main = max(range(len(program.loops)), key=lambda n: trips[n] * _loaded(loads, n), default=None)
    largest = max((t for op in program.ops for t in op.types), key=lambda t: t.elements, default=Tile((), 4))
    programs = 1
    for size in grid:
        programs *= size
    return Work(
        kind=_kind(dots, reductions),
        programs=programs,
        flops=sum(2 * _product(op) * times(op) for op in dots),
        special=sum(op.types[0].elements * times(op) for op in program.ops if op.name in SPECIAL and op.types),
        arithmetic=sum(op.types[0].elements * times(op) for op in program.ops if _computes(op)),
        reductions=sum(times(op) for op in reductions),
        load_bytes=sum(op.types[0].nbytes * times(op) for op in loads),
        store_bytes=sum(_stored(op).nbytes * times(op) for op in stores),
        iteration_bytes=_loaded(loads, main) if main is not None else _loaded(loads, None),
        iterations=trips[main] if main is not None and _loaded(loads, main) else 1.0,
        ring_bytes=ring,
        streamed_bytes=streamed,
        loop_stages=stages,
        resident_bytes=sum(op.types[0].nbytes for op in loads if op.loop is None and op.results[0] in staged),
        scratch_bytes=_scratch(program, stores, inside=False),
        loop_scratch_bytes=_scratch(program, stores, inside=True),
        left_bytes=max(_computed(program, operand=0, inside=True), default=0.0),
        live_bytes=live_bytes(program, staged),
        accumulator_bytes=sum(op.types[0].nbytes for op in dots if op.loop is not None),
        elements=largest.elements,
        row_bytes=max((_row_bytes(op) for op in reductions), default=0.0),
        by_descriptor=any(op.name != "tt.load" for op in loads),
        dot=max((_sides(op) for op in dots), key=lambda side: side[0] * side[1] * side[2], default=(0, 0, 0)),
    )


def _kind(dots: Sequence[Op], reductions: Sequence[Op]) -> Kind:
    if dots:
        return Kind.MIXED if reductions else Kind.MATMUL
    return Kind.REDUCTION if reductions else Kind.POINTWISE


def _computes(op: Op) -> bool:
    """Whether an operation works on the elements of a tile of numbers."""
    if op.name in MASKING:
        return bool(op.types) and len(op.types[0].sides) > 1
    numbers = any(tile.sides and tile.is_float for tile in op.types)
    return numbers and op.name.startswith(("arith.", "math.")) and op.name not in FREE


def _times(program: Program, trips: Sequence[float]) -> Any:
    """Function that says how often an operation runs in one program."""

    def times(op: Op) -> float:
        count, loop = 1.0, op.loop
        while loop is not None:
            count *= trips[loop]
            loop = program.loops[loop].outer
        return count

    return times


def _loaded(loads: Sequence[Op], loop: int | None) -> float:
    """Bytes that one iteration of a loop loads, or that are loaded outside of loops."""
    return sum(op.types[0].nbytes for op in loads if op.loop == loop)


def _product(op: Op) -> float:
    rows, columns, depth = _sides(op)
    return rows * columns * depth


def _sides(op: Op) -> tuple[int, int, int]:
    """(rows, columns, depth) of a product; batches count as rows."""
    result, left = op.types[0].sides, op.operand_types[0].sides if op.operand_types else ()
    if len(result) < 2 or len(left) < 2:
        return (0, 0, 0)
    rows = 1
    for side in result[:-1]:
        rows *= side
    return rows, result[-1], left[-1]


def _stored(op: Op) -> Tile:
    """The type of what is stored: elements of the pointers, or the tile that a descriptor takes."""
    tiles = [tile for tile in op.operand_types if tile.sides]
    return tiles[-1] if op.name.startswith("tt.desc") and tiles else (op.operand_types or (Tile((), 4),))[0]


def _row_bytes(op: Op) -> float:
    """fp32 results of a reduction."""
    return op.types[0].elements * 4.0 if op.types else 4.0


def _operands_of(program: Program, dots: Sequence[Op]) -> frozenset[str]:
    """Names of the loaded values that products take, directly or turned over."""
    made = {op.results[0]: op for op in program.ops if op.results}
    found = set()
    for dot in dots:
        for name in dot.operands[:2]:
            while name in made and made[name].name in ALIASES and made[name].operands:
                name = made[name].operands[0]
            found.add(name)
    return frozenset(found)


def _rings(program: Program, loads: Sequence[Op], dots: Sequence[Op]) -> tuple[float, float, int]:
    """(bytes an iteration of the hungriest loop with products loads, the same of loops with stages of their own, the
    stages of that one)."""
    ring, streamed, stages = 0.0, 0.0, 1
    for number, loop in enumerate(program.loops):
        loaded = _loaded(loads, number)
        if any(dot.loop == number for dot in dots):
            ring = max(ring, loaded)
        elif loop.stages is not None and loaded * loop.stages >= streamed * stages:
            streamed, stages = loaded, loop.stages
    return ring, streamed, stages


def _scratch(program: Program, stores: Sequence[Op], *, inside: bool) -> float:
    """Bytes of the largest value whose layout a store or a product may make the compiler change."""
    sizes = [_stored(op).nbytes for op in stores if (op.loop is not None) == inside]
    return max([*sizes, *_computed(program, operand=1, inside=inside)], default=0.0)


def _computed(program: Program, *, operand: int, inside: bool) -> list[float]:
    """Bytes of the left (0) or right (1) operands of products that are no loaded values."""
    made = {op.results[0]: op for op in program.ops if op.results}
    sizes = []
    for dot in program.ops:
        if dot.name != "tt.dot" or (dot.loop is not None) != inside:
            continue
        name = dot.operands[operand]
        while name in made and made[name].name in ALIASES and made[name].operands:
            name = made[name].operands[0]
        if name in made and made[name].name not in LOADS and made[name].types:
            sizes.append(made[name].types[0].nbytes)
    return sizes
