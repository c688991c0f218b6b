"""Softmax along any dimension: y = exp(x - max(x)) / sum(exp(x - max(x))).

x: any shape and strides, fp32, bf16 or fp16; the output is contiguous, in x's dtype. All arithmetic is fp32 and is
rounded once. -inf gives 0; a row that holds NaN or +inf, or nothing but -inf, gives NaN, as in PyTorch.

Softmax moves bytes, so each structure below reads x from memory once and keeps many 16-byte loads in flight:

rows      the reduced dimension has unit stride and a row fits in registers. A program takes ROWS rows and is done with
          them after one load; short rows share a program, long ones are spread over up to 32 warps. As an alternative
          a persistent grid loops over the rows, and the next ones are copied to shared memory meanwhile.
whole     rows of 4 to 16 KB whose length is a power of two, known when the kernel is compiled: nothing is masked and
          nothing left over. Rows of more than one step are gone over twice, the second time out of the caches: so
          little state is kept that a multiprocessor is full of programs, each with its loads under way.
long      longer rows, such as a vocabulary. One program per row and multiprocessor goes over the row twice: a running
          maximum and sum in every lane, then the scaling. The second pass runs backwards: what was read last is the
          likeliest still to be cached, and there is no barrier in either pass.
strided   everything else (another dimension, transposed or sliced heads): two-dimensional tiles whose neighbouring
          lanes go along whichever dimension has unit stride; in registers when the column fits, else in two passes.
"""

import functools

import torch
import triton
import triton.language as tl

from autokernel.target import on_device, target_of

KERNEL_TYPE = "softmax"
BACKEND = "triton"
TUNABLES = {
    "STEPS": [0, 1, 2, 4, 8],  # whole: steps in which a row is gone over, twice if more than one; 0: by shape
    "STEP_WARPS": [0, 2, 4, 8, 16, 32],  # whole: warps per row; 0: by shape
    "WARPS": [0, 1, 2, 4, 8, 16, 32],  # rows: warps per program; 0: two 16-byte loads per thread
    "ROWS": [0, 1, 2, 4, 8, 16, 32],  # rows: rows per program; 0: one, or several short ones
    "PERSISTENT": [0, -1, 1, 2, 3, 4, 6, 8],  # rows: programs per multiprocessor that loop; -1: no loop; 0: by shape
    "STAGES": [1, 2, 3, 4],  # rows, persistent: tiles in flight per program; 1: no prefetch
    "LOAD": ["evict_first", ""],  # cache policy of what is read once
    "STORE": ["evict_first", ""],  # cache policy of the output
    "MAX_BLOCK": [8192, 16384, 32768, 65536],  # the longest row, in elements of 16 bits, that is kept in registers
    "LONG_WARPS": [8, 16, 32],  # long: warps per row
    "UNROLL": [1, 2, 4, 8],  # long: 16-byte loads per thread and step
    "LONG_STAGES": [1, 2, 3],  # long: steps in flight; 1: only what the warps' drift gives
    "ACROSS": [16, 32, 64, 128],  # strided: neighbouring columns of a program, where those are contiguous
}
CONFIG = {
    "STEPS": 0,
    "STEP_WARPS": 0,
    "WARPS": 0,
    "ROWS": 0,
    "PERSISTENT": 0,
    "STAGES": 3,
    "LOAD": "",
    "STORE": "",
    "MAX_BLOCK": 32768,
    "LONG_WARPS": 32,
    "UNROLL": 2,
    "LONG_STAGES": 1,
    "ACROSS": 32,
}

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # below every finite value; not -inf, whose difference to itself is NaN
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _exp(x):
    # exp2 is the hardware's own. The maximum is subtracted before this scaling, which could overflow in front of it.
    return tl.exp2(x * LOG2E)


@triton.jit
def _online(peak, total, x, AXIS: tl.constexpr):
    """Running maximum and sum of exp(x - maximum) per lane, extended by tile `x` along AXIS."""
    higher = tl.maximum(peak, tl.max(x, AXIS))
    total = total * _exp(peak - higher) + tl.sum(_exp(x - tl.expand_dims(higher, AXIS)), AXIS)
    return higher, total


@triton.jit
def _rows_tile(
    tile, x, out, rows, cols, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    if MASKED:
        inside = (row < rows) & (col < cols)
        value = tl.load(x + row * stride + col, inside, MINUS_INF, eviction_policy=LOAD).to(tl.float32)
    else:
        value = tl.load(x + row * stride + col, eviction_policy=LOAD).to(tl.float32)
    e = _exp(value - tl.max(value, 1)[:, None])
    y = (e * (1.0 / tl.sum(e, 1))[:, None]).to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + row * cols + col, y, inside, eviction_policy=STORE)
    else:
        tl.store(out + row * cols + col, y, eviction_policy=STORE)


@triton.jit(do_not_specialize=["rows", "cols", "stride"])
def _rows_kernel(
    x, out, rows, cols, stride, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    # Multiples of ALIGN, said in a way that the compiler can see: it widens loads and stores by that.
    cols = cols // ALIGN * ALIGN
    stride = stride // ALIGN * ALIGN
    if STAGES == 0:
        _rows_tile(tl.program_id(0), x, out, rows, cols, stride, ROWS, BLOCK, MASKED, LOAD, STORE)
    else:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _rows_tile(tile, x, out, rows, cols, stride, ROWS, BLOCK, MASKED, LOAD, STORE)


@triton.jit(do_not_specialize=["stride"])
def _whole_kernel(
    x, out, stride, ALIGN: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = COLS // STEPS
    row = tl.program_id(0).to(tl.int64)
    x += row * (stride // ALIGN * ALIGN)
    out += row * COLS
    lane = tl.arange(0, CHUNK)
    if STEPS == 1:
        value = tl.load(x + lane).to(tl.float32)
        e = _exp(value - tl.max(value, 0))
        y = e * (1.0 / tl.sum(e, 0))
        tl.store(out + lane, y.to(out.dtype.element_ty), eviction_policy=STORE)
    else:
        peak = tl.full([CHUNK], LOWEST, tl.float32)
        total = tl.zeros([CHUNK], tl.float32)
        for step in tl.range(0, STEPS):
            value = tl.load(x + step * CHUNK + lane, eviction_policy="evict_last").to(tl.float32)
            higher = tl.maximum(peak, value)
            total = total * _exp(peak - higher) + _exp(value - higher)
            peak = higher
        highest = tl.max(peak, 0)
        scale = 1.0 / tl.sum(total * _exp(peak - highest), 0)
        for step in tl.range(0, STEPS):
            at = step * CHUNK + lane
            value = tl.load(x + at, eviction_policy="evict_first").to(tl.float32)
            y = _exp(value - highest) * scale
            tl.store(out + at, y.to(out.dtype.element_ty), eviction_policy=STORE)


@triton.jit(do_not_specialize=["cols", "stride"])
def _long_kernel(
    x, out, cols, stride, ALIGN: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = UNROLL * LANES
    row = tl.program_id(0).to(tl.int64)
    cols = cols // ALIGN * ALIGN
    x += row * (stride // ALIGN * ALIGN)
    out += row * cols
    # A lane sees UNROLL elements of each chunk, and keeps their maximum and sum to itself until the end.
    at = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = cols // CHUNK * CHUNK
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, whole, CHUNK, num_stages=STAGES):
        value = tl.load(x + start + at, eviction_policy="evict_last").to(tl.float32)
        peak, total = _online(peak, total, value, 0)
    inside = at < cols - whole
    rest = tl.load(x + whole + at, inside, MINUS_INF, eviction_policy=LOAD).to(tl.float32)
    peak, total = _online(peak, total, rest, 0)

    highest = tl.max(peak, 0)
    scale = 1.0 / tl.sum(total * _exp(peak - highest), 0)
    y = (_exp(rest - highest) * scale).to(out.dtype.element_ty)
    tl.store(out + whole + at, y, inside, eviction_policy=STORE)
    for done in tl.range(CHUNK, whole + CHUNK, CHUNK, num_stages=STAGES):
        start = whole - done
        value = tl.load(x + start + at, eviction_policy=LOAD).to(tl.float32)
        y = (_exp(value - highest) * scale).to(out.dtype.element_ty)
        tl.store(out + start + at, y, eviction_policy=STORE)


@triton.jit
def _strided_kernel(
    x, out, cols, x_col, out_col, n0, n1, n2, x0, x1, x2, out0, out1, out2, WIDE: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    # A row has three indices. A program takes ROWS neighbours in the last of them, or (FLAT) in all three as one.
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    tile = tl.program_id(0).to(INDEX)
    lane = tl.arange(0, ROWS)[:, None]
    if FLAT:
        row = tile * ROWS + lane
        outer = row // n2
        i2 = row % n2
        inside = outer < n0 * n1
    else:
        tiles = tl.cdiv(n2, ROWS)
        outer = tile // tiles
        i2 = tile % tiles * ROWS + lane
        inside = i2 < n2
    i0 = outer // n1
    i1 = outer % n1
    x += i0 * x0 + i1 * x1 + i2 * x2
    out += i0 * out0 + i1 * out1 + i2 * out2
    col = tl.arange(0, BLOCK)[None, :].to(INDEX)
    if LOOP:
        peak = tl.full([ROWS, BLOCK], LOWEST, tl.float32)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, cols, BLOCK):
            at = start + col
            value = tl.load(x + at * x_col, inside & (at < cols), MINUS_INF).to(tl.float32)
            higher = tl.maximum(peak, value)
            total = total * _exp(peak - higher) + _exp(value - higher)
            peak = higher
        highest = tl.max(peak, 1)[:, None]
        scale = 1.0 / tl.sum(total * _exp(peak - highest), 1)[:, None]
        last = (cols - 1) // BLOCK * BLOCK
        for done in tl.range(0, cols, BLOCK):
            at = last - done + col
            value = tl.load(x + at * x_col, inside & (at < cols), MINUS_INF).to(tl.float32)
            y = (_exp(value - highest) * scale).to(out.dtype.element_ty)
            tl.store(out + at * out_col, y, inside & (at < cols))
    else:
        inside &= col < cols
        value = tl.load(x + col * x_col, inside, MINUS_INF).to(tl.float32)
        e = _exp(value - tl.max(value, 1)[:, None])
        y = (e * (1.0 / tl.sum(e, 1))[:, None]).to(out.dtype.element_ty)
        tl.store(out + col * out_col, y, inside)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WHOLE = {4096: (1, 64), 8192: (4, 128), 16384: (1, 512)}
"""whole: for rows of so many bytes (steps, threads). On an H200 in bf16, 32768 rows of 4096 took 130.3 us instead of
the 134.8 us of `rows`."""
IN_CACHE_BYTES, IN_ONE_STEP = 64 << 20, {8192: (1, 256)}  # less than this of such rows is done in one step
MAX_TILE = 65536  # elements of a program; more do not fit in its registers, whatever CONFIG says
ONE_WARP_BYTES = 2048  # a row of at most this much belongs to one warp, which needs no barrier to reduce it
SHORT_TILE_BYTES = 4096  # what a program takes of shorter rows
MAX_ACCESSES = 8  # long: loads per thread and step
THREAD_BYTES = 32  # two 16-byte loads per thread: few registers, so many programs fit, and enough bytes in flight
MANY_PER_THREAD = 16  # elements; more than this take so many registers that only few programs fit
LARGE_TILE_BYTES = 32768  # of such tiles few are in flight without a prefetch
WIDE_FROM = 2**31 - 2**20  # offsets beyond this need 64 bits; the margin is for masked lanes


def kernel_fn(x, dim=-1):
    """softmax of x along dim, contiguous, in x's dtype.

    Raises: TypeError for a dtype other than fp16, bf16 and fp32; IndexError for a dimension that x does not have.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"softmax takes fp16, bf16 or fp32, not {x.dtype}")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} is out of range for {x.dim()} dimensions")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    dim %= rank
    if x.is_contiguous() and dim == rank - 1:
        cols = x.shape[-1] if x.dim() else 1
        _launch_rows(x, out, x.numel() // cols, cols, cols)
        return out
    rows, cols = _layout(tuple(x.shape), x.stride(), dim)
    if len(rows) > 3:
        x = x.contiguous()
        rows, cols = _layout(tuple(x.shape), x.stride(), dim)
    if cols[1] == cols[2] == 1 and len(rows) == 1:
        _launch_rows(x, out, rows[0][0], cols[0], rows[0][1])
    else:
        _launch_strided(x, out, rows, cols)
    return out


def _launch_rows(x, out, rows, cols, stride):
    target = target_of(x)
    # The largest power of two, up to 16, that divides where rows begin and end: what one access may span, in elements.
    divisor = cols | stride if rows > 1 else cols
    align = 1 if x.data_ptr() % 16 else min(divisor & -divisor, 16)
    with on_device(x):
        steps, threads = _steps(rows, cols, x.element_size()) if align * x.element_size() >= 16 else (0, 0)
        if steps:
            warps = CONFIG["STEP_WARPS"] or threads // target.warp_size
            _whole_kernel[(rows,)](x, out, stride, align, cols, steps, CONFIG["STORE"], num_warps=warps)
            return
        if cols > CONFIG["MAX_BLOCK"]:
            warps = min(CONFIG["LONG_WARPS"], 1024 // target.warp_size)
            vector = 16 // x.element_size()
            span = min(align, vector)
            # Shorter accesses, more of them; but each has its own address and mask, and only so many fit in registers.
            unroll = min(CONFIG["UNROLL"] * vector // span, max(CONFIG["UNROLL"], MAX_ACCESSES))
            lanes = warps * target.warp_size * span
            stages = min(CONFIG["LONG_STAGES"], 1 + target.shared_bytes // (unroll * lanes * x.element_size()))
            _long_kernel[(rows,)](
                x, out, cols, stride, align, unroll, lanes, stages,
                CONFIG["LOAD"], CONFIG["STORE"], num_warps=warps,
            )  # fmt: skip
            return
        tile_rows, block, warps, grid, stages = _plan(rows, cols, x.element_size(), target)
        _rows_kernel[(grid,)](
            x, out, rows, cols, stride, align, tile_rows, block, block != cols or rows % tile_rows != 0,
            stages, CONFIG["LOAD"], CONFIG["STORE"], num_warps=warps,
        )  # fmt: skip


def _steps(rows, cols, itemsize):
    """(steps, threads) for rows that are a `whole`; no steps for others."""
    row_bytes = cols * itemsize
    few = row_bytes in IN_ONE_STEP and rows * row_bytes < IN_CACHE_BYTES
    steps, threads = (IN_ONE_STEP if few else WHOLE).get(row_bytes, (0, 0)) if cols & (cols - 1) == 0 else (0, 0)
    return CONFIG["STEPS"] if steps and CONFIG["STEPS"] else steps, threads


@functools.lru_cache(4096)
def _plan(rows, cols, itemsize, target):
    """(rows per program, its columns, its warps, programs, stages or 0 for no loop) for rows in registers."""
    block = triton.next_power_of_2(cols)
    row_bytes = block * itemsize
    # Short rows share a program, but not so that multiprocessors are left without one.
    spare = triton.next_power_of_2(max(1, rows // (4 * target.sms)))
    tile_rows = CONFIG["ROWS"] or max(
        1, min(SHORT_TILE_BYTES // row_bytes if row_bytes <= ONE_WARP_BYTES else 1, spare)
    )
    tile_rows = min(tile_rows, MAX_TILE // block)
    threads = target.warp_size if row_bytes <= ONE_WARP_BYTES else tile_rows * row_bytes // THREAD_BYTES
    warps = CONFIG["WARPS"] or max(1, threads // target.warp_size)
    warps = min(warps, 1024 // target.warp_size)
    tiles = triton.cdiv(rows, tile_rows)
    many = tile_rows * block // (warps * target.warp_size) > MANY_PER_THREAD
    grid, stages = _persistence(tiles, tile_rows * row_bytes, many, target)
    return tile_rows, block, warps, grid, stages


def _persistence(tiles, tile_bytes, many, target):
    """(programs, stages): a program per tile and no loop, or a grid that just fills the GPU and prefetches.

    While several programs fit on a multiprocessor, one loads as another computes; where registers allow only one of
    them, nothing but its own prefetch fills the gaps.
    """
    per_sm = CONFIG["PERSISTENT"] or (1 if many and tile_bytes >= LARGE_TILE_BYTES else -1)
    if per_sm < 0:
        return tiles, 0
    # All tiles in flight but one lie in shared memory, of which each program has its share.
    return min(tiles, per_sm * target.sms), min(CONFIG["STAGES"], 1 + target.shared_bytes // per_sm // tile_bytes)


def _launch_strided(x, out, rows, cols):
    cols, x_col, out_col = cols
    if x_col != 1:  # the dimension with unit stride, if there is one, goes along the lanes
        rows = sorted(rows, key=lambda row: row[1] == 1)
    (n0, x0, out0), (n1, x1, out1), (n2, x2, out2) = [(1, 0, 0)] * (3 - len(rows)) + list(rows)
    target = target_of(x)
    block = triton.next_power_of_2(cols)
    tile_rows = max(1, SHORT_TILE_BYTES // (block * x.element_size())) if x_col == 1 else CONFIG["ACROSS"]
    tile_rows = min(tile_rows, triton.next_power_of_2(n0 * n1 * n2))
    flat = tile_rows > n2
    block = min(block, max(16, (16384 if x_col != 1 else CONFIG["MAX_BLOCK"]) // tile_rows))
    warps = max(1, min(block * tile_rows * x.element_size() // THREAD_BYTES, 1024) // target.warp_size)
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    tiles = triton.cdiv(n0 * n1 * n2, tile_rows) if flat else n0 * n1 * triton.cdiv(n2, tile_rows)
    with on_device(x):
        _strided_kernel[(tiles,)](
            x, out, cols, x_col, out_col, n0, n1, n2, x0, x1, x2, out0, out1, out2,
            max(extent, x.numel()) >= WIDE_FROM, flat, tile_rows, block, block < cols, num_warps=warps,
        )  # fmt: skip


@functools.lru_cache(4096)
def _layout(shape, strides, dim):
    """(rows, columns): what is left of the dimensions, each as (size, stride in x, stride in the output).

    Rows are all dimensions but `dim`, where neighbours that can be walked as one are joined; at least one is left.
    """
    shape, strides = shape or (1,), strides or (1,)
    rows, columns, step = [], None, 1
    for axis in reversed(range(len(shape))):
        size = shape[axis]
        entry = (size, 1 if size == 1 else strides[axis], 1 if size == 1 else step)
        if axis == dim:
            columns = entry
        elif size != 1:
            inner = rows[-1] if rows else (0, 0, 0)
            if inner[0] and entry[1] == inner[0] * inner[1] and entry[2] == inner[0] * inner[2]:
                rows[-1] = (inner[0] * size, inner[1], inner[2])
            else:
                rows.append(entry)
        step *= size
    return tuple(reversed(rows)) or ((1, columns[0], columns[0]),), columns
