"""Attention without the score matrix: softmax(q k^T * scale) v, causal (aligned at the top left) or not.

q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim] with kv_heads dividing heads; fp16, bf16 or
fp32 with any strides; the output is contiguous. Scores, softmax and sums are fp32; only the weights are rounded to the
inputs' dtype, as the second matrix product takes them.

A tile of query rows stays on chip while the keys and values pass by; a running maximum and sum (online softmax) keep
the result exact, and exp2 with log2(e) folded into the scale costs one multiply-add and one special-function
instruction a score. Only the blocks on the diagonal and the ragged last one are masked. Causal tiles start longest
first, in sections of heads whose keys and values share the L2 cache. With few query rows the query heads of one kv head
are packed into one tile, and the keys are split over programs whose partial results a second kernel adds in order.

Variants: plain loads (any strides, any GPU) and loads of keys and values by the bulk tensor copy engine.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from autokernel.target import on_device, target_of

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"
TUNABLES = {
    "VARIANT": ["auto", "pointer", "tma"],  # auto: tma where it exists and the tensors allow it
    "BLOCK_M": [0, 16, 32, 64, 128],  # query rows of a tile; 0: from the shape, as in the next three
    "BLOCK_N": [0, 16, 32, 64, 128],  # keys of a block
    "WARPS": [0, 4, 8],
    "STAGES": [0, 1, 2, 3, 4],  # blocks in flight
    "SPECIALIZE": [0, 1],  # tma on 9.0: 1 lets the compiler give loads a warp of their own
    "SPLITS": [0, 1, 2, 4, 8, 16, 32, 64, 128],  # programs that share a tile's keys (not causal); 0: from the shape
    "L2_SHARE": [0.25, 0.5, 0.75],  # of the L2 cache that a section's keys and values may take (causal)
    "FP32_DOT": ["ieee", "tf32x3"],  # fp32 products: plain multiply-adds, or three tensor core products
}
CONFIG = {
    "VARIANT": "auto",
    "BLOCK_M": 0,
    "BLOCK_N": 0,
    "WARPS": 0,
    "STAGES": 0,
    "SPECIALIZE": 0,
    "SPLITS": 0,
    "L2_SHARE": 0.5,
    "FP32_DOT": "ieee",
}

LOG2E = math.log2(math.e)
COMBINE_ROWS = 4


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b."""
    if PRECISION == "interpreted":  # Triton's interpreter takes bf16 for integers here
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _block(source, start, stride, length, batch, head, MASKED: tl.constexpr, TMA: tl.constexpr, D: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Rows start .. start + BLOCK_N of k or v, zero past their end; `source` is a descriptor or block 0's pointers."""
    if TMA:
        block = source.load([batch, head, start, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        at = source + tl.cast(start, tl.int64) * stride
        rows = start + tl.arange(0, BLOCK_N)[:, None]
        cols = tl.arange(0, BLOCK_D)[None, :]
        if MASKED:
            block = tl.load(at, mask=(rows < length) & (cols < D), other=0.0)
        elif D < BLOCK_D:
            block = tl.load(at, mask=cols < D, other=0.0)
        else:
            block = tl.load(at)
    return block


@triton.jit
def _attend(acc, row_sum, row_max, q, k, v, first, last, tokens, scale, seq_k, k_stride, v_stride, batch, kv_head,
            MASKED: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, TMA: tl.constexpr,
            SPECIALIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Show the tile's queries the keys first .. last; `row_max` is in units of log2."""
    for start in tl.range(first, last, BLOCK_N, warp_specialize=SPECIALIZE):
        start = tl.multiple_of(start, BLOCK_N)
        keys = _block(k, start, k_stride, seq_k, batch, kv_head, MASKED, TMA, D, BLOCK_N, BLOCK_D)
        scores = _dot(q, keys.T, tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION)
        if NEGATIVE:  # the scale is applied after the maximum is found, so that must be of what grows with it
            scores = -scores
        if MASKED:
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            seen = cols < seq_k
            if CAUSAL:
                seen = seen & (cols <= tokens[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        base = tl.where(new_max == -float("inf"), 0.0, new_max)  # nothing above -inf yet: all weights are 0
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max
        values = _block(v, start, v_stride, seq_k, batch, kv_head, MASKED, TMA, D, BLOCK_N, BLOCK_D)
        acc = _dot(weights.to(values.dtype), values, acc * shrink[:, None], PRECISION)
    return acc, row_sum, row_max


@triton.jit
def _attention(q, k, v, out, sums, heads, heads_of_batch, group, seq_q, seq_k, tiles, section, keys_of_split, scale,
               q_sb, q_sh, q_ss, q_sd, k_sb, k_sh, k_ss, k_sd, v_sb, v_sh, v_ss, v_sd,
               CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr,
               TMA: tl.constexpr, SPECIALIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One tile of query rows: its row r is query r // PACK of head r % PACK; `heads` are counted in packs of PACK.

    Programs go through `section` heads at a time, and there from the longest tiles to the shortest. When SPLIT, the
    second grid dimension shares out the keys; `out` then takes unscaled fp32 results and `sums` their maxima and sums.
    """
    pid = tl.program_id(0)
    done = pid // (section * tiles) * section
    here = tl.minimum(section, heads - done)
    pid -= done * tiles
    head = done + pid % here
    tile = pid // here
    if CAUSAL:
        tile = tiles - 1 - tile
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

    first, last, unmasked = 0, seq_k, seq_k
    if CAUSAL:
        first_token = tile * BLOCK_M // PACK
        last = tl.minimum(seq_k, (tile * BLOCK_M + BLOCK_M - 1) // PACK + 1)
        unmasked = tl.minimum(seq_k, first_token + 1)
    if SPLIT:
        first = tl.program_id(1) * keys_of_split
        last = tl.minimum(last, first + keys_of_split)
        unmasked = last
    unmasked = first + tl.maximum(unmasked - first, 0) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, queries, k, v, first, unmasked, tokens, scale, seq_k,
                                    k_ss, v_ss, batch, kv_head, False, CAUSAL, NEGATIVE, TMA, SPECIALIZE, PRECISION,
                                    D, BLOCK_N, BLOCK_D)  # fmt: skip
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, queries, k, v, unmasked, last, tokens, scale, seq_k,
                                    k_ss, v_ss, batch, kv_head, True, CAUSAL, NEGATIVE, TMA, False, PRECISION,
                                    D, BLOCK_N, BLOCK_D)  # fmt: skip

    out_rows = (tl.cast(batch, tl.int64) * heads_of_batch * PACK + row_heads) * seq_q + tokens
    if SPLIT:
        all_rows = tl.cast(heads, tl.int64) * PACK * seq_q
        out_rows += tl.program_id(1) * all_rows
        sums += out_rows * 2
        tl.store(sums, row_max, mask=tokens < seq_q)
        tl.store(sums + 1, row_sum, mask=tokens < seq_q)
    else:
        acc /= row_sum[:, None]
    tl.store(out + out_rows[:, None] * D + cols[None, :], acc.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _combine(out, parts, sums, rows, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Add the splits' results in order, each in units of the largest maximum among them."""
    first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    inside = first < rows
    wanted = inside[:, None] & (cols < D)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    for split in range(splits):
        at = first + split * rows
        part_max = tl.load(sums + at * 2, mask=inside, other=0.0)
        part_sum = tl.load(sums + at * 2 + 1, mask=inside, other=1.0)
        part = tl.load(parts + at[:, None] * D + cols[None, :], mask=wanted, other=0.0)
        new_max = tl.maximum(row_max, part_max)
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        shrink, grow = tl.exp2(row_max - base), tl.exp2(part_max - base)
        acc = acc * shrink[:, None] + part * grow[:, None]
        row_sum = row_sum * shrink + part_sum * grow
        row_max = new_max
    tl.store(out + first[:, None] * D + cols[None, :], (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=wanted)


@functools.cache
def _plan(target, itemsize, batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, tma):
    """(launch options of the main kernel, its grid, whole-number arguments, pack, splits) for one shape.

    Raises: ValueError when CONFIG asks for what the shape or target cannot have.
    """
    group = heads // kv_heads
    pack = group if seq_q < 64 else 1
    rows = seq_q * pack
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n, warps, stages = _tile(target, itemsize, block_d, rows)
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": warps, "num_stages": stages}
    tiles = triton.cdiv(rows, block_m)
    packs = batch * heads // pack

    section = 1
    if causal:  # as many heads as fit
        kv_bytes = 2 * seq_k * head_dim * itemsize
        fitting = int(target.l2_bytes * CONFIG["L2_SHARE"]) // kv_bytes
        section = min(packs, max(1, fitting) * (group // pack))

    splits = CONFIG["SPLITS"] or _splits(target, tiles * packs, seq_k, rows)
    if causal:
        splits = 1
    keys_of_split = triton.cdiv(triton.cdiv(seq_k, splits), block_n) * block_n
    splits = triton.cdiv(seq_k, keys_of_split)
    sizes = (packs, heads // pack, group, seq_q, seq_k, tiles, section, keys_of_split)
    return options, (tiles * packs, splits), sizes, pack, splits


def _tile(target, itemsize, block_d, rows):
    """(BLOCK_M, BLOCK_N, warps, stages)."""
    if itemsize == 4:
        block_m, block_n, warps, stages = 64, 32, 4 if block_d <= 64 else 8, 1
    elif target.vendor == "hip":
        block_m, block_n, warps, stages = 128, 64 if block_d <= 128 else 32, 4 if block_d <= 128 else 8, 1
    elif target.arch >= 90 and target.shared_bytes > 200 << 10:
        block_m, block_n, warps, stages = 128, 128 if block_d <= 128 else 64, 8, 3 if block_d <= 64 else 2
    else:
        block_m, block_n, warps, stages = 128, 64 if block_d <= 128 else 32, 4 if block_d <= 64 else 8, 2
    while block_d > 256 and block_m * block_d > 128 * 256:
        block_m, block_n, stages = block_m // 2, max(16, block_n // 2), 1
    smallest = 64 if target.has_wgmma and itemsize == 2 else 16
    fitting = max(smallest, triton.next_power_of_2(rows))
    if fitting < block_m:
        block_m, block_n, warps, stages = fitting, min(block_n, 64), 4, min(4, stages + 1)
    return (
        CONFIG["BLOCK_M"] or block_m,
        CONFIG["BLOCK_N"] or block_n,
        CONFIG["WARPS"] or warps,
        CONFIG["STAGES"] or stages,
    )


def _splits(target, programs, seq_k, rows):
    """How many programs share a tile's keys: enough to fill the GPU, with keys enough for each to pay for the sum."""
    few_rows = rows <= 64
    if programs >= target.sms * (4 if few_rows else 1):
        return 1
    splits = min(triton.cdiv(4 * target.sms, programs), seq_k // 512) if few_rows else 1
    if programs * splits < target.sms:
        splits = min(triton.cdiv(target.sms, programs), seq_k // 128)
    return max(1, splits)


def _descriptor(x, block_n, block_d):
    """x for the bulk copy engine, in blocks of rows."""
    # The stride of a dimension of size 1 is never used, but has to be a whole number of 16-byte units.
    strides = [
        8 if size == 1 and i < 3 else stride for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
    ]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, block_n, block_d])


def _takes_bulk_copies(x):
    """Whether the bulk copy engine can read x [batch, heads, seq, head_dim] of 2-byte elements."""
    if x.stride(3) != 1 or x.data_ptr() % 16:
        return False
    return all(
        size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )


def kernel_fn(q, k, v, causal=True, scale=None):
    """The weighted values [batch, heads, seq_q, head_dim], contiguous, in q's dtype.

    Raises: TypeError for tensors of unequal or other dtypes or devices; ValueError for shapes that do not fit together.
    """
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must be all fp16, bf16 or fp32, not {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape != v.shape or k.shape != (batch, kv_heads, seq_k, head_dim) or not kv_heads or heads % kv_heads:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if not q.numel() or not seq_k:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # without keys every sum is empty

    target = target_of(q)
    itemsize = q.element_size()
    bulk = itemsize == 2 and target.has_tma and _takes_bulk_copies(k) and _takes_bulk_copies(v)
    variant = CONFIG["VARIANT"]
    tma = bulk and variant != "pointer"
    options, grid, sizes, pack, splits = _plan(
        target, itemsize, batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, tma
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        sums = torch.empty((splits, *q.shape[:3], 2), dtype=torch.float32, device=q.device)
    keys, values = k, v
    if tma:
        keys = _descriptor(k, options["BLOCK_N"], options["BLOCK_D"])
        values = _descriptor(v, options["BLOCK_N"], options["BLOCK_D"])
    factor = LOG2E * (head_dim**-0.5 if scale is None else scale)
    with on_device(q):
        _attention[grid](
            q, keys, values, parts, sums, *sizes, abs(factor), *q.stride(), *k.stride(), *v.stride(),
            CAUSAL=causal, NEGATIVE=factor < 0, PACK=pack, SPLIT=splits > 1, TMA=tma,
            SPECIALIZE=tma and bool(CONFIG["SPECIALIZE"]), PRECISION=_precision(itemsize, target), D=head_dim,
            **options,
        )  # fmt: skip
        if splits > 1:
            rows = batch * heads * seq_q
            _combine[(triton.cdiv(rows, COMBINE_ROWS),)](
                out, parts, sums, rows, splits, D=head_dim, BLOCK_D=options["BLOCK_D"], ROWS=COMBINE_ROWS
            )
    return out


def _precision(itemsize, target):
    """Of matrix products of fp32; others have but one."""
    if triton.knobs.runtime.interpret:
        return "interpreted"
    if itemsize == 2 or target.vendor == "hip":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else CONFIG["FP32_DOT"]
