"""Matrix product a [..., M, K] @ b [..., K, N] -> [..., M, N], as torch.matmul; leading dimensions broadcast.

fp16, bf16 and fp32 with any strides; sums in fp32, rounded once to the output. fp32 inputs are multiplied in true fp32
or something as accurate, unless torch.backends.cuda.matmul.allow_tf32 is set. The output is contiguous.

Two kernels:
- "tma" (compute capability 9.0 and later, 16-bit matrices on 16-byte boundaries): as many programs as there are
  multiprocessors, each walking over output tiles, which the copy engine loads several blocks of K ahead.
- "plain" (every GPU, every stride): one program per output tile, masked loads through pointers.
Both operands may be stored along either dimension, because the matrix unit reads shared memory either way.

Tiles are visited in groups of GROUP rows, so that programs that run at the same time share operands in the L2 cache.
Where whole tiles would leave multiprocessors idle (few output tiles, or few left over in the last wave), a tile's K is
split into parts: each part writes its fp32 sums to a workspace, and the part that arrives last adds them up in the
order of K, so that results repeat bit for bit whoever comes last.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from autokernel.target import on_device, target_of

KERNEL_TYPE = "matmul"
BACKEND = "triton"
TUNABLES = {
    "VARIANT": ["auto", "plain", "tma"],  # tma where GPU and operands allow, else plain
    "TILE": ["auto", "64x64", "64x128", "64x256", "128x64", "128x128", "128x256", "256x128"],  # M x N; auto: by shape
    "BLOCK_K": [0, 16, 32, 64, 128],  # 0: by dtype
    "WARPS": [0, 4, 8],  # 0: by tile
    "STAGES": [0, 1, 2, 3, 4, 5],  # tiles of K in flight; 0: as many as fit
    "GROUP": [1, 4, 8, 16],  # rows of tiles that are walked through together
    "SPLIT": [0, 1, 2, 4, 8, 16],  # most parts of a tile's K; 0: by shape, 1: never split
    "EPILOGUE": [1, 2, 4],  # pieces in which a tile is written; more take less shared memory
    "FLATTEN": [False, True],  # one loop over tiles and K, so that loads run ahead into the next tile
    "WARP_SPECIALIZE": [False, True],  # tma: leave loads to warps of their own (compute capability 10.0)
    # How fp32 is multiplied when TF32 is not allowed: by scalar units, or as three TF32 products of its upper and lower
    # halves, which is as accurate and several times faster (not on AMD, whose matrix units take fp32).
    "FP32": ["ieee", "tf32x3"],
}
CONFIG = {
    "VARIANT": "auto",
    "TILE": "auto",
    "BLOCK_K": 0,
    "WARPS": 0,
    "STAGES": 0,
    "GROUP": 8,
    "SPLIT": 0,
    "EPILOGUE": 2,
    "FLATTEN": False,
    "WARP_SPECIALIZE": False,
    "FP32": "tf32x3",
}

MAX_BATCH_DIMS = 3
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the CPU."""

MIN_SPLIT_STEPS = 4
"""A part of a split tile has at least this many blocks of K, or its sums cost more than they save."""


@triton.jit
def _dot(x, y, acc, PRECISION: tl.constexpr):
    """acc + x @ y; `PRECISION` is how fp32 is multiplied."""
    if INTERPRETED:  # it would multiply bf16 by its bit patterns
        x, y = x.to(tl.float32), y.to(tl.float32)
    if PRECISION == "tf32x3":
        # Matrix units cut off, not round, what they add to an accumulator: over a long K that would show. The limit on
        # inexact sums means nothing for fp32, but keeps the compiler from turning this into a dot that adds to `acc`.
        return acc + tl.dot(x, y, input_precision=PRECISION, max_num_imprecise_acc=x.shape[1])
    return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def _tile_at(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of the tile that is visited as number `index`."""
    per_group = GROUP * tiles_n
    first = index // per_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    within = index % per_group
    return first + within % rows, within // rows


@triton.jit
def _store_tile(out, values, m, n, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write `values` [ROWS, COLS] to row `m`, column `n` of `out` [M, N], as far as it reaches."""
    rows = m + tl.arange(0, ROWS)
    cols = n + tl.arange(0, COLS)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = out + rows[:, None].to(tl.int64) * N + cols[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_part(
    out, acc, sums, arrivals, tile, part, PARTS, m, n, M, N, BM: tl.constexpr, BN: tl.constexpr, COLS: tl.constexpr
):
    """Leave one part's sums in the workspace; the last part of a tile to arrive adds all up, in order, and stores."""
    row = tl.arange(0, BM)[:, None] * BN
    base = sums + tile.to(tl.int64) * PARTS * (BM * BN)
    tl.store(base + part.to(tl.int64) * (BM * BN) + row + tl.arange(0, BN)[None, :], acc)
    tl.debug_barrier()  # the arrival below vouches for what every thread has written
    if tl.atomic_add(arrivals + tile, 1) == PARTS - 1:
        for col in range(0, BN, COLS):  # a few columns at a time: the sums of a whole tile do not fit twice
            at = base + row + (col + tl.arange(0, COLS))[None, :]
            total = tl.zeros((BM, COLS), tl.float32)
            for _ in range(PARTS):
                total += tl.load(at, cache_modifier=".cg")
                at += BM * BN
            _store_tile(out, total, m, n + col, M, N, BM, COLS)


@triton.jit
def _plain_kernel(
    a,
    b,
    out,
    sums,
    arrivals,
    M,
    N,
    K,
    sam,
    sak,
    sbk,
    sbn,
    n1,
    n2,
    sa0,
    sa1,
    sa2,
    sb0,
    sb1,
    sb2,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    index = tl.program_id(0)
    part = index % PARTS
    tile = index // PARTS
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    row, col = _tile_at(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    m, n = row * BM, col * BN
    steps = tl.cdiv(K, BK)
    begin = steps * part // PARTS
    end = steps * (part + 1) // PARTS

    inner, middle, outer = batch % n2, batch // n2 % n1, batch // n2 // n1
    a += outer * sa0 + middle * sa1 + inner * sa2
    b += outer * sb0 + middle * sb1 + inner * sb2
    out += batch * M * N

    rows = m + tl.arange(0, BM)
    cols = n + tl.arange(0, BN)
    inside_m = (rows < M)[:, None]
    inside_n = (cols < N)[None, :]
    k = begin * BK + tl.arange(0, BK)
    at_a = a + rows[:, None].to(tl.int64) * sam + k[None, :].to(tl.int64) * sak
    at_b = b + k[:, None].to(tl.int64) * sbk + cols[None, :].to(tl.int64) * sbn
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(begin, end):
        if EVEN_K:
            x = tl.load(at_a, mask=inside_m, other=0.0)
            y = tl.load(at_b, mask=inside_n, other=0.0)
        else:
            left = K - step * BK
            x = tl.load(at_a, mask=inside_m & (tl.arange(0, BK) < left)[None, :], other=0.0)
            y = tl.load(at_b, mask=inside_n & (tl.arange(0, BK) < left)[:, None], other=0.0)
        acc = _dot(x, y, acc, PRECISION)
        at_a += BK * sak
        at_b += BK * sbk
    if PARTS == 1:
        _store_tile(out, acc, m, n, M, N, BM, BN)
    else:
        _add_part(out, acc, sums, arrivals, tile, part, PARTS, m, n, M, N, BM, BN, min(BN, 32))


@triton.jit
def _load(desc, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, BATCHED: tl.constexpr):
    """A tile [ROWS, COLS] of a matrix, or of matrix `batch` of several."""
    return desc.load([batch, row, col]).reshape(ROWS, COLS) if BATCHED else desc.load([row, col])


@triton.jit
def _store_halves(
    desc,
    out,
    values,
    batch,
    m,
    n,
    M,
    N,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PIECES: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write `values` [ROWS, COLS] in PIECES pieces of columns: through `desc` when TMA, else through pointers."""
    if PIECES == 1:
        if TMA:
            if len(desc.block_shape) == 3:
                desc.store([batch, m, n], values.to(desc.dtype).reshape(1, ROWS, COLS))
            else:
                desc.store([m, n], values.to(desc.dtype))
        else:
            _store_tile(out + batch.to(tl.int64) * M * N, values, m, n, M, N, ROWS, COLS)
    else:
        half: tl.constexpr = COLS // 2
        left, right = values.reshape(ROWS, 2, half).permute(0, 2, 1).split()
        _store_halves(desc, out, left, batch, m, n, M, N, ROWS, half, PIECES // 2, TMA)
        _store_halves(desc, out, right, batch, m, n + half, M, N, ROWS, half, PIECES // 2, TMA)


@triton.jit
def _tma_kernel(
    a_desc,
    b_desc,
    out_desc,
    out,
    sums,
    arrivals,
    M,
    N,
    K,
    batches,
    whole,  # tiles that are not split; those after them are, into PARTS parts
    a_step,  # 0 when all batches share one a, else 1
    b_step,
    PARTS: tl.constexpr,
    A_T: tl.constexpr,  # a is stored as [K, M]
    B_T: tl.constexpr,  # b is stored as [N, K]
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    BATCHED: tl.constexpr,
    PIECES: tl.constexpr,
    STORE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(K, BK)
    units = whole + (tiles * batches - whole) * PARTS
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE):
        if PARTS == 1:
            tile = unit
            begin, end = 0, steps
        else:
            split = unit >= whole
            tile = tl.where(split, whole + (unit - whole) // PARTS, unit)
            part = tl.where(split, (unit - whole) % PARTS, 0)
            begin = tl.where(split, steps * part // PARTS, 0)
            end = tl.where(split, steps * (part + 1) // PARTS, steps)
        batch = tile // tiles
        row, col = _tile_at(tile % tiles, tiles_m, tiles_n, GROUP)
        m, n = row * BM, col * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(begin, end):
            k = step * BK
            if A_T:
                x = _load(a_desc, batch * a_step, k, m, BK, BM, BATCHED).T
            else:
                x = _load(a_desc, batch * a_step, m, k, BM, BK, BATCHED)
            if B_T:
                y = _load(b_desc, batch * b_step, n, k, BN, BK, BATCHED).T
            else:
                y = _load(b_desc, batch * b_step, k, n, BK, BN, BATCHED)
            acc = _dot(x, y, acc, "ieee")
        if PARTS == 1:
            _store_halves(out_desc, out, acc, batch, m, n, M, N, BM, BN, PIECES, STORE_TMA)
        elif split:
            at = out + batch.to(tl.int64) * M * N
            _add_part(at, acc, sums, arrivals, tile - whole, part, PARTS, m, n, M, N, BM, BN, 32)
        else:
            _store_halves(out_desc, out, acc, batch, m, n, M, N, BM, BN, PIECES, STORE_TMA)


# Host: what is to be computed, and how -------------------------------------------------------------------------------


def kernel_fn(a, b):
    """a [..., M, K] @ b [..., K, N] -> [..., M, N] in fp16, bf16 or fp32, batch dimensions broadcast.

    Raises: TypeError for other or differing dtypes, ValueError for shapes or devices that do not fit.
    """
    if b.device != a.device:
        raise ValueError(f"matmul: a is on {a.device}, b on {b.device}")
    plan = _plan(
        a.dtype,
        b.dtype,
        a.shape,
        a.stride(),
        a.data_ptr() % 16,
        b.shape,
        b.stride(),
        b.data_ptr() % 16,
        target_of(a),
        torch.backends.cuda.matmul.allow_tf32,
    )
    if plan.batch is not None:  # too many batch dimensions that do not merge
        rows, cols = (a if a.dim() > 1 else a.unsqueeze(0)), (b if b.dim() > 1 else b.unsqueeze(1))
        a = rows.expand(*plan.batch, *rows.shape[-2:]).contiguous()
        b = cols.expand(*plan.batch, *cols.shape[-2:]).contiguous()
        return kernel_fn(a, b).view(plan.shape)
    if plan.launch is None:
        return torch.zeros(plan.shape, dtype=a.dtype, device=a.device)
    out = torch.empty(plan.shape, dtype=a.dtype, device=a.device)
    with on_device(a):
        plan.launch(a, b, out)
    return out


class _Launcher:
    """A kernel with everything fixed but its tensors.

    Its first call on a device goes through Triton's dispatch, which compiles. Later ones go straight to the compiled
    kernel, as dispatch takes longer than many a product; what dispatch looks at is the same in every call of a plan.
    """

    def __init__(self, kernel, programs, arguments, constants, **options):
        self._kernel, self._grid, self._options = kernel, (programs, 1, 1), options
        self._constants, self._tail = constants, (*arguments, *constants.values())
        self._arguments, self._compiled = arguments, {}

    def __call__(self, device, *tensors):
        run = self._compiled.get(device.index)
        if run is not None:
            run(*tensors, *self._tail)
            return
        compiled = self._kernel[self._grid](*tensors, *self._arguments, **self._constants, **self._options)
        if device.type != "cpu":
            self._compiled[device.index] = compiled[self._grid]


def _describer(shape, strides, block):
    """A function that makes descriptors of tensors that are laid out alike; only the first one is checked."""
    fields = {}

    def describe(tensor):
        if not fields:
            fields.update(vars(TensorDescriptor(tensor, shape, strides, block)), base=None)
        described = TensorDescriptor.__new__(TensorDescriptor)
        vars(described).update(fields, base=tensor)
        return described

    return describe


class _Plan:
    """How one kind of call is carried out: `launch(a, b, out)`, or None where there is nothing to add up."""

    __slots__ = ("batch", "launch", "shape")

    def __init__(self, shape, launch=None, batch=None):
        self.shape, self.launch, self.batch = shape, launch, batch


@functools.lru_cache(maxsize=4096)
def _plan(dtype, b_dtype, a_shape, a_stride, a_offset, b_shape, b_stride, b_offset, target, allow_tf32):
    if dtype != b_dtype or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"matmul takes two fp16, two bf16 or two fp32 tensors, got {dtype} and {b_dtype}")
    kept, a_shape, a_stride, b_shape, b_stride = _as_matrices(a_shape, a_stride, b_shape, b_stride)
    batch = torch.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    (m, k), n = a_shape[-2:], b_shape[-1]
    shape = (*batch, *kept)
    if k == 0 or 0 in shape:
        return _Plan(shape)

    dims = _merged(zip(batch, _expanded(a_shape, a_stride, batch), _expanded(b_shape, b_stride, batch), strict=True))
    sam = a_stride[-2]
    if dims and dims[-1][2] == 0:  # one b for the whole innermost batch: its a is a taller matrix
        size, step, _ = dims[-1]
        if m == 1 or step == m * sam:
            sam = step if m == 1 else sam
            m *= size
            dims.pop()
    if len(dims) > MAX_BATCH_DIMS:
        return _Plan(shape, batch=batch)
    dims = [(1, 0, 0)] * (MAX_BATCH_DIMS - len(dims)) + dims
    sizes, a_steps, b_steps = zip(*dims, strict=True)
    problem = _Problem(m, n, k, sizes, (sam, a_stride[-1], *a_steps), (*b_stride[-2:], *b_steps), dtype)
    aligned = a_offset == b_offset == 0
    operands = _tma_operands(problem) if target.has_tma and aligned and dtype != torch.float32 else None
    if not _uses_tma(problem, operands):
        return _Plan(shape, _plain_launch(problem, target, allow_tf32))
    return _Plan(shape, _tma_launch(problem, operands, target))


def _as_matrices(a_shape, a_stride, b_shape, b_stride):
    """(output's last dimensions, shapes and strides of a and b) with vectors made a row of a and a column of b."""
    if not a_shape or not b_shape:
        raise ValueError("matmul takes tensors with at least one dimension")
    kept = ([a_shape[-2]] if len(a_shape) > 1 else []) + ([b_shape[-1]] if len(b_shape) > 1 else [])
    if len(a_shape) == 1:
        a_shape, a_stride = (1, *a_shape), (0, *a_stride)
    if len(b_shape) == 1:
        b_shape, b_stride = (*b_shape, 1), (*b_stride, 0)
    if a_shape[-1] != b_shape[-2]:
        raise ValueError(f"matmul: inner sizes differ, {tuple(a_shape)} and {tuple(b_shape)}")
    return kept, a_shape, a_stride, b_shape, b_stride


class _Problem:
    """One product: sizes, batch `sizes`, and strides of a (M, K, then batch) and of b (K, N, then batch)."""

    def __init__(self, m, n, k, sizes, a, b, dtype):
        self.m, self.n, self.k, self.sizes, self.a, self.b, self.dtype = m, n, k, sizes, a, b, dtype
        self.batches = sizes[0] * sizes[1] * sizes[2]


def _expanded(shape, stride, batch):
    """Strides of a tensor's batch dimensions once they are broadcast to `batch`."""
    own = [0 if size == 1 else step for size, step in zip(shape[:-2], stride[:-2], strict=True)]
    return [0] * (len(batch) - len(own)) + own


def _merged(dims):
    """Batch dimensions (size, stride in a, stride in b) with neighbours joined where both operands allow it."""
    merged = []
    for size, a_step, b_step in dims:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * a_step, size * b_step):
            size *= merged.pop()[0]
        merged.append((size, a_step, b_step))
    return merged


def _uses_tma(problem, operands):
    """Whether the copy engine loads: where it can, unless CONFIG says otherwise or descriptors would cost too much."""
    wanted = CONFIG["VARIANT"]
    if wanted == "plain" or operands is None:
        return False
    return wanted == "tma" or problem.m * problem.n * problem.k >= 1 << 24


def _tma_operands(problem):
    """(transposed, shape, strides) of a, of b, and of the output where it can be written so; None where a or b cannot.

    The shape is that of the matrix as it is stored, with the batch in front when there is one.
    """
    (sam, sak, *a_steps), (sbk, sbn, *b_steps) = problem.a, problem.b
    if problem.sizes[:2] != (1, 1):
        return None
    a = _stored(problem.m, problem.k, sam, sak, problem.batches, a_steps[2])
    b = _stored(problem.k, problem.n, sbk, sbn, problem.batches, b_steps[2])
    if a is None or b is None:
        return None
    out = _stored(problem.m, problem.n, problem.n, 1, problem.batches, problem.m * problem.n)
    return a, b, None if out is None or out[0] else out


def _stored(rows, cols, row_stride, col_stride, batches, batch_stride):
    """How the copy engine can read a matrix of 16-bit numbers: (transposed, shape, strides), or None."""
    unit = 8  # elements in 16 bytes, of which every stride must be a multiple
    for transposed in (False, True):
        inner, outer, inner_stride, outer_stride = cols, rows, col_stride, row_stride
        if transposed:
            inner, outer, inner_stride, outer_stride = rows, cols, row_stride, col_stride
        if outer == 1:
            outer_stride = -(-inner // unit) * unit
        if (inner_stride == 1 or inner == 1) and outer_stride % unit == 0 and outer_stride >= inner:
            shape, strides = [outer, inner], [outer_stride, 1]
            break
    else:
        return None
    if batches > 1:
        if batch_stride % unit:
            return None
        shared = batch_stride == 0
        shape, strides = [1 if shared else batches, *shape], [batch_stride or outer * outer_stride, *strides]
    return transposed, shape, strides


def _tile():
    return None if CONFIG["TILE"] == "auto" else tuple(int(size) for size in CONFIG["TILE"].split("x"))


def _schedule(tiles, steps, slots):
    """(whole tiles, parts of each other tile, waves) for `tiles` with `steps` blocks of K each on `slots` programs."""
    left = tiles % slots
    waves = tiles // slots
    if left == 0:
        return tiles, 1, waves
    parts = min(slots // left, steps // MIN_SPLIT_STEPS, CONFIG["SPLIT"] or 16)
    overhead = 4 / steps  # adding up costs about as much as four blocks of K
    if parts < 2 or (CONFIG["SPLIT"] == 0 and 1 / parts + overhead > 0.9):
        return tiles, 1, waves + 1
    return tiles - left, parts, waves + 1 / parts + overhead


TMA_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64))


def _tma_tile(problem, block_k, target):
    """Tile with the least predicted time: products, or loads through the L2 cache, whichever takes longer."""

    def predicted_ns(tile):
        tile_m, tile_n = tile
        tiles = triton.cdiv(problem.m, tile_m) * triton.cdiv(problem.n, tile_n) * problem.batches
        steps = triton.cdiv(problem.k, block_k)
        _, _, waves = _schedule(tiles, steps, target.sms)
        products = tile_m * tile_n * 0.0246
        loads = (min(tile_m, problem.m) + min(tile_n, problem.n)) * 1.8
        return waves * steps * max(products, loads) * block_k / 64 + 1500 * -(-waves // 1)

    fitting = [tile for tile in TMA_TILES if 3 * sum(tile) * block_k * 2 + tile[0] * tile[1] <= target.shared_bytes]
    return min(fitting, key=predicted_ns)


def _ring(problem, operands, target):
    """(tile M, tile N, block of K, stages, tiles, whole tiles, parts of each other tile) for the TMA kernel."""
    block_k = CONFIG["BLOCK_K"] or 64
    tile_m, tile_n = _tile() or _tma_tile(problem, block_k, target)
    stages = CONFIG["STAGES"]
    if not stages:
        staged_out = tile_m * tile_n * (2 if operands[2] else 4) // CONFIG["EPILOGUE"] + 2048
        stages = max(2, min(8, (target.shared_bytes - staged_out) // ((tile_m + tile_n) * block_k * 2)))
    tiles = triton.cdiv(problem.m, tile_m) * triton.cdiv(problem.n, tile_n) * problem.batches
    whole, parts, _ = _schedule(tiles, triton.cdiv(problem.k, block_k), target.sms)
    return tile_m, tile_n, block_k, stages, tiles, whole, parts


def _tma_launch(problem, operands, target):
    tile_m, tile_n, block_k, stages, tiles, whole, parts = _ring(problem, operands, target)
    (a_t, a_shape, a_strides), (b_t, b_shape, b_strides), stored_out = operands
    pieces = CONFIG["EPILOGUE"]
    batches = problem.batches
    programs = min(target.sms, whole + (tiles - whole) * parts)
    batched = batches > 1
    lead = [1] if batched else []
    a_block = lead + ([block_k, tile_m] if a_t else [tile_m, block_k])
    b_block = lead + ([tile_n, block_k] if b_t else [block_k, tile_n])
    out_block = [*lead, tile_m, tile_n // pieces]
    a_step, b_step = (int(batched and shape[0] > 1) for shape in (a_shape, b_shape))
    constants = {
        "PARTS": parts,
        "A_T": a_t,
        "B_T": b_t,
        "BM": tile_m,
        "BN": tile_n,
        "BK": block_k,
        "GROUP": CONFIG["GROUP"],
        "BATCHED": batched,
        "PIECES": pieces,
        "STORE_TMA": stored_out is not None,
        "FLATTEN": CONFIG["FLATTEN"],
        "SPECIALIZE": CONFIG["WARP_SPECIALIZE"] and target.arch >= 100,
    }
    warps = CONFIG["WARPS"] or (8 if tile_m * tile_n >= 128 * 128 else 4)
    arguments = (problem.m, problem.n, problem.k, batches, whole, a_step, b_step)
    run = _Launcher(_tma_kernel, programs, arguments, constants, num_warps=warps, num_stages=stages)
    describe_a = _describer(a_shape, a_strides, a_block)
    describe_b = _describer(b_shape, b_strides, b_block)
    describe_out = _describer(*stored_out[1:], out_block) if stored_out else lambda out: out

    def launch(a, b, out):
        sums, arrivals = _workspace(out, (tiles - whole) if parts > 1 else 0, parts, tile_m * tile_n)
        run(out.device, describe_a(a), describe_b(b), describe_out(out), out, sums, arrivals)

    return launch


def _workspace(out, split_tiles, parts, tile):
    """fp32 sums of each part of each split tile, and how many parts of each have arrived; `out` where none is split."""
    if not split_tiles:
        return out, out
    sums = torch.empty(split_tiles * parts * tile, dtype=torch.float32, device=out.device)
    return sums, torch.zeros(split_tiles, dtype=torch.int32, device=out.device)


def _plain_launch(problem, target, allow_tf32):
    m, n, k = problem.m, problem.n, problem.k
    exact = problem.dtype == torch.float32 and not allow_tf32
    hip = target.vendor == "hip"
    precision = ("ieee" if hip else CONFIG["FP32"]) if exact else "tf32"
    tile_m, tile_n, block_k, warps, stages = _plain_tile(problem, target, exact and precision == "ieee" and not hip)
    tile_m, tile_n = _tile() or (tile_m, tile_n)
    block_k, warps, stages = CONFIG["BLOCK_K"] or block_k, CONFIG["WARPS"] or warps, CONFIG["STAGES"] or stages
    tiles = triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n) * problem.batches
    steps = triton.cdiv(k, block_k)
    # Here all tiles are split alike, and only when they are too few to give every multiprocessor one.
    _, parts, _ = _schedule(tiles, steps, target.sms) if tiles < target.sms else (0, 1, 0)
    constants = {
        "PARTS": parts,
        "BM": tile_m,
        "BN": tile_n,
        "BK": block_k,
        "GROUP": CONFIG["GROUP"],
        "EVEN_K": k % block_k == 0,
        "PRECISION": precision,
    }
    (sam, sak, *a_steps), (sbk, sbn, *b_steps) = problem.a, problem.b
    arguments = (m, n, k, sam, sak, sbk, sbn, *problem.sizes[1:], *a_steps, *b_steps)
    run = _Launcher(_plain_kernel, tiles * parts, arguments, constants, num_warps=warps, num_stages=stages)

    def launch(a, b, out):
        sums, arrivals = _workspace(out, tiles if parts > 1 else 0, parts, tile_m * tile_n)
        run(out.device, a, b, out, sums, arrivals)

    return launch


def _plain_tile(problem, target, fma):
    """(tile M, tile N, block of K, warps, stages); `fma`: fp32 without matrix units."""
    m, n = problem.m, problem.n
    wide = problem.dtype == torch.float32
    hip = target.vendor == "hip"
    if fma:
        tile_m = 16 if m <= 16 else 32 if m <= 32 else 64
        return tile_m, 64, 16, 4, 2 if hip else 3
    block_k = 32 if wide else 64
    warps = 8 if wide and m > 32 else 4  # halves of fp32 numbers take registers
    if m <= 64 or n <= 64:
        tile_m = 16 if m <= 16 else 32 if m <= 32 else 64
        deep = tile_m == 16 or (tile_m == 32 and not wide)
        return tile_m, 64, 2 * block_k if deep else block_k, warps, 2 if hip else 3
    tiles = triton.cdiv(m, 128) * triton.cdiv(n, 128) * problem.batches
    if tiles < target.sms:
        return 64, 64, block_k, warps, 2 if hip else 3
    if hip or target.shared_bytes < 128 << 10:
        return 128, 128, block_k // 2, 4 if hip else 8, 2 if hip else 4
    return 128, 128, block_k // 2, 8, 4
