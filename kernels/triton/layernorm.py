"""LayerNorm over the last dimension(s): y = (x - mean) / sqrt(variance + eps) * weight + bias, variance biased.

x: [..., *weight.shape] with any strides, fp32, bf16 or fp16; weight, bias: any floating dtype, or None. Without a
weight the last dimension is normalized. The output is contiguous, in x's dtype. All arithmetic is fp32 and is rounded
once; the variance is a mean of squared distances to the mean, never a difference of large numbers.

A norm moves bytes, so each structure below reads x from memory once and keeps many 16-byte loads in flight:

rows      the normalized dimension has unit stride and a row fits in registers, where mean and variance are two sums
          over it. A program takes ROWS rows and is done with them after one load; short rows share a program, long ones
          are spread over up to 32 warps. As an alternative a persistent grid loops over the rows with weight and bias
          in registers, and the next rows are copied to shared memory meanwhile.
whole     rows of 4 to 32 KB whose length is a power of two, known when the kernel is compiled: nothing is masked and
          nothing left over. Rows of more than one step are gone over twice, the second time out of the caches: so
          little state is kept that a multiprocessor is full of programs, each with its loads under way.
long      longer rows. One program per row and multiprocessor goes over it twice: every lane keeps the mean of what it
          saw and the squared distances to that, then comes the scaling. The second pass runs backwards: what was read
          last is the likeliest still to be cached, and there is no barrier in either pass.
strided   channels first, or rows cut out of a larger tensor in several dimensions: two-dimensional tiles whose
          neighbouring lanes go along whichever dimension has unit stride.
"""

import functools

import torch
import triton
import triton.language as tl

from autokernel.target import on_device, target_of

KERNEL_TYPE = "layernorm"
BACKEND = "triton"
TUNABLES = {
    "STEPS": [0, 1, 2, 4, 8],  # whole: steps in which a row is gone over, twice if more than one; 0: by shape
    "STEP_WARPS": [0, 2, 4, 8, 16, 32],  # whole: warps per row; 0: by shape
    "WARPS": [0, 1, 2, 4, 8, 16, 32],  # rows: warps per program; 0: two 16-byte loads per thread
    "ROWS": [0, 1, 2, 4, 8, 16, 32],  # rows: rows per program; 0: one, or several short ones
    "PERSISTENT": [0, -1, 1, 2, 3, 4, 6, 8],  # rows: programs per multiprocessor that loop; -1: no loop; 0: by shape
    "STAGES": [1, 2, 3, 4],  # rows, persistent: tiles in flight per program; 1: no prefetch
    "WEIGHT": ["auto", "early", "late"],  # rows: and bias: read before x, and kept by a loop; or after the sums
    "LOAD": ["evict_first", ""],  # cache policy of what is read once
    "STORE": ["evict_first", ""],  # cache policy of the output
    "MAX_BLOCK": [8192, 16384, 32768, 65536],  # the longest row, in elements, that is kept in registers
    "LONG_WARPS": [8, 16, 32],  # long: warps per row
    "UNROLL": [1, 2, 4, 8],  # long: 16-byte loads per thread and step
    "LONG_STAGES": [1, 2, 3],  # long: steps in flight; 1: only what the warps' drift gives
    "ACROSS": [8, 16, 32, 64],  # strided: neighbouring rows of a program, where it is those that are contiguous
}
CONFIG = {
    "STEPS": 0,
    "STEP_WARPS": 0,
    "WARPS": 0,
    "ROWS": 0,
    "PERSISTENT": 0,
    "STAGES": 3,
    "WEIGHT": "auto",
    "LOAD": "",
    "STORE": "",
    "MAX_BLOCK": 32768,
    "LONG_WARPS": 32,
    "UNROLL": 2,
    "LONG_STAGES": 1,
    "ACROSS": 16,
}


@triton.jit
def _centered(value, cols, col, MASKED: tl.constexpr, DTYPE: tl.constexpr):
    """`value` less the means of its rows, and 0 beyond the last column.

    Rows of equal values must become exactly 0, or the small variance makes rounding errors large. Sums of 16-bit values
    have the bits for that, and the division is correctly rounded; what fp32 lost is found by doing it again.
    """
    PASSES: tl.constexpr = DTYPE.primitive_bitwidth // 16
    for _ in tl.static_range(PASSES):
        value -= tl.div_rn(tl.sum(value, 1), cols * 1.0)[:, None]
        if MASKED:
            value = tl.where(col < cols, value, 0.0)
    return value


@triton.jit
def _aligned(pointer, ALIGN: tl.constexpr):
    """`pointer`, of which the compiler knows no more than that it is on a multiple of ALIGN elements.

    It spreads each load over the threads as the alignment allows. Weights that allow more than x would be spread in
    another way, and then be moved between threads. The index is 0: grids have one dimension.
    """
    return pointer + tl.program_id(2) * ALIGN


@triton.jit
def _read(pointer, default, col, cols, ALIGN: tl.constexpr, MASKED: tl.constexpr):
    """The weight or bias at columns `col` in fp32; `default` where there is none."""
    if pointer is None:
        value = default
    elif MASKED:
        value = tl.load(_aligned(pointer, ALIGN) + col, col < cols, 0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        value = tl.load(_aligned(pointer, ALIGN) + col, eviction_policy="evict_last").to(tl.float32)
    return value


@triton.jit
def _write_tile(
    value, scale, weight, bias, w, b, out, row, col, rows, cols, ALIGN: tl.constexpr, MASKED: tl.constexpr,
    EARLY: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    if not EARLY:
        w = _read(weight, 1.0, col, cols, ALIGN, MASKED)
        b = _read(bias, 0.0, col, cols, ALIGN, MASKED)
    y = (value * scale * w + b).to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + row * cols + col, y, (row < rows) & (col < cols), eviction_policy=STORE)
    else:
        tl.store(out + row * cols + col, y, eviction_policy=STORE)


@triton.jit
def _rows_tile(
    tile, x, weight, bias, w, b, out, rows, cols, stride, eps,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    if MASKED:
        inside = (row < rows) & (col < cols)
        value = tl.load(x + row * stride + col, inside, 0.0, eviction_policy=LOAD).to(tl.float32)
    else:
        value = tl.load(x + row * stride + col, eviction_policy=LOAD).to(tl.float32)
    value = _centered(value, cols, col, MASKED, x.dtype.element_ty)
    scale = (1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / cols + eps))[:, None]
    if STAGES > 1 and not EARLY:
        # This always holds. Without it the loop would prefetch weight and bias too, and fill shared memory with them.
        if tile >= 0:
            _write_tile(value, scale, weight, bias, w, b, out, row, col, rows, cols, ALIGN, MASKED, EARLY, STORE)
    else:
        _write_tile(value, scale, weight, bias, w, b, out, row, col, rows, cols, ALIGN, MASKED, EARLY, STORE)


@triton.jit(do_not_specialize=["rows", "cols", "stride"])
def _rows_kernel(
    x, weight, bias, out, rows, cols, stride, eps, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    # Multiples of ALIGN, said in a way that the compiler can see: it widens loads and stores by that.
    cols = cols // ALIGN * ALIGN
    stride = stride // ALIGN * ALIGN
    w = 1.0
    b = 0.0
    if EARLY:
        w = _read(weight, 1.0, tl.arange(0, BLOCK)[None, :], cols, ALIGN, MASKED)
        b = _read(bias, 0.0, tl.arange(0, BLOCK)[None, :], cols, ALIGN, MASKED)
    if STAGES == 0:
        _rows_tile(
            tl.program_id(0), x, weight, bias, w, b, out, rows, cols, stride, eps,
            ALIGN, ROWS, BLOCK, MASKED, STAGES, EARLY, LOAD, STORE,
        )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _rows_tile(
                tile, x, weight, bias, w, b, out, rows, cols, stride, eps,
                ALIGN, ROWS, BLOCK, MASKED, STAGES, EARLY, LOAD, STORE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stride"])
def _whole_kernel(
    x, weight, bias, out, stride, eps, ALIGN: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = COLS // STEPS
    row = tl.program_id(0).to(tl.int64)
    x += row * (stride // ALIGN * ALIGN)
    out += row * COLS
    lane = tl.arange(0, CHUNK)
    # A lane keeps the mean of what it sees and the sum of squared distances to that (spread), as Welford does.
    mean = tl.zeros([CHUNK], tl.float32)
    spread = tl.zeros([CHUNK], tl.float32)
    for seen in tl.static_range(0, STEPS):
        value = tl.load(x + seen * CHUNK + lane, eviction_policy="evict_last").to(tl.float32)
        step = value - mean
        mean += step * (1.0 / (seen + 1))
        spread += step * (value - mean)
    # Where all are equal, so is the mean of all, to the last bit: sums of 2^n equal numbers are exact.
    center = 0.0
    PASSES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 16  # what fp32 lost is found by doing it again
    for _ in tl.static_range(PASSES):
        off = tl.sum(mean, 0) * (1.0 / CHUNK)
        mean -= off
        center += off
    scale = 1.0 / tl.sqrt_rn(tl.sum(spread + mean * mean * STEPS, 0) / COLS + eps)
    for done in tl.range(0, STEPS):
        at = done * CHUNK + lane
        if STEPS == 1:
            y = mean * scale
        else:
            y = (tl.load(x + at, eviction_policy="evict_first").to(tl.float32) - center) * scale
        y = y * _read(weight, 1.0, at, COLS, ALIGN, False) + _read(bias, 0.0, at, COLS, ALIGN, False)
        tl.store(out + at, y.to(out.dtype.element_ty), eviction_policy=STORE)


@triton.jit(do_not_specialize=["cols", "stride"])
def _long_kernel(
    x, weight, bias, out, cols, stride, eps, ALIGN: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = UNROLL * LANES
    row = tl.program_id(0).to(tl.int64)
    cols = cols // ALIGN * ALIGN
    x += row * (stride // ALIGN * ALIGN)
    out += row * cols
    # A lane sees UNROLL elements of each chunk. It keeps their mean and the sum of squared distances to that (spread)
    # to itself until the end; two such pairs are joined by the rule of Chan, Golub and LeVeque.
    at = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = cols // CHUNK * CHUNK
    if weight is not None:
        weight = _aligned(weight, ALIGN)
    if bias is not None:
        bias = _aligned(bias, ALIGN)
    mean = tl.zeros([LANES], tl.float32)
    spread = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, whole, CHUNK, num_stages=STAGES):
        value = tl.load(x + start + at, eviction_policy="evict_last").to(tl.float32)
        new_mean = tl.sum(value, 0) * (1.0 / UNROLL)
        value -= new_mean[None, :]
        seen = start * (1.0 / LANES)
        share = UNROLL / (seen + UNROLL)
        step = new_mean - mean
        mean += step * share
        spread += tl.sum(value * value, 0) + step * step * (seen * share)
    inside = at < cols - whole
    rest = tl.load(x + whole + at, inside, 0.0, eviction_policy=LOAD).to(tl.float32)
    seen = whole * (1.0 / LANES)
    new = tl.sum(inside.to(tl.float32), 0)
    centered = tl.where(inside, rest - mean[None, :], 0.0)
    step = tl.sum(centered, 0) / tl.maximum(new, 1.0)
    centered = tl.where(inside, centered - step[None, :], 0.0)
    share = new / tl.maximum(seen + new, 1.0)
    mean += step * share
    spread += tl.sum(centered * centered, 0) + step * step * (seen * share)

    # The lanes' means are summed less one of them: where all are equal, so is the mean of all, to the last bit.
    seen += new
    center = tl.max(mean, 0)
    center += tl.sum((mean - center) * seen, 0) / cols
    mean -= center
    scale = 1.0 / tl.sqrt_rn(tl.sum(spread + mean * mean * seen, 0) / cols + eps)
    w = 1.0
    if weight is not None:
        w = tl.load(weight + whole + at, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    b = 0.0
    if bias is not None:
        b = tl.load(bias + whole + at, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    y = (rest - center) * scale * w + b
    tl.store(out + whole + at, y.to(out.dtype.element_ty), inside, eviction_policy=STORE)
    for done in tl.range(CHUNK, whole + CHUNK, CHUNK, num_stages=STAGES):
        start = whole - done
        value = tl.load(x + start + at, eviction_policy=LOAD).to(tl.float32)
        if weight is not None:
            w = tl.load(weight + start + at, eviction_policy="evict_last").to(tl.float32)
        if bias is not None:
            b = tl.load(bias + start + at, eviction_policy="evict_last").to(tl.float32)
        y = (value - center) * scale * w + b
        tl.store(out + start + at, y.to(out.dtype.element_ty), eviction_policy=STORE)


@triton.jit
def _strided_kernel(
    x, weight, bias, out, cols, x_col, eps, n0, n1, n2, x0, x1, x2, out0, out1, out2, WIDE: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
    col = tl.arange(0, BLOCK)[None, :]
    inside &= col < cols
    at = i0 * x0 + i1 * x1 + i2 * x2 + col.to(INDEX) * x_col
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    value = _centered(value, cols, col, True, x.dtype.element_ty)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / cols + eps)
    y = value * scale[:, None] * _read(weight, 1.0, col, cols, 16, True) + _read(bias, 0.0, col, cols, 16, True)
    tl.store(out + i0 * out0 + i1 * out1 + i2 * out2 + col, y.to(out.dtype.element_ty), inside)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WHOLE = {4096: (2, 128), 8192: (2, 256), 16384: (2, 256), 32768: (4, 512)}
"""whole: for rows of so many bytes (steps, threads). On an H200 in bf16, 8192 rows of 8192 took 69.1 us instead of the
104.0 us of `rows`; 32768 rows of 4096 took 130.9 instead of 135.4 us in one process, and 136.1 us beside others."""
MAX_TILE = 65536  # elements of a program; more do not fit in its registers, whatever CONFIG says
ONE_WARP_BYTES = 2048  # a row of at most this much belongs to one warp, which needs no barrier to reduce it
SHORT_TILE_BYTES = 4096  # what a program takes of shorter rows
MAX_ACCESSES = 8  # long: loads per thread and step
PAIRED_FROM_BYTES, PAIRED_TO_BYTES, PAIR_WARPS = 8192, 16384, 8  # two rows of this many bytes share a program of
# few warps: on an H200, rows of 4096 and 8192 in bf16 took 2 to 18 % less than with THREAD_BYTES
THREAD_BYTES = 32  # two 16-byte loads per thread: few registers, so many programs fit, and enough bytes in flight
MANY_PER_THREAD = 16  # elements; more than this take so many registers that only few programs fit
LARGE_TILE_BYTES = 32768  # of such tiles few are in flight without a prefetch
WIDE_FROM = 2**31 - 2**20  # offsets beyond this need 64 bits; the margin is for masked lanes
LEAST_ACROSS = 8  # 16 bytes: with fewer neighbouring rows, it is better to make x contiguous first


def kernel_fn(x, weight, bias, eps=1e-5):
    """The normalized x, contiguous, in x's dtype; weight's shape gives the normalized dimensions (None: the last).

    Raises: TypeError for a dtype other than fp16, bf16 and fp32; ValueError when weight or bias do not fit.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"layernorm takes fp16, bf16 or fp32, not {x.dtype}")
    shape = x.shape[-1:] if weight is None else weight.shape
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"weight has shape {list(shape)}, x has {list(x.shape)}")
    if weight is not None:
        weight = weight.contiguous()
    if bias is not None:
        if bias.shape != shape:
            raise ValueError(f"bias has shape {list(bias.shape)}, and {list(shape)} is normalized")
        bias = bias.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    eps = float(eps)
    cols = shape.numel()
    if x.is_contiguous():
        _launch_rows(x, weight, bias, out, eps, x.numel() // cols, cols, cols)
        return out
    rows, columns = _layout(tuple(x.shape), x.stride(), len(shape))
    if not _launch_strided(x, weight, bias, out, eps, rows, columns):
        _launch_rows(x.contiguous(), weight, bias, out, eps, x.numel() // cols, cols, cols)
    return out


def _launch_rows(x, weight, bias, out, eps, rows, cols, stride):
    target = target_of(x)
    # The largest power of two, up to 16, that divides where rows begin and end: what one access may span, in elements.
    divisor = cols | stride if rows > 1 else cols
    align = 1 if x.data_ptr() % 16 else min(divisor & -divisor, 16)
    with on_device(x):
        steps, threads = _steps(rows, cols, x.element_size()) if align * x.element_size() >= 16 else (0, 0)
        if steps:
            warps = CONFIG["STEP_WARPS"] or threads // target.warp_size
            _whole_kernel[(rows,)](
                x, weight, bias, out, stride, eps, align, cols, steps, CONFIG["STORE"], num_warps=warps
            )
            return
        if cols > CONFIG["MAX_BLOCK"]:
            warps = min(CONFIG["LONG_WARPS"], 1024 // target.warp_size)
            vector = 16 // x.element_size()
            span = min(align, vector)
            # Shorter accesses, more of them; but each has its own address and mask, and only so many fit in registers.
            unroll = min(CONFIG["UNROLL"] * vector // span, max(CONFIG["UNROLL"], MAX_ACCESSES))
            lanes = warps * target.warp_size * span
            stages = min(CONFIG["LONG_STAGES"], 1 + target.shared_bytes // (unroll * lanes * 3 * x.element_size()))
            _long_kernel[(rows,)](
                x, weight, bias, out, cols, stride, eps, align, unroll, lanes, stages,
                CONFIG["LOAD"], CONFIG["STORE"], num_warps=warps,
            )  # fmt: skip
            return
        tile_rows, block, warps, grid, stages, early = _plan(rows, cols, x.element_size(), target)
        _rows_kernel[(grid,)](
            x, weight, bias, out, rows, cols, stride, eps, align, tile_rows, block,
            block != cols or rows % tile_rows != 0, stages, early, CONFIG["LOAD"], CONFIG["STORE"], num_warps=warps,
        )  # fmt: skip


def _steps(rows, cols, itemsize):
    """(steps, threads) for rows that are a `whole`; no steps for others."""
    steps, threads = WHOLE.get(cols * itemsize, (0, 0)) if cols & (cols - 1) == 0 else (0, 0)
    return CONFIG["STEPS"] if steps and CONFIG["STEPS"] else steps, threads


@functools.lru_cache(4096)
def _plan(rows, cols, itemsize, target):
    """For rows in registers: (rows per program, its columns, its warps, programs, stages or 0 for no loop, whether
    the weight is read early)."""
    block = triton.next_power_of_2(cols)
    row_bytes = block * itemsize
    # Short rows share a program, but not so that multiprocessors are left without one.
    spare = triton.next_power_of_2(max(1, rows // (4 * target.sms)))
    paired = PAIRED_FROM_BYTES <= row_bytes <= PAIRED_TO_BYTES and spare > 1
    tile_rows = CONFIG["ROWS"] or (
        2 if paired else max(1, min(SHORT_TILE_BYTES // row_bytes if row_bytes <= ONE_WARP_BYTES else 1, spare))
    )
    tile_rows = min(tile_rows, MAX_TILE // block)
    threads = target.warp_size if row_bytes <= ONE_WARP_BYTES else tile_rows * row_bytes // THREAD_BYTES
    if paired and tile_rows == 2:
        threads = PAIR_WARPS * target.warp_size
    warps = CONFIG["WARPS"] or max(1, threads // target.warp_size)
    warps = min(warps, 1024 // target.warp_size)
    tiles = triton.cdiv(rows, tile_rows)
    many = tile_rows * block // (warps * target.warp_size) > MANY_PER_THREAD
    grid, stages = _persistence(tiles, tile_rows * row_bytes, many, target)
    early = CONFIG["WEIGHT"] == "early" or (CONFIG["WEIGHT"] == "auto" and not many)
    return tile_rows, block, warps, grid, stages, early


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


def _launch_strided(x, weight, bias, out, eps, rows, columns):
    """Whether x was normalized where it lies: not when that takes more indices or registers than there are."""
    if len(rows) > 3 or len(columns) > 1:
        return False
    ((cols, x_col, _),) = columns
    if x_col == 1 and len(rows) == 1:
        _launch_rows(x, weight, bias, out, eps, rows[0][0], cols, rows[0][1])
        return True
    if x_col != 1:  # the dimension with unit stride, if there is one, goes along the lanes
        rows = sorted(rows, key=lambda row: row[1] == 1)
    (n0, x0, out0), (n1, x1, out1), (n2, x2, out2) = [(1, 0, 0)] * (3 - len(rows)) + list(rows)
    target = target_of(x)
    block = triton.next_power_of_2(cols)
    if block > (CONFIG["MAX_BLOCK"] if x_col == 1 else CONFIG["MAX_BLOCK"] // LEAST_ACROSS):
        return False
    tile_rows = max(1, SHORT_TILE_BYTES // (block * x.element_size())) if x_col == 1 else CONFIG["ACROSS"]
    tile_rows = min(tile_rows, CONFIG["MAX_BLOCK"] // block, triton.next_power_of_2(n0 * n1 * n2))
    flat = tile_rows > n2
    warps = max(1, min(block * tile_rows * x.element_size() // THREAD_BYTES, 1024) // target.warp_size)
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    tiles = triton.cdiv(n0 * n1 * n2, tile_rows) if flat else n0 * n1 * triton.cdiv(n2, tile_rows)
    with on_device(x):
        _strided_kernel[(tiles,)](
            x, weight, bias, out, cols, x_col, eps, n0, n1, n2, x0, x1, x2, out0, out1, out2,
            max(extent, x.numel()) >= WIDE_FROM, flat, tile_rows, block, num_warps=warps,
        )  # fmt: skip
    return True


@functools.lru_cache(4096)
def _layout(shape, strides, rank):
    """(rows, columns), the last `rank` dimensions being columns: what is left of the dimensions when neighbours that
    can be walked as one are joined, each as (size, stride in x, stride in the output). At least one of each is left.
    """
    groups = ([], [])
    step = 1
    for axis in reversed(range(len(shape))):
        group = groups[axis >= len(shape) - rank]
        size, stride = shape[axis], strides[axis]
        if size == 1:
            continue
        if group and stride == group[-1][0] * group[-1][1] and step == group[-1][0] * group[-1][2]:
            group[-1] = (group[-1][0] * size, *group[-1][1:])
        else:
            group.append((size, stride, step))
        step *= size
    rows, columns = (tuple(reversed(group)) for group in groups)
    return rows or ((1, step, step),), columns or ((1, 1, 1),)
