"""Attention with a mask and without the score matrix: softmax(q k^T * scale + mask) v.

q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim] with kv_heads dividing heads; fp16, bf16 or
fp32 with any strides; the output is contiguous. mask: whatever expands to [batch, heads, seq_q, seq_k], bool (true
where a key is seen) or of q's dtype; it is read where it lies, with strides of zero. Scores, softmax and sums are fp32;
only the weights are rounded to the inputs' dtype, as the second matrix product takes them.

A tile of query rows stays on chip while the keys and values pass by; a running maximum and sum (online softmax) keep
the result exact. A mask that is the same for all rows of a tile (padding) is read as one row. What a bool mask leaves
visible to a tile is looked up first, and keys before and after it are not visited: half of them under a causal mask.
A bias is added in the units it comes in, as its lowest value times log2(e) would be -inf. With few query rows the query
heads of one kv head are packed into one tile, and the keys are split over programs whose partial results a second
kernel adds in order.

Variants: "pointer" (plain loads: any strides, any GPU) and "tma" (keys and values by the bulk copy engine).
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from autokernel.target import on_device, target_of

KERNEL_TYPE = "masked_attention"
BACKEND = "triton"
TUNABLES = {
    "VARIANT": ["auto", "pointer", "tma"],  # the best that the GPU and the tensors allow, or at most this one
    "BLOCK_M": [0, 16, 32, 64, 128],  # query rows of a tile; 0: from the shape, as in the next three
    "BLOCK_N": [0, 16, 32, 64, 128],  # keys of a block
    "WARPS": [0, 4, 8],
    "STAGES": [0, 1, 2, 3, 4],  # blocks in flight
    "SPLITS": [0, 1, 2, 4, 8, 16, 32, 64, 128],  # programs that share a tile's keys; 0: from the shape
    "LOOK_AHEAD": [0, 1],  # 1: find out first which keys a bool mask shows to a tile
    "FP32_DOT": ["ieee", "tf32x3"],  # fp32 products: plain multiply-adds, or three tensor core products
}
CONFIG = {
    "VARIANT": "auto",
    "BLOCK_M": 0,
    "BLOCK_N": 0,
    "WARPS": 0,
    "STAGES": 0,
    "SPLITS": 0,
    "LOOK_AHEAD": 1,
    "FP32_DOT": "ieee",
}

LOG2E = math.log2(math.e)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b."""
    if PRECISION == "interpreted":  # Triton's interpreter takes bf16 for integers here
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _block(source, start, stride, length, batch, head, RAGGED: tl.constexpr, TMA: tl.constexpr, D: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Rows start .. start + BLOCK_N of k or v, zero past their end; `source` is a descriptor or block 0's pointers."""
    if TMA:
        block = source.load([batch, head, start, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        at = source + tl.cast(start, tl.int64) * stride
        rows = start + tl.arange(0, BLOCK_N)[:, None]
        cols = tl.arange(0, BLOCK_D)[None, :]
        if RAGGED:
            block = tl.load(at, mask=(rows < length) & (cols < D), other=0.0)
        elif D < BLOCK_D:
            block = tl.load(at, mask=cols < D, other=0.0)
        else:
            block = tl.load(at)
    return block


@triton.jit
def _shown(mask, start, stride, seq_k, tokens, seq_q, RAGGED: tl.constexpr, ROWS_ALIKE: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """The mask for keys start .. start + BLOCK_N, one row where all are alike; `mask` points at key 0 of each row."""
    cols = start + tl.arange(0, BLOCK_N)
    at = mask + tl.cast(cols, tl.int64)[None, :] * stride
    inside = (cols < seq_k)[None, :]
    if ROWS_ALIKE:
        shown = tl.load(at, mask=inside, other=0) if RAGGED else tl.load(at)
    else:
        shown = tl.load(at, mask=inside & (tokens < seq_q)[:, None], other=0)
    return shown


@triton.jit
def _visible(mask, stride, first, last, tokens, seq_q, seq_k, ROWS_ALIKE: tl.constexpr, BLOCK_N: tl.constexpr):
    """From which block's start to which key first .. last are visible to any row of the tile."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    low = tl.full([1 if ROWS_ALIKE else tokens.shape[0], BLOCK_N], 2147483647, tl.int32)
    high = tl.full([1 if ROWS_ALIKE else tokens.shape[0], BLOCK_N], 0, tl.int32)
    for start in range(first, last, BLOCK_N):
        shown = _shown(mask, start, stride, seq_k, tokens, seq_q, True, ROWS_ALIKE, BLOCK_N) != 0
        low = tl.where(shown, tl.minimum(low, start), low)
        high = tl.where(shown, start + cols + 1, high)
    return tl.minimum(tl.min(low), last), tl.minimum(tl.max(high), last)


@triton.jit
def _attend(acc, row_sum, row_max, q, k, v, mask, first, last, tokens, scale, seq_q, seq_k, k_stride, v_stride,
            mask_stride, batch, kv_head, RAGGED: tl.constexpr, BIAS: tl.constexpr, ROWS_ALIKE: tl.constexpr,
            UNIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Show the tile's queries the keys first .. last; scores times UNIT are powers of two."""
    for start in range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        shown = _shown(mask, start, mask_stride, seq_k, tokens, seq_q, RAGGED, ROWS_ALIKE, BLOCK_N)
        keys = _block(k, start, k_stride, seq_k, batch, kv_head, RAGGED, TMA, D, BLOCK_N, BLOCK_D)
        scores = _dot(q, keys.T, tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION) * scale
        if BIAS:
            scores += shown.to(tl.float32)
        else:
            scores = tl.where(shown != 0, scores, -float("inf"))
        if RAGGED:
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            scores = tl.where(cols < seq_k, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)  # nothing above -inf yet: all weights are 0
        weights = tl.exp2((scores - base[:, None]) * UNIT)
        shrink = tl.exp2((row_max - base) * UNIT)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max
        values = _block(v, start, v_stride, seq_k, batch, kv_head, RAGGED, TMA, D, BLOCK_N, BLOCK_D)
        acc = _dot(weights.to(values.dtype), values, acc * shrink[:, None], PRECISION)
    return acc, row_sum, row_max


@triton.jit
def _attention(q, k, v, mask, out, sums, heads, heads_of_batch, group, seq_q, seq_k, tiles, keys_of_split, scale,
               q_sb, q_sh, q_ss, q_sd, k_sb, k_sh, k_ss, k_sd, v_sb, v_sh, v_ss, v_sd, m_sb, m_sh, m_sq, m_sk,
               BIAS: tl.constexpr, ROWS_ALIKE: tl.constexpr, LOOK_AHEAD: tl.constexpr, UNIT: tl.constexpr,
               PACK: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One tile of query rows: its row r is query r // PACK of head r % PACK; `heads` are counted in packs of PACK.

    When SPLIT, the second grid dimension shares out the keys; `out` then takes unscaled fp32 results and `sums` their
    maxima and sums.
    """
    pid = tl.program_id(0)
    head = pid // tiles
    tile = pid % tiles
    batch = head // heads_of_batch
    first_head = head % heads_of_batch * PACK
    kv_head = first_head // group

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = rows // PACK
    row_heads = first_head + rows % PACK
    cols = tl.arange(0, BLOCK_D)
    wanted = (tokens < seq_q)[:, None] & (cols < D)[None, :]
    q_at = q + tl.cast(batch, tl.int64) * q_sb + tl.cast(row_heads, tl.int64)[:, None] * q_sh
    q_at += tl.cast(tokens, tl.int64)[:, None] * q_ss + tl.cast(cols, tl.int64)[None, :] * q_sd
    queries = tl.load(q_at, mask=wanted, other=0.0)

    if not TMA:
        offsets = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k += tl.cast(batch, tl.int64) * k_sb + tl.cast(kv_head, tl.int64) * k_sh
        k += offsets * k_ss + tl.cast(cols, tl.int64)[None, :] * k_sd
        v += tl.cast(batch, tl.int64) * v_sb + tl.cast(kv_head, tl.int64) * v_sh
        v += offsets * v_ss + tl.cast(cols, tl.int64)[None, :] * v_sd
    mask += tl.cast(batch, tl.int64) * m_sb
    if ROWS_ALIKE:
        mask += tl.cast(first_head, tl.int64) * m_sh + tl.zeros([1, 1], tl.int64)
    else:
        mask += (tl.cast(row_heads, tl.int64) * m_sh + tl.cast(tokens, tl.int64) * m_sq)[:, None]

    first, last = 0, seq_k
    if SPLIT:
        first = tl.program_id(1) * keys_of_split
        last = tl.minimum(seq_k, first + keys_of_split)
    if LOOK_AHEAD:
        first, last = _visible(mask, m_sk, first, last, tokens, seq_q, seq_k, ROWS_ALIKE, BLOCK_N)
    whole = tl.minimum(last, first + (seq_k - first) // BLOCK_N * BLOCK_N)  # blocks that end beyond seq_k are ragged
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, queries, k, v, mask, first, whole, tokens, scale, seq_q,
                                    seq_k, k_ss, v_ss, m_sk, batch, kv_head, False, BIAS, ROWS_ALIKE, UNIT, TMA,
                                    PRECISION, D, BLOCK_N, BLOCK_D)  # fmt: skip
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, queries, k, v, mask, whole, last, tokens, scale, seq_q,
                                    seq_k, k_ss, v_ss, m_sk, batch, kv_head, True, BIAS, ROWS_ALIKE, UNIT, TMA,
                                    PRECISION, D, BLOCK_N, BLOCK_D)  # fmt: skip

    out_rows = (tl.cast(batch, tl.int64) * heads_of_batch * PACK + row_heads) * seq_q + tokens
    if SPLIT:
        all_rows = tl.cast(heads, tl.int64) * PACK * seq_q
        out_rows += tl.program_id(1) * all_rows
        sums += out_rows * 2
        tl.store(sums, row_max, mask=tokens < seq_q)
        tl.store(sums + 1, row_sum, mask=tokens < seq_q)
    else:
        acc /= tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # 0 where every key is hidden
    tl.store(out + out_rows[:, None] * D + cols[None, :], acc.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _combine(out, parts, sums, rows, splits, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
             CHUNK: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """One row: the splits' results added in a fixed order, each in units of the largest maximum among them."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SPLITS)
    at = sums + (every * tl.cast(rows, tl.int64) + row) * 2
    maxima = tl.load(at, mask=every < splits, other=-float("inf"))
    row_max = tl.max(maxima, 0)
    base = tl.where(row_max == -float("inf"), 0.0, row_max)
    row_sum = tl.sum(tl.exp2((maxima - base) * UNIT) * tl.load(at + 1, mask=every < splits, other=0.0), 0)
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for first in range(0, splits, CHUNK):
        some = first + tl.arange(0, CHUNK)
        part = some * tl.cast(rows, tl.int64) + row
        grow = tl.exp2((tl.load(sums + part * 2, mask=some < splits, other=-float("inf")) - base) * UNIT)
        wanted = (some < splits)[:, None] & (cols < D)[None, :]
        acc += tl.load(parts + part[:, None] * D + cols[None, :], mask=wanted, other=0.0) * grow[:, None]
    result = tl.sum(acc, 0) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + row * D + cols, result.to(out.dtype.element_ty), mask=cols < D)


@functools.cache
def _plan(target, dtype, batch, heads, kv_heads, seq_q, seq_k, head_dim, mask_bytes):
    """How to run one shape: (pack, splits, grid, whole-number arguments, options); `mask_bytes` of a score that has a
    mask of its own, 0 where a row is enough."""
    itemsize = dtype.itemsize
    group = heads // kv_heads
    pack = group if seq_q < 64 else 1
    rows, packs = seq_q * pack, batch * heads // pack
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n, warps, stages = _tile_shape(target, itemsize, block_d, rows, mask_bytes)
    splits = CONFIG["SPLITS"] or _splits(target, triton.cdiv(rows, block_m) * packs, seq_k, rows)
    keys_of_split = triton.cdiv(triton.cdiv(seq_k, splits), block_n) * block_n
    splits = triton.cdiv(seq_k, keys_of_split)
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": warps, "num_stages": stages}
    tiles = triton.cdiv(rows, block_m)
    sizes = (packs, heads // pack, group, seq_q, seq_k, tiles, keys_of_split)
    return pack, splits, (tiles * packs, splits), sizes, options


def _tile_shape(target, itemsize, block_d, rows, mask_bytes):
    """(BLOCK_M, BLOCK_N, warps, stages)."""
    if itemsize == 4:
        block_m, block_n, warps, stages = (64, 32, 8, 1) if block_d <= 64 else (32, 64, 8, 1)
        if block_d > 128:  # registers, as in the sizes below
            block_m, block_n = 16, 32
    elif target.vendor == "hip":
        block_m, block_n, warps, stages = (128, 64, 4, 1) if block_d <= 128 else (128, 32, 8, 1)
    elif target.shared_bytes > 200 << 10:
        block_m, block_n, warps, stages = (64, 64, 4, 3) if block_d <= 64 else (128, 128, 8, 2)
        if block_d > 128 or (block_d > 64 and mask_bytes > 1):
            block_n = 64
    else:
        block_m, block_n, warps, stages = 128 if block_d <= 64 else 64, 64, 8 if block_d <= 64 else 4, 2
    while block_d > 256 and block_m > 16 and block_m * block_d > 64 * 256:
        block_m, block_n, stages = block_m // 2, min(block_n, 32), 1
    # Where tensor cores take 64 rows, fewer leave them idle, but the keys' and values' way from memory bounds the time.
    fitting = max(64 if target.has_wgmma and itemsize == 2 else 16, triton.next_power_of_2(rows))
    if fitting < block_m:
        block_m, block_n, warps, stages = fitting, min(block_n, 64), 4, stages + 1
    block_m, block_n = CONFIG["BLOCK_M"] or block_m, CONFIG["BLOCK_N"] or block_n
    stages = CONFIG["STAGES"] or stages
    of_stage = 2 * block_n * block_d * itemsize + block_m * block_n * mask_bytes
    fitting = (target.shared_bytes - block_m * block_d * itemsize) // of_stage
    return block_m, block_n, CONFIG["WARPS"] or warps, max(1, min(stages, fitting))


def _splits(target, programs, seq_k, rows):
    """How many programs share a tile's keys: enough to fill the GPU, with keys enough for each to pay for the sum."""
    if rows > 64:  # bound by arithmetic
        return max(1, min(target.sms // programs, seq_k // 256))
    splits = min(triton.cdiv(4 * target.sms, programs), seq_k // 512)  # bound by memory: several programs on each
    if programs * splits < target.sms:
        splits = min(triton.cdiv(target.sms, programs), seq_k // 128)
    return max(1, splits)


def _takes_bulk_copies(x):
    """Whether the bulk copy engine can read x [batch, heads, seq, head_dim] of 2-byte elements."""
    batch, heads, seq, head = x.stride()
    if head != 1 or (batch | heads | seq) % 8 or x.data_ptr() % 16:
        return False
    return min(batch, heads, seq) > 0


def _descriptor(kind, x, block):
    """kind(x, x.shape, x.stride(), block) without its checks, which take a third of a call's time."""
    made = object.__new__(kind)
    made.base, made.shape, made.strides, made.block_shape = x, x.shape, x.stride(), block
    return made


def kernel_fn(q, k, v, mask, scale=None):
    """The weighted values [batch, heads, seq_q, head_dim], contiguous, in q's dtype.

    Raises: TypeError for tensors of unequal or other dtypes; ValueError for shapes that do not fit together.
    """
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must be all fp16, bf16 or fp32, not {q.dtype}, {k.dtype}, {v.dtype}")
    if mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"the mask must be bool or {q.dtype}, not {mask.dtype}")
    if k.shape != v.shape or k.shape != (batch, kv_heads, seq_k, head_dim) or not kv_heads or heads % kv_heads:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if not q.numel() or not seq_k:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # without keys every sum is empty
    try:
        mask = mask.expand(batch, heads, seq_q, seq_k)
    except RuntimeError:
        raise ValueError(f"the mask {list(mask.shape)} does not expand to {[batch, heads, seq_q, seq_k]}") from None

    target = target_of(q)
    bias = mask.dtype != torch.bool
    tma = target.has_tma and q.dtype != torch.float32 and CONFIG["VARIANT"] != "pointer"
    tma = tma and _takes_bulk_copies(k) and _takes_bulk_copies(v)
    one_row = mask.stride(2) == 0 or seq_q == 1
    of_score = 0 if one_row else mask.element_size()
    pack, splits, grid, sizes, options = _plan(
        target, q.dtype, batch, heads, kv_heads, seq_q, seq_k, head_dim, of_score
    )
    rows_alike = one_row and (pack == 1 or mask.stride(1) == 0)
    unit = LOG2E if bias else 1.0
    factor = (head_dim**-0.5 if scale is None else scale) * (1.0 if bias else LOG2E)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with on_device(q):
        parts, sums = out, out
        if splits > 1:
            parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
            sums = torch.empty((splits, *q.shape[:3], 2), dtype=torch.float32, device=q.device)
        keys, values = k, v
        if tma:
            block = [1, 1, options["BLOCK_N"], options["BLOCK_D"]]
            keys, values = _descriptor(TensorDescriptor, k, block), _descriptor(TensorDescriptor, v, block)
        _attention[grid](
            q, keys, values, mask, parts, sums, *sizes, factor, *q.stride(), *k.stride(), *v.stride(), *mask.stride(),
            BIAS=bias, ROWS_ALIKE=rows_alike, LOOK_AHEAD=not bias and bool(CONFIG["LOOK_AHEAD"]), UNIT=unit,
            PACK=pack, SPLIT=splits > 1, TMA=tma, PRECISION=_precision(q.dtype, target), D=head_dim, **options,
        )  # fmt: skip
        if splits > 1:
            rows = batch * heads * seq_q
            _combine[(rows,)](
                out, parts, sums, rows, splits, UNIT=unit, D=head_dim, BLOCK_D=options["BLOCK_D"], CHUNK=8,
                SPLITS=triton.next_power_of_2(splits),
            )  # fmt: skip
    return out


def _precision(dtype, target):
    """Of matrix products of fp32; others have but one."""
    if triton.knobs.runtime.interpret:
        return "interpreted"
    if dtype != torch.float32 or target.vendor == "hip":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else CONFIG["FP32_DOT"]
