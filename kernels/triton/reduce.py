"""Sum, mean or maximum over one dimension, several or all of them.

x: fp16, bf16 or fp32 of any rank, at any strides. Sums are in fp32, rounded once to x's dtype; a maximum propagates
NaN. x is read where it lies, once, unless more than three kept or two reduced groups of dimensions remain after
neighbours are merged; then a contiguous copy is reduced.

One kernel serves rows and columns: a program takes a tile [kept, outer reduced, inner reduced], its fastest dimension
the one with stride one, adds further tiles to it element by element, and reduces across threads only in the end. When
results are few and long, several programs share one and leave partial results that a second launch combines; it starts
while the first still runs (compute capability 9.0 and later) and waits there. All orders are fixed, so results repeat
bit for bit.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from autokernel.target import on_device, target_of

KERNEL_TYPE = "reduce"
BACKEND = "triton"
TUNABLES = {
    "TILE": [2048, 4096, 8192, 16384, 32768],  # elements per step of a program
    "WARPS": [2, 4, 8, 16],  # per program; fewer for small tiles
    "COLUMNS": [64, 128, 256, 512, 1024],  # kept elements side by side, where those have stride one
    "SPLITS": [0, 1, 2, 4, 8, 16, 32],  # programs per result; 0: one, or as many as fill the GPU
    "RESIDENT": [0, 1, 2, 4, 8],  # programs per multiprocessor, which walk over tiles; 0: one program per tile
    "STAGES": [1, 2, 3, 4],  # steps in flight through shared memory; 1: straight to registers
    "EVICT": ["", "evict_first", "evict_last"],  # what the cache is told about x
    "OVERLAP": [0, 1],  # 1: launch the second kernel early where the GPU can
}
CONFIG = {
    "TILE": 8192,
    "WARPS": 8,
    "COLUMNS": 256,
    "SPLITS": 0,
    "RESIDENT": 0,
    "STAGES": 1,
    "EVICT": "evict_first",
    "OVERLAP": 1,
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OPS = ("sum", "mean", "max")
SIZES = [
    *("tiles", "kept", "kept_blocks", "outer0", "outer1", "reduced0", "reduced1", "steps_each"),
    *("x_kept", "x_outer0", "x_outer1", "x_reduced0", "x_reduced1"),
    *("out_kept", "out_outer0", "out_outer1", "out_part", "divisor"),
]
"""Arguments whose values do not matter to the compiler, so that it is not asked again for each."""

SHIFTED = 1024
"""Rows of this many elements or more are read in 16 bytes at a time wherever they start; shorter ones as they lie."""

EARLY = {"launch_pdl": True}
"""Launch option: before the kernel in front is through, as the launched one waits for it."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _merge(a, b, MAX: tl.constexpr):
    return _larger(a, b) if MAX else a + b


@triton.jit
def _across(acc, MAX: tl.constexpr):
    """[kept] from [kept, outer reduced, inner reduced]."""
    return tl.reduce(tl.reduce(acc, 2, _larger), 1, _larger) if MAX else tl.sum(tl.sum(acc, 2), 1)


@triton.jit
def _read(pointers, mask, MASKED: tl.constexpr, MAX: tl.constexpr, EVICT: tl.constexpr):
    if MASKED:
        x = tl.load(pointers, mask=mask, other=float("-inf") if MAX else 0.0, eviction_policy=EVICT)
    else:
        x = tl.load(pointers, eviction_policy=EVICT)
    return x.to(tl.float32)


@triton.jit
def _walk(
    tile, inside, part, reduced0, reduced1, steps_each, step0, step1,
    MAX: tl.constexpr, KEPT: tl.constexpr, REDUCED0: tl.constexpr, REDUCED1: tl.constexpr, TWO: tl.constexpr,
    KEPT_EVEN: tl.constexpr, REDUCED_EVEN: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """[KEPT, REDUCED0, REDUCED1] of partial results: all tiles of this part, added element by element.

    step0 and step1 lead from one tile to the next; with TWO both dimensions are walked, else the inner one alone. Only
    the last tile can stick out then, so that the others need no mask and can be read as wide as addresses allow.
    """
    r0 = tl.arange(0, REDUCED0)[None, :, None]
    r1 = tl.arange(0, REDUCED1)[None, None, :]
    acc = tl.full((KEPT, REDUCED0, REDUCED1), float("-inf") if MAX else 0.0, tl.float32)
    steps1 = tl.cdiv(reduced1, REDUCED1)
    steps = steps1 * tl.cdiv(reduced0, REDUCED0)
    first = part * steps_each
    last = tl.minimum(first + steps_each, steps)
    if TWO:
        for i in tl.range(first, last, num_stages=STAGES):
            i0, i1 = tl.cast(i // steps1, tl.int64), tl.cast(i % steps1, tl.int64)
            there = inside & (i0 * REDUCED0 + r0 < reduced0) & (i1 * REDUCED1 + r1 < reduced1)
            x = _read(tile + i0 * step0 + i1 * step1, there, not (KEPT_EVEN and REDUCED_EVEN), MAX, EVICT)
            acc = _merge(acc, x, MAX)
    else:
        whole = last
        if not REDUCED_EVEN:
            whole = tl.maximum(first, tl.minimum(last, reduced1 // REDUCED1))
        for i in tl.range(first, whole, num_stages=STAGES):
            x = _read(tile + tl.cast(i, tl.int64) * step1, inside, not KEPT_EVEN, MAX, EVICT)
            acc = _merge(acc, x, MAX)
        if whole < last:
            end = inside & (whole * REDUCED1 + r1 < reduced1)
            acc = _merge(acc, _read(tile + tl.cast(whole, tl.int64) * step1, end, True, MAX, EVICT), MAX)
    return acc


@triton.jit
def _place(t, kept_blocks, outer0, outer1, PLAIN: tl.constexpr):
    """(part, index in outer0, index in outer1, block of kept) of a tile; with PLAIN there is none but the last."""
    part, o0, o1, block = 0, 0, 0, t
    if not PLAIN:
        block = t % kept_blocks
        rest = t // kept_blocks
        part = rest // (outer0 * outer1)
        o0 = rest % (outer0 * outer1) // outer1
        o1 = rest % outer1
    return part, tl.cast(o0, tl.int64), tl.cast(o1, tl.int64), tl.cast(block, tl.int64)


@triton.jit
def _aligned(row, length, part, MAX: tl.constexpr):
    """(first address in a row on a 16-byte boundary, elements from there in whole 16 bytes, the elements around those).

    The first part of a row takes the latter, [1, 1, elements].
    """
    BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    WIDTH: tl.constexpr = 16 // BYTES
    address = row.to(tl.int64)
    boundary = (address + 15) // 16 * 16
    head = tl.minimum((boundary - address) // BYTES, length)
    body = (length - head) // WIDTH * WIDTH
    e = tl.arange(0, 2 * WIDTH)[None, None, :]
    at = tl.where(e < WIDTH, e, head + body - WIDTH + e)
    limit = tl.where(part == 0, tl.where(e < WIDTH, head, length), 0)
    ends = tl.load(row + at, mask=at < limit, other=float("-inf") if MAX else 0.0).to(tl.float32)
    return tl.multiple_of(boundary.to(row.dtype), 16), body, ends


@triton.jit(do_not_specialize=SIZES)
def _reduce(
    x, out, tiles, kept, kept_blocks, outer0, outer1, reduced0, reduced1, steps_each,
    x_kept, x_outer0, x_outer1, x_reduced0, x_reduced1, out_kept, out_outer0, out_outer1, out_part, divisor,
    MAX: tl.constexpr, DIVIDE: tl.constexpr, ALONG: tl.constexpr, VEC: tl.constexpr, KEPT_UNIT: tl.constexpr,
    REDUCED_UNIT: tl.constexpr, KEPT: tl.constexpr, REDUCED0: tl.constexpr, REDUCED1: tl.constexpr, PLAIN: tl.constexpr,
    TWO: tl.constexpr, ONCE: tl.constexpr, SHIFT: tl.constexpr, KEPT_EVEN: tl.constexpr, REDUCED_EVEN: tl.constexpr,
    RESIDENT: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, WAIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tiles of KEPT results, one each or with RESIDENT every num_programs-th; out is in parts that follow each other.

    x is [outer0, outer1, kept, reduced0, reduced1] with the strides x_*. ALONG names the dimension with stride one
    (kept, reduced, or neither). So that the compiler knows how far addresses are aligned, the other strides are in
    units of VEC elements, kept in units of KEPT_UNIT and reduced1 in units of REDUCED_UNIT. PLAIN: kept is all there is
    beside the reduced dimensions, and one part. SHIFT: rows start at any address (KEPT is one).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if WAIT:
        tl.extra.cuda.gdc_wait()
    kept = kept * KEPT_UNIT
    reduced1 = reduced1 * REDUCED_UNIT
    r0 = tl.arange(0, REDUCED0).to(tl.int64)
    r1 = tl.arange(0, REDUCED1).to(tl.int64)
    step0 = tl.cast(x_reduced0, tl.int64) * REDUCED0 * VEC
    step1 = REDUCED1 if ALONG == "reduced" else tl.cast(x_reduced1, tl.int64) * REDUCED1 * VEC
    pid = tl.program_id(0)
    last = tiles if RESIDENT else pid + 1
    stride = tl.num_programs(0) if RESIDENT else 1
    for t in tl.range(pid, last, stride, num_stages=STAGES if RESIDENT and ONCE else 1):
        part, o0, o1, block = _place(t, kept_blocks, outer0, outer1, PLAIN)
        k = block * KEPT + tl.arange(0, KEPT)
        along_k = k if ALONG == "kept" else k * x_kept * VEC
        along_r1 = r1 if ALONG == "reduced" else r1 * x_reduced1 * VEC
        tile = x + (o0 * x_outer0 + o1 * x_outer1) * VEC + along_k[:, None, None] + along_r1[None, None, :]
        if TWO:
            tile = tile + (r0 * x_reduced0 * VEC)[None, :, None]
        length = reduced1
        if SHIFT:
            body, length, ends = _aligned(x + o0 * x_outer0 + o1 * x_outer1 + block * x_kept, reduced1, part, MAX)
            tile = body + r1[None, None, :]
        inside = (k < kept)[:, None, None]
        if ONCE:
            there = inside & (r0 < reduced0)[None, :, None] & (r1 < length)[None, None, :]
            acc = _read(tile, there, not (KEPT_EVEN and REDUCED_EVEN), MAX, EVICT)
        else:
            acc = _walk(
                tile, inside, part, reduced0, length, steps_each, step0, step1,
                MAX, KEPT, REDUCED0, REDUCED1, TWO, KEPT_EVEN, REDUCED_EVEN, STAGES, EVICT,
            )  # fmt: skip
        value = _across(acc, MAX)
        if SHIFT:
            value = _merge(value, _across(ends, MAX), MAX)
        if DIVIDE:
            value = value / divisor
        target = out + tl.cast(part, tl.int64) * out_part + o0 * out_outer0 + o1 * out_outer1 + k * out_kept
        tl.store(target, value.to(out.dtype.element_ty), mask=k < kept)


class Extent(NamedTuple):
    """One dimension after neighbours are merged: elements, and the stride in x and in the output (0 when reduced)."""

    size: int
    stride: int
    out: int


class Plan(NamedTuple):
    """One launch: the arguments between the tensors and the divisor, and the constants, by the kernel's names."""

    programs: int
    splits: int
    arguments: tuple
    constants: dict
    warps: int


class Route(NamedTuple):
    """How a call is served: the order in which x is copied first (None: not at all), and one or two launches."""

    order: tuple | None
    out_shape: list
    count: int
    first: Plan | None
    second: Plan | None


def kernel_fn(x, dim=-1, op="sum"):
    """x reduced over `dim` (an int, several, or None or () for all), contiguous, in x's dtype.

    Raises: TypeError for another dtype; ValueError for an unknown op or a dimension named twice; IndexError when x has
    no such dimension, or for the maximum of nothing.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"reduce takes fp16, bf16 or fp32, not {x.dtype}")
    if op not in OPS:
        raise ValueError(f"op is {op!r}, expected one of {', '.join(OPS)}")
    dim = tuple(dim) if isinstance(dim, list) else dim
    target = target_of(x)
    route = _route(x.shape, x.stride(), dim, x.element_size(), x.data_ptr() % 16 == 0, target.sms)
    if op == "max" and route.count == 0:
        raise IndexError(f"the maximum over {dim} of shape {list(x.shape)} has no elements")
    out = torch.empty(route.out_shape, dtype=x.dtype, device=x.device)
    if route.first is None:
        return out
    if route.order is not None:
        x = x.permute(route.order).contiguous()
    divisor = route.count if op == "mean" else None
    with on_device(x):
        if route.second is None:
            _launch(x, out, route.first, op == "max", divisor)
        else:
            parts = torch.empty((route.first.splits, out.numel()), dtype=torch.float32, device=x.device)
            early = _early(target)
            _launch(x, parts, route.first, op == "max", None, leads=early)
            _launch(parts, out, route.second, op == "max", divisor, follows=early)
    return out


def _launch(x, out, plan, largest, divisor, leads=False, follows=False):
    """`divisor` is that of a mean; `leads` and `follows` tell the first of two overlapping launches and the second."""
    _reduce[(plan.programs,)](
        x, out, *plan.arguments, float(divisor or 0),
        MAX=largest, DIVIDE=divisor is not None, **plan.constants, STAGES=CONFIG["STAGES"], EVICT=CONFIG["EVICT"],
        WAIT=follows, OVERLAP=leads, num_warps=plan.warps, **(EARLY if follows else {}),
    )  # fmt: skip


def _early(target):
    """Whether a kernel can be launched early and wait for the one in front of it."""
    able = target.vendor == "cuda" and target.arch >= 90 and not triton.knobs.runtime.interpret
    return able and CONFIG["OVERLAP"] == 1


@functools.cache
def _route(shape, strides, dim, itemsize, aligned, sms):
    """The route of one call; `aligned`: x begins on a 16-byte boundary."""
    rank = len(shape)
    dims = _dims(rank, dim)
    kept = [d for d in range(rank) if d not in dims]
    out_shape = [shape[d] for d in kept]
    results = math.prod(out_shape)
    count = math.prod(shape[d] for d in dims)
    if not results:
        return Route(None, out_shape, count, None, None)
    order = None
    layout = _layout(shape, strides, kept, dims)
    if layout is None:
        order, aligned = (*kept, *dims), True
        layout = _layout((results, count), (count, 1), [0], [1])
    first, second = _plan(layout, results, itemsize, aligned, sms), None
    if first.splits > 1:
        parts = _layout((first.splits, results), (results, 1), [1], [0])
        second = _plan(parts, results, 4, True, sms, split=False)
    return Route(order, out_shape, count, first, second)


def _dims(rank, dim):
    """The dimensions to reduce, ascending and not negative."""
    if dim is None or dim == ():
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    if any(not -max(rank, 1) <= d < max(rank, 1) for d in dims):
        raise IndexError(f"reduce over {dim} of a tensor of rank {rank}")
    dims = sorted(d % rank for d in dims) if rank else []
    if len(set(dims)) < len(dims):
        raise ValueError(f"{dim} names a dimension twice")
    return dims


def _layout(shape, strides, kept, dims):
    """(kept, outer0, outer1, reduced0, reduced1) as Extents, or None when x must be copied first.

    Innermost among the kept ones is the dimension with stride one, or else the largest.
    """
    out, step = {}, 1
    for d in reversed(kept):
        out[d] = step
        step *= shape[d]
    kept = _merged([Extent(shape[d], strides[d], out[d]) for d in kept])
    reduced = _merged(sorted((Extent(shape[d], strides[d], 0) for d in dims), key=lambda e: -e.stride))
    if len(kept) > 3 or len(reduced) > 2:
        return None
    if kept and not any(e.stride == 1 for e in reduced):
        inner = min(kept, key=lambda e: (e.stride or math.inf, -e.size))
    else:
        inner = max(kept, key=lambda e: e.size, default=Extent(1, 0, 0))
    outer = [e for e in kept if e is not inner]
    alone = Extent(1, 0, 0)
    return (inner, *[alone] * (2 - len(outer)), *outer, *[alone] * (2 - len(reduced)), *reduced)


def _merged(extents):
    """The same elements in the same order in fewer dimensions; those of size one are gone."""
    merged = []
    for e in extents:
        if e.size == 1:
            continue
        if merged and merged[-1].stride == e.size * e.stride and merged[-1].out == e.size * e.out:
            merged[-1] = Extent(merged[-1].size * e.size, e.stride, e.out)
        else:
            merged.append(e)
    return merged


def _plan(layout, results, itemsize, aligned, sms, split=True):
    """The launch for one layout; with `split` a reduction may be shared by several programs."""
    kept, outer0, outer1, reduced0, reduced1 = layout
    along = "reduced" if reduced1.stride == 1 else "kept" if kept.stride == 1 else "neither"
    two = reduced0.size > 1
    outer = outer0.size * outer1.size
    others = [e.stride for e in (outer0, outer1, reduced0)]
    others += [] if along == "kept" else [kept.stride]
    others += [] if along == "reduced" else [reduced1.stride]
    width = 16 // itemsize if aligned else 1
    vec = 1 if along == "neither" else math.gcd(width, *others)
    kept_unit = math.gcd(vec, kept.size)
    reduced_unit = math.gcd(vec, reduced1.size)
    shift = along == "reduced" and not two and reduced1.size >= SHIFTED and reduced_unit < 16 // itemsize
    if shift:
        vec = kept_unit = reduced_unit = 1
    k, r0, r1 = _tile_sizes(kept.size, outer, reduced0.size, reduced1.size, along, shift, sms)
    blocks = -(-kept.size // k)
    tiles = blocks * outer
    steps = -(-reduced0.size // r0) * -(-reduced1.size // r1)
    splits, each = 1, steps
    if split and steps > 1:  # few results: enough programs for four on each multiprocessor
        wanted = CONFIG["SPLITS"] or (1 if tiles >= 2 * sms else -(-4 * sms // tiles))
        each = -(-steps // min(wanted, steps))
        splits = -(-steps // each)
    tiles *= splits
    arguments = (
        tiles, kept.size // kept_unit, blocks, outer0.size, outer1.size, reduced0.size, reduced1.size // reduced_unit,
        each, kept.stride // vec, outer0.stride // vec, outer1.stride // vec, reduced0.stride // vec,
        reduced1.stride // vec, kept.out, outer0.out, outer1.out, results,
    )  # fmt: skip
    constants = {
        "ALONG": along,
        "VEC": vec,
        "KEPT_UNIT": kept_unit,
        "REDUCED_UNIT": reduced_unit,
        "KEPT": k,
        "REDUCED0": r0,
        "REDUCED1": r1,
        "PLAIN": outer == splits == 1,
        "TWO": two,
        "ONCE": steps == 1,
        "SHIFT": shift,
        "KEPT_EVEN": kept.size % k == 0,
        "REDUCED_EVEN": reduced0.size % r0 == 0 and reduced1.size % r1 == 0 and not shift,
        "RESIDENT": CONFIG["RESIDENT"] > 0,
    }
    resident = CONFIG["RESIDENT"] * sms
    warps = min(CONFIG["WARPS"], max(1, k * r0 * r1 // 256))
    return Plan(min(tiles, resident) if resident else tiles, splits, arguments, constants, warps)


def _tile_sizes(kept, outer, reduced0, reduced1, along, shift, sms):
    """[kept, outer reduced, inner reduced] of a tile.

    It is filled from its fastest dimension on. Small inputs get smaller tiles, so that every multiprocessor has some.
    """
    tile = CONFIG["TILE"]
    most = [triton.next_power_of_2(max(size, 1)) for size in (kept, reduced0, reduced1)]
    if along == "kept":
        k = min(most[0], CONFIG["COLUMNS"])
        r1 = min(most[2], max(1, tile // k))
        return k, min(most[1], max(1, tile // (k * r1))), r1
    r1 = min(most[2], tile)
    r0 = min(most[1], tile // r1)
    k = 1 if shift else min(most[0], tile // (r0 * r1))
    while k > 1 and -(-kept // k) * outer < 4 * sms:
        k //= 2
    return k, r0, r1
