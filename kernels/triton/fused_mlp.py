"""Gated MLP of x [..., K]: (activation(x w_gate^T) * (x w_up^T)) w_down^T -> [..., N].

w_gate, w_up: [H, K]; w_down: [N, H]; activation: silu, gelu (erf), gelu_tanh or relu. fp16, bf16 and fp32 with any
strides; sums and the activation in fp32, rounded once to the hidden values and once to the output. fp32 inputs are
multiplied in fp32, or as accurately, unless torch.backends.cuda.matmul.allow_tf32 is set. The output is contiguous.

Two launches: the first makes the hidden values [rows, H], the second multiplies them by w_down. An output tile of the
first takes the same columns of both products: a tile of x is loaded once for both weights, and gate and up meet in
registers, so that neither goes through memory. Both launches are forms (GATED or not) of one of two kernels:
- "tma" (compute capability 9.0 and later, 16-bit matrices on 16-byte boundaries): as many programs as there are
  multiprocessors, each walking over output tiles, which the copy engine loads several blocks of K ahead.
- "plain" (every GPU, every stride): one program per output tile, masked loads through pointers.

Tiles are visited in groups of GROUP rows, so that programs that run at the same time share operands in the L2 cache.
Where whole tiles would leave multiprocessors idle (few output tiles, or few left over in the last wave), a tile's K is
split into parts: each part writes its fp32 sums to a workspace, and the part that arrives last adds them up in the
order of K, so that results repeat bit for bit whoever comes last.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from autokernel.target import on_device, target_of

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"
TUNABLES = {
    "VARIANT": ["auto", "plain", "tma"],  # tma where GPU and operands allow, else plain
    # Rows x columns of an output tile; half of the first product's columns are gate, half up. auto: by shape.
    "UP_TILE": ["auto", "64x64", "64x128", "64x256", "128x64", "128x128", "128x256", "256x128"],
    "DOWN_TILE": ["auto", "64x64", "64x128", "64x256", "128x64", "128x128", "128x256", "256x128"],
    "BLOCK_K": [0, 16, 32, 64, 128],  # 0: by dtype
    "WARPS": [0, 4, 8],  # plain and tma; 0: by tile
    "STAGES": [0, 1, 2, 3, 4, 5],  # tiles of K in flight; 0: as many as fit
    "GROUP": [1, 4, 8, 16],  # rows of tiles that are walked through together
    "SPLIT": [0, 1, 2, 4, 8, 16],  # most parts of a tile's K; 0: by shape, 1: never split
    "EPILOGUE": [1, 2, 4],  # pieces in which a tile is written; more take less shared memory
    "FLATTEN": [False, True],  # tma: one loop over tiles and K, so that loads run ahead into the next tile
    "WARP_SPECIALIZE": [False, True],  # tma: leave loads to warps of their own (compute capability 10.0)
    # How fp32 is multiplied when TF32 is not allowed: by scalar units, or as three TF32 products of its upper and lower
    # halves, which is as accurate and several times faster (not on AMD, whose matrix units take fp32).
    "FP32": ["ieee", "tf32x3"],
}
CONFIG = {
    "VARIANT": "auto",
    "UP_TILE": "auto",
    "DOWN_TILE": "auto",
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

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the CPU."""

MIN_SPLIT_STEPS = 4
"""A part of a split tile has at least this many blocks of K, or its sums cost more than they save."""

SILU, GELU, GELU_TANH, RELU = (tl.constexpr(code) for code in range(4))
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up."""
    if ACTIVATION == SILU:
        gate = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == GELU:
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
        gate = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = tl.where(gate < 0, 0.0, gate)  # keeps NaN
    return gate * up


# plain and tma --------------------------------------------------------------------------------------------------------


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
def _store_tile(out, values, m, n, M, N, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write `values` [ROWS, COLS] to row `m`, column `n` of `out` [M, N], as far as it reaches."""
    rows = m + tl.arange(0, ROWS)
    cols = n + tl.arange(0, COLS)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = out + rows[:, None].to(tl.int64) * out_stride + cols[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_part(
    out,
    acc,
    second,
    sums,
    arrivals,
    tile,
    part,
    PARTS,
    m,
    n,
    M,
    N,
    out_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    COLS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Leave one part's sums in the workspace; the last part of a tile to arrive adds all up, in order, and stores."""
    gated: tl.constexpr = ACTIVATION is not None
    size: tl.constexpr = BM * BN * (1 + gated)
    row = tl.arange(0, BM)[:, None] * BN
    base = sums + tile.to(tl.int64) * PARTS * size + row
    own = base + part.to(tl.int64) * size + tl.arange(0, BN)[None, :]
    tl.store(own, acc)
    if gated:
        tl.store(own + BM * BN, second)
    tl.debug_barrier()  # the arrival below vouches for what every thread has written
    if tl.atomic_add(arrivals + tile, 1) == PARTS - 1:
        for col in range(0, BN, COLS):  # a few columns at a time: the sums of a whole tile do not fit twice
            at = base + (col + tl.arange(0, COLS))[None, :]
            total = tl.zeros((BM, COLS), tl.float32)
            other = total
            for _ in range(PARTS):
                total += tl.load(at, cache_modifier=".cg")
                if gated:
                    other += tl.load(at + BM * BN, cache_modifier=".cg")
                at += size
            if gated:
                total = _gated(total, other, ACTIVATION)
            _store_tile(out, total, m, n + col, M, N, out_stride, BM, COLS)


@triton.jit
def _plain_kernel(
    x,
    w,
    up,  # the second weight when gated, else as w
    out,
    sums,
    arrivals,
    M,
    N,
    K,
    sxm,
    sxk,
    swn,
    swk,
    sun,
    suk,
    out_stride,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,  # None: not gated
):
    index = tl.program_id(0)
    part = index % PARTS
    tile = index // PARTS
    row, col = _tile_at(tile, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = row * BM, col * BN
    steps = tl.cdiv(K, BK)
    begin = steps * part // PARTS
    end = steps * (part + 1) // PARTS

    rows = m + tl.arange(0, BM)
    cols = n + tl.arange(0, BN)
    inside_m = (rows < M)[:, None]
    inside_n = (cols < N)[None, :]
    k = (begin * BK + tl.arange(0, BK)).to(tl.int64)
    at_x = x + rows[:, None].to(tl.int64) * sxm + k[None, :] * sxk
    at_w = w + k[:, None] * swk + cols[None, :].to(tl.int64) * swn
    at_up = up + k[:, None] * suk + cols[None, :].to(tl.int64) * sun
    acc = tl.zeros((BM, BN), tl.float32)
    second = acc
    for step in range(begin, end):
        if EVEN_K:
            mask_x, mask_w = inside_m, inside_n
        else:
            inside_k = tl.arange(0, BK) < K - step * BK
            mask_x, mask_w = inside_m & inside_k[None, :], inside_n & inside_k[:, None]
        a = tl.load(at_x, mask=mask_x, other=0.0)
        acc = _dot(a, tl.load(at_w, mask=mask_w, other=0.0), acc, PRECISION)
        if ACTIVATION is not None:
            second = _dot(a, tl.load(at_up, mask=mask_w, other=0.0), second, PRECISION)
        at_x += BK * sxk
        at_w += BK * swk
        at_up += BK * suk
    if PARTS > 1:
        COLS: tl.constexpr = min(BN, 32)
        _add_part(out, acc, second, sums, arrivals, tile, part, PARTS, m, n, M, N, out_stride, BM, BN, COLS, ACTIVATION)
    else:
        if ACTIVATION is not None:
            acc = _gated(acc, second, ACTIVATION)
        _store_tile(out, acc, m, n, M, N, out_stride, BM, BN)


@triton.jit
def _store_pieces(desc, out, values, m, n, M, N, out_stride, PIECES: tl.constexpr, STORE_TMA: tl.constexpr):
    """Write `values` in PIECES pieces of columns: through `desc` when STORE_TMA, else through pointers."""
    ROWS: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    if PIECES > 1:
        half: tl.constexpr = COLS // 2
        left, right = values.reshape(ROWS, 2, half).permute(0, 2, 1).split()
        _store_pieces(desc, out, left, m, n, M, N, out_stride, PIECES // 2, STORE_TMA)
        _store_pieces(desc, out, right, m, n + half, M, N, out_stride, PIECES // 2, STORE_TMA)
    elif STORE_TMA:
        desc.store([m, n], values.to(desc.dtype))
    else:
        _store_tile(out, values, m, n, M, N, out_stride, ROWS, COLS)


@triton.jit
def _load_weight(desc, n, k, W_T: tl.constexpr):
    """A tile of a weight's transpose; W_T: it is stored as [K, N]."""
    return desc.load([k, n]) if W_T else desc.load([n, k]).T


@triton.jit
def _tma_kernel(
    x_desc,
    w_desc,
    up_desc,  # the second weight when gated, else as w_desc
    out_desc,
    out,
    sums,
    arrivals,
    M,
    N,
    K,
    out_stride,
    whole,  # tiles that are not split; those after them are, into PARTS parts
    units,
    PARTS: tl.constexpr,
    X_T: tl.constexpr,  # x is stored as [K, M]
    W_T: tl.constexpr,
    UP_T: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    STORE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # None: not gated
):
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
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
        row, col = _tile_at(tile, tiles_m, tiles_n, GROUP)
        m, n = row * BM, col * BN
        acc = tl.zeros((BM, BN), tl.float32)
        second = acc
        for step in range(begin, end):
            k = step * BK
            a = x_desc.load([k, m]).T if X_T else x_desc.load([m, k])
            acc = _dot(a, _load_weight(w_desc, n, k, W_T), acc, "ieee")
            if ACTIVATION is not None:
                second = _dot(a, _load_weight(up_desc, n, k, UP_T), second, "ieee")
        if PARTS == 1:
            if ACTIVATION is not None:
                acc = _gated(acc, second, ACTIVATION)
            _store_pieces(out_desc, out, acc, m, n, M, N, out_stride, PIECES, STORE_TMA)
        elif split:
            index = tile - whole
            _add_part(
                out, acc, second, sums, arrivals, index, part, PARTS, m, n, M, N, out_stride, BM, BN, 32, ACTIVATION
            )
        else:
            if ACTIVATION is not None:
                acc = _gated(acc, second, ACTIVATION)
            _store_pieces(out_desc, out, acc, m, n, M, N, out_stride, PIECES, STORE_TMA)


# Host: what is to be computed, and how --------------------------------------------------------------------------------


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    """Gated MLP of x [..., K] with w_gate, w_up [H, K] and w_down [N, H] -> [..., N], in fp16, bf16 or fp32.

    Raises: TypeError for other or differing dtypes, KeyError for an unknown activation, ValueError for shapes or
    devices that do not belong together.
    """
    tensors = (x, w_gate, w_up, w_down)
    device = x.device
    if any(tensor.device != device for tensor in tensors):
        raise ValueError(f"fused_mlp: tensors on different devices: {[str(tensor.device) for tensor in tensors]}")
    plan = _plan(
        tuple([(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors]),
        activation,
        target_of(x),
        torch.backends.cuda.matmul.allow_tf32,
    )
    if plan.copies_x:
        return kernel_fn(x.contiguous(), w_gate, w_up, w_down, activation)
    if plan.up is None:
        return torch.zeros(plan.shape, dtype=x.dtype, device=device)
    out = torch.empty(plan.shape, dtype=x.dtype, device=device)
    hidden = torch.empty(plan.hidden, dtype=x.dtype, device=device)
    sums = torch.empty(plan.sums, dtype=torch.float32, device=device) if plan.sums else out
    arrivals = later = out
    if plan.sums:
        arrivals = torch.zeros(plan.arrivals, dtype=torch.int32, device=device)
        later = arrivals[plan.up.arrivals :]
    with on_device(x):
        plan.up.launch(x, w_gate, w_up, hidden, sums, arrivals)
        plan.down.launch(hidden, w_down, w_down, out, sums, later)
    return out


class _Plan:
    """How one kind of call is carried out: two launches, or none where there is nothing to add up."""

    __slots__ = ("arrivals", "copies_x", "down", "hidden", "shape", "sums", "up")

    def __init__(self, shape, hidden=None, up=None, down=None, copies_x=False):
        self.shape, self.hidden, self.up, self.down, self.copies_x = shape, hidden, up, down, copies_x
        self.sums = max(up.sums, down.sums) if up else 0
        self.arrivals = up.arrivals + down.arrivals if up else 0


@functools.lru_cache(maxsize=4096)
def _plan(tensors, activation, target, allow_tf32):
    (dtype, x_shape, x_stride, _), *weights = tensors
    if any(other[0] != dtype for other in weights) or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"fused_mlp takes fp16, bf16 or fp32 tensors of one dtype, got {[t[0] for t in tensors]}")
    code = ACTIVATIONS[activation]
    _check_shapes(x_shape, *(shape for _, shape, _, _ in weights))
    (n, h), k = weights[2][1], x_shape[-1]
    shape = (*x_shape[:-1], n)
    if 0 in shape or h == 0 or k == 0:
        return _Plan(shape)
    rows = _merged(zip(x_shape[:-1], x_stride[:-1], strict=True))
    if len(rows) > 1:
        return _Plan(shape, copies_x=True)
    m, row_stride = rows[0] if rows else (1, k)
    aligned = [offset == 0 for _, _, _, offset in tensors]
    # Rows of the hidden values start on 16-byte boundaries, so that the copy engine can write and read them.
    padded = -(-h // 8) * 8
    (gate, up, down) = (stride for _, _, stride, _ in weights)
    first = _Product(m, h, k, (row_stride, x_stride[-1]), (gate, up), padded, code, dtype, all(aligned[:3]))
    second = _Product(m, n, h, (padded, 1), (down,), n, None, dtype, aligned[3])
    launches = (_launch(product, target, allow_tf32) for product in (first, second))
    return _Plan(shape, (m, padded), *launches)


def _check_shapes(x, gate, up, down):
    fits = len(x) >= 1 and len(gate) == len(up) == len(down) == 2 and gate == up
    if not fits or gate[1] != x[-1] or down[1] != gate[0]:
        shapes = f"x {tuple(x)}, w_gate {tuple(gate)}, w_up {tuple(up)}, w_down {tuple(down)}"
        raise ValueError(f"fused_mlp: {shapes} do not belong together")


def _merged(dims):
    """Row dimensions (size, stride) with neighbours joined where they lie evenly in memory."""
    merged = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return merged


class _Product(NamedTuple):
    """x [m, k] times one or two weights [n, k], all with any strides, to a matrix with rows `out_stride` apart."""

    m: int
    n: int
    k: int
    x: tuple[int, int]
    weights: tuple
    out_stride: int
    activation: int | None  # None: not gated
    dtype: torch.dtype
    aligned: bool

    @property
    def gated(self):
        return self.activation is not None


class _Launch:
    """A launch, and the fp32 sums and arrival counts that it needs."""

    __slots__ = ("arrivals", "launch", "sums")

    def __init__(self, launch, split_tiles, parts, tile):
        self.launch = launch
        self.sums = split_tiles * parts * tile if parts > 1 else 0
        self.arrivals = -(-split_tiles // 4) * 4 if parts > 1 else 0  # the next one's counts stay on 16 bytes


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


def _launch(product, target, allow_tf32):
    """The launch that carries out `product`: what CONFIG says, where it can be done."""
    wanted = CONFIG["VARIANT"]
    operands = _tma_operands(product) if target.has_tma and wanted != "plain" else None
    if operands is None or (wanted == "auto" and product.m * product.n * product.k < 1 << 23):
        return _plain_launch(product, target, allow_tf32)
    return _tma_launch(product, operands, target)


def _tma_operands(product):
    """(transposed, shape, strides) of x, both weights, and the output where it can be written so; None if it cannot be.

    One weight stands for both where the product is not gated. The shape is that of the matrix as it is stored.
    """
    if not product.aligned or product.dtype == torch.float32:
        return None
    x = _stored(product.m, product.k, *product.x)
    weights = [_stored(product.n, product.k, *strides) for strides in product.weights]
    if x is None or None in weights:
        return None
    out = _stored(product.m, product.n, product.out_stride, 1)
    return x, weights[0], weights[-1], None if out is None or out[0] else out


def _stored(rows, cols, row_stride, col_stride):
    """How the copy engine can read a matrix of 16-bit numbers: (transposed, shape, strides), or None."""
    unit = 8  # elements in 16 bytes, of which every stride must be a multiple
    for transposed in (False, True):
        inner, outer, inner_stride, outer_stride = cols, rows, col_stride, row_stride
        if transposed:
            inner, outer, inner_stride, outer_stride = rows, cols, row_stride, col_stride
        if outer == 1:
            outer_stride = -(-inner // unit) * unit
        if (inner_stride == 1 or inner == 1) and outer_stride % unit == 0 and outer_stride >= inner:
            return transposed, [outer, inner], [outer_stride, 1]
    return None


def _tile(product):
    name = CONFIG["UP_TILE" if product.gated else "DOWN_TILE"]
    return None if name == "auto" else tuple(int(size) for size in name.split("x"))


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


def _tiles(product, tile_m, tile_n):
    """How many tiles there are; a gated tile has half its columns from each weight."""
    return triton.cdiv(product.m, tile_m) * triton.cdiv(product.n, tile_n // 2 if product.gated else tile_n)


def _tma_tile(product, block_k, target):
    """Tile with the least predicted time: products, or loads through the L2 cache, whichever takes longer."""

    def predicted_ns(tile):
        tile_m, tile_n = tile
        steps = triton.cdiv(product.k, block_k)
        _, _, waves = _schedule(_tiles(product, tile_m, tile_n), steps, target.sms)
        products = tile_m * tile_n * 0.0246
        loads = (min(tile_m, product.m) + tile_n) * 1.8
        return waves * steps * max(products, loads) * block_k / 64 + 1500 * -(-waves // 1)

    fitting = [tile for tile in TMA_TILES if 3 * sum(tile) * block_k * 2 + tile[0] * tile[1] <= target.shared_bytes]
    return min(fitting, key=predicted_ns)


def _ring(product, operands, target):
    """(tile M, tile N, block of K, stages, tiles, whole tiles, parts of each other tile) for the TMA kernel."""
    block_k = CONFIG["BLOCK_K"] or 64
    tile_m, tile_n = _tile(product) or _tma_tile(product, block_k, target)
    stages = CONFIG["STAGES"]
    if not stages:
        out_columns = tile_n // 2 if product.gated else tile_n
        staged_out = tile_m * out_columns * (2 if operands[3] else 4) // CONFIG["EPILOGUE"] + 2048
        stages = max(2, min(8, (target.shared_bytes - staged_out) // ((tile_m + tile_n) * block_k * 2)))
    tiles = _tiles(product, tile_m, tile_n)
    whole, parts, _ = _schedule(tiles, triton.cdiv(product.k, block_k), target.sms)
    return tile_m, tile_n, block_k, stages, tiles, whole, parts


def _tma_launch(product, operands, target):
    tile_m, tile_n, block_k, stages, tiles, whole, parts = _ring(product, operands, target)
    x, w, up, stored_out = operands
    pieces = CONFIG["EPILOGUE"]
    columns = tile_n // 2 if product.gated else tile_n  # of each weight
    units = whole + (tiles - whole) * parts
    constants = {
        "PARTS": parts,
        "X_T": x[0],
        "W_T": w[0],
        "UP_T": up[0],
        "BM": tile_m,
        "BN": columns,
        "BK": block_k,
        "GROUP": CONFIG["GROUP"],
        "PIECES": pieces,
        "STORE_TMA": stored_out is not None,
        "FLATTEN": CONFIG["FLATTEN"],
        "SPECIALIZE": CONFIG["WARP_SPECIALIZE"] and target.arch >= 100,
        "ACTIVATION": product.activation,
    }
    warps = CONFIG["WARPS"] or (8 if tile_m * tile_n >= 128 * 128 else 4)
    arguments = (product.m, product.n, product.k, product.out_stride, whole, units)
    run = _Launcher(_tma_kernel, min(target.sms, units), arguments, constants, num_warps=warps, num_stages=stages)
    x_block = [block_k, tile_m] if x[0] else [tile_m, block_k]
    w_block, up_block = ([block_k, columns] if stored[0] else [columns, block_k] for stored in (w, up))
    describe_x = _describer(*x[1:], x_block)
    describe_w = _describer(*w[1:], w_block)
    describe_up = _describer(*up[1:], up_block)
    out_block = [tile_m, columns // pieces]
    describe_out = _describer(*stored_out[1:], out_block) if stored_out else lambda out: out

    def launch(x, w, up, out, sums, arrivals):
        run(out.device, describe_x(x), describe_w(w), describe_up(up), describe_out(out), out, sums, arrivals)

    return _Launch(launch, tiles - whole, parts, tile_m * tile_n)


def _plain_launch(product, target, allow_tf32):
    m, n, k = product.m, product.n, product.k
    exact = product.dtype == torch.float32 and not allow_tf32
    hip = target.vendor == "hip"
    precision = ("ieee" if hip else CONFIG["FP32"]) if exact else "tf32"
    tile_m, tile_n, block_k, warps, stages = _plain_tile(product, target, exact and precision == "ieee" and not hip)
    tile_m, tile_n = _tile(product) or (tile_m, tile_n)
    block_k, warps, stages = CONFIG["BLOCK_K"] or block_k, CONFIG["WARPS"] or warps, CONFIG["STAGES"] or stages
    columns = tile_n // 2 if product.gated else tile_n
    tiles = _tiles(product, tile_m, tile_n)
    # Here all tiles are split alike, and only when they are too few to give every multiprocessor one.
    _, parts, _ = _schedule(tiles, triton.cdiv(k, block_k), target.sms) if tiles < target.sms else (0, 1, 0)
    constants = {
        "PARTS": parts,
        "BM": tile_m,
        "BN": columns,
        "BK": block_k,
        "GROUP": CONFIG["GROUP"],
        "EVEN_K": k % block_k == 0,
        "PRECISION": precision,
        "ACTIVATION": product.activation,
    }
    arguments = (m, n, k, *product.x, *product.weights[0], *product.weights[-1], product.out_stride)
    run = _Launcher(_plain_kernel, tiles * parts, arguments, constants, num_warps=warps, num_stages=stages)

    def launch(x, w, up, out, sums, arrivals):
        run(out.device, x, w, up, out, sums, arrivals)

    return _Launch(launch, tiles, parts, tile_m * tile_n)


def _plain_tile(product, target, fma):
    """(tile M, tile N, block of K, warps, stages); `fma`: fp32 without matrix units."""
    m, n = product.m, product.n
    wide = product.dtype == torch.float32
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
    if _tiles(product, 128, 128) < target.sms:
        return 64, 64, block_k, warps, 2 if hip else 3
    return 128, 128, block_k // 2, 4 if hip else 8, 2 if hip else 4
