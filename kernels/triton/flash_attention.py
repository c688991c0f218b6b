"""Attention without the score matrix: softmax(q k^T * scale) v, causal (aligned at the top left) or not.

q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim] with kv_heads dividing heads; fp16, bf16 or
fp32 with any strides; the output is contiguous. Scores, softmax and sums are fp32; only the weights are rounded to the
inputs' dtype, as the second matrix product takes them.

A tile of query rows stays on chip while the keys and values pass by; a running maximum and sum (online softmax) keep
the result exact, and exp2 with log2(e) folded into the scale costs one multiply-add and one special-function
instruction a score. Only the blocks on the diagonal and the ragged last one are masked. Causal tiles start longest
first, in sections of heads whose keys and values share the L2 cache. With few query rows the query heads of one kv head
are packed into one tile, and the keys are split over programs whose partial results a second kernel adds in order.

Variants: "pointer" (plain loads: any strides, any GPU), "tma" (keys and values by the bulk copy engine) and "roles"
(9.0, in Gluon): one warp loads, and up to three warpgroups of 64 query rows each take turns on the tensor cores, so
that one's softmax runs beside the other's products; each also scores a block while it adds the values of the block
before. With more tiles than multiprocessors, programs stay and draw tiles from a counter: no order of shares that is
fixed beforehand is as even, and the next tile's loads overlap the end of this one.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from autokernel.target import on_device, target_of

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"
TUNABLES = {
    "VARIANT": ["auto", "pointer", "tma", "roles"],  # the best that the GPU and the tensors allow, or at most this one
    "BLOCK_M": [0, 16, 32, 64, 128],  # query rows of a tile, but for roles; 0: from the shape, as in the next three
    "BLOCK_N": [0, 16, 32, 64, 128],  # keys of a block
    "WARPS": [0, 4, 8],  # but for roles
    "STAGES": [0, 1, 2, 3, 4],  # blocks in flight; roles take at least 2 and as many as fit
    "SPLITS": [0, 1, 2, 4, 8, 16, 32, 64, 128],  # programs that share a tile's keys (not causal); 0: from the shape
    "L2_SHARE": [0.25, 0.5, 0.75],  # of the L2 cache that a section's keys and values may take (causal)
    "FP32_DOT": ["ieee", "tf32x3"],  # fp32 products: plain multiply-adds, or three tensor core products
    "CONSUMERS": [0, 1, 2, 3],  # roles: warpgroups that compute, 64 rows each; 0: from the shape
    "PINGPONG": [0, 1],  # roles: 1 makes them take turns on the tensor cores
    "SCHEDULE": ["grid", "draw"],  # roles: one program a tile, or as many as fit on the GPU, which draw tiles
}
CONFIG = {
    "VARIANT": "auto",
    "BLOCK_M": 0,
    "BLOCK_N": 0,
    "WARPS": 0,
    "STAGES": 0,
    "SPLITS": 0,
    "L2_SHARE": 0.5,
    "FP32_DOT": "ieee",
    "CONSUMERS": 0,
    "PINGPONG": 1,
    "SCHEDULE": "draw",
}

LOG2E = math.log2(math.e)
GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

# Renamed in Triton 3.7.
_bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_bulk_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


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
            PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Show the tile's queries the keys first .. last; `row_max` is in units of log2."""
    for start in range(first, last, BLOCK_N):
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
               TMA: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
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
                                    k_ss, v_ss, batch, kv_head, False, CAUSAL, NEGATIVE, TMA, PRECISION,
                                    D, BLOCK_N, BLOCK_D)  # fmt: skip
    acc, row_sum, row_max = _attend(acc, row_sum, row_max, queries, k, v, unmasked, last, tokens, scale, seq_k,
                                    k_ss, v_ss, batch, kv_head, True, CAUSAL, NEGATIVE, TMA, PRECISION,
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
def _combine(out, parts, sums, rows, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
             SPLITS: tl.constexpr):  # fmt: skip
    """One row: the splits' results added in a fixed order, each in units of the largest maximum among them."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SPLITS)
    at = sums + (every * tl.cast(rows, tl.int64) + row) * 2
    maxima = tl.load(at, mask=every < splits, other=-float("inf"))
    row_max = tl.max(maxima, 0)
    base = tl.where(row_max == -float("inf"), 0.0, row_max)
    row_sum = tl.sum(tl.exp2(maxima - base) * tl.load(at + 1, mask=every < splits, other=0.0), 0)
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for first in range(0, splits, CHUNK):
        some = first + tl.arange(0, CHUNK)
        part = some * tl.cast(rows, tl.int64) + row
        grow = tl.exp2(tl.load(sums + part * 2, mask=some < splits, other=-float("inf")) - base)
        wanted = (some < splits)[:, None] & (cols < D)[None, :]
        acc += tl.load(parts + part[:, None] * D + cols[None, :], mask=wanted, other=0.0) * grow[:, None]
    result = tl.sum(acc, 0) / row_sum
    tl.store(out + row * D + cols, result.to(out.dtype.element_ty), mask=cols < D)


@gluon.jit
def _tile(pid, heads, tiles, section, CAUSAL: gl.constexpr):
    """(head, tile of query rows) of a ticket: `section` heads at a time, in them the longest tiles first."""
    done = pid // (section * tiles) * section
    here = gl.minimum(section, heads - done)
    pid -= done * tiles
    tile = pid // here
    if CAUSAL:
        tile = tiles - 1 - tile
    return done + pid % here, tile


@gluon.jit
def _blocks(tile, seq_k, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Blocks of keys that a tile sees."""
    last = seq_k
    if CAUSAL:
        last = gl.minimum(seq_k, tile * BLOCK_M + BLOCK_M)
    return gl.cdiv(last, BLOCK_N)


@gluon.jit
def _turn(way: gl.constexpr, consumer: gl.constexpr):
    """`sync`: wait until it is the consumer's turn on the tensor cores; `arrive`: make it that."""
    asm: gl.constexpr = "bar." + way + " $1, 256; mov.u32 $0, 0;"  # both warpgroups' threads; Triton uses low barriers
    gl.inline_asm_elementwise(asm, "=r,r", [consumer + 8], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _draw(counter):
    """Take a ticket in lane 0 of a warp; nothing waits for it before `_drawn`."""
    asm: gl.constexpr = """{
        .reg .pred first;
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.global.add.u32 $0, [$1], 1;
    }"""
    return gl.inline_asm_elementwise(asm, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _drawn(ticket):
    """The ticket in all lanes."""
    asm: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(source, coordinates, buffers, full, empty, index, phase):
    """Have the copy engine fill buffer `index` once it is empty."""
    mbarrier.wait(empty.index(index), phase)
    mbarrier.expect(full.index(index), source.block_type.nbytes)
    _bulk_load(source, coordinates, full.index(index), buffers.index(index))


@gluon.jit
def _matrix(buffers, index):
    """Buffer `index` of [count, 1, 1, rows, columns] as a matrix."""
    block = buffers.index(index)
    return block.reshape([block.shape[2], block.shape[3]])


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _produce(q, k, v, counter, buffers, barriers, heads, heads_of_batch, group, tiles, section, seq_k,
             CAUSAL: gl.constexpr, DRAW: gl.constexpr):  # fmt: skip
    """One warp: loads what the consumers will need, in their order, and draws the tiles."""
    queries, keys, values, _, tickets = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, t_full, t_empty = barriers
    CONSUMERS: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[3]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[3]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stage = 0
    phase = 1
    turn = 1
    pid = gl.program_id(0)
    while pid < heads * tiles:
        if DRAW:
            ticket = _draw(counter)
        head, tile = _tile(pid, heads, tiles, section, CAUSAL)
        batch = head // heads_of_batch
        head = head % heads_of_batch
        kv_head = head // group
        start = (_blocks(tile, seq_k, CAUSAL, BLOCK_M, BLOCK_N) - 1) * BLOCK_N
        _fetch(k, [batch, kv_head, start, 0], keys, k_full, k_empty, stage, phase)
        for i in gl.static_range(CONSUMERS):
            _fetch(q, [batch, head, tile * BLOCK_M + i * ROWS, 0], queries, q_full, q_empty, i, turn)
        while start > 0:
            v_stage = stage
            v_phase = phase
            stage, phase = _next_stage(stage, phase, STAGES)
            _fetch(k, [batch, kv_head, start - BLOCK_N, 0], keys, k_full, k_empty, stage, phase)
            _fetch(v, [batch, kv_head, start, 0], values, v_full, v_empty, v_stage, v_phase)
            start -= BLOCK_N
        _fetch(v, [batch, kv_head, start, 0], values, v_full, v_empty, stage, phase)
        stage, phase = _next_stage(stage, phase, STAGES)
        if DRAW:
            pid = gl.num_programs(0) + _drawn(ticket)
            mbarrier.wait(t_empty, turn)
            tickets.store(gl.full([1], pid, gl.int32, LANES))
            mbarrier.arrive(t_full)
        else:
            pid += gl.num_programs(0)
        turn ^= 1


@gluon.jit
def _larger_half(x):
    """[rows, columns] -> [rows, columns / 2]; a tree of these keeps more maxima in flight than a chain."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.maximum(left, right)


@gluon.jit
def _weigh(scores, row_max, row_sum, scale, start, row, seq_k, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
           NEGATIVE: gl.constexpr):  # fmt: skip
    """(weights of a block's keys, what earlier results shrink by, new maximum, new sum); see `_attend`."""
    LAYOUT: gl.constexpr = scores.type.layout
    if NEGATIVE:
        scores = -scores
    if MASKED:
        cols = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        seen = cols < seq_k
        if CAUSAL:
            rows = row + gl.arange(0, scores.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
            seen = seen & (cols <= rows)
        scores = gl.where(seen, scores, -float("inf"))
    largest = gl.convert_layout(gl.max(_larger_half(_larger_half(scores)), 1), gl.SliceLayout(1, LAYOUT))
    new_max = gl.maximum(row_max, largest * scale)
    base = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(gl.fma(scores, scale, -base[:, None]))
    shrink = gl.exp2(row_max - base)
    return weights, shrink, new_max, row_sum * shrink + gl.sum(weights, 1)


@gluon.jit
def _step(acc, weights, row_max, row_sum, stage, phase, start, query, buffers, barriers, scale, row, seq_k,
          MASKED: gl.constexpr, CAUSAL: gl.constexpr, NEGATIVE: gl.constexpr, PINGPONG: gl.constexpr,
          INDEX: gl.constexpr):  # fmt: skip
    """Score the next block, and meanwhile add the values of the one before it, whose weights are known."""
    queries, keys, values, _, _ = buffers
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    CONSUMERS: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[3]
    BLOCK_N: gl.constexpr = keys.shape[3]
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    O_LAYOUT: gl.constexpr = acc.type.layout
    v_stage = stage
    stage, phase = _next_stage(stage, phase, keys.shape[0])
    mbarrier.wait(k_full.index(stage), phase)
    if PINGPONG:
        _turn("sync", INDEX)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(query, _matrix(keys, stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, _matrix(values, v_stage), acc, is_async=True)
    if PINGPONG:
        _turn("arrive", (INDEX + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage))
    weights, shrink, row_max, row_sum = _weigh(scores, row_max, row_sum, scale, start, row, seq_k, MASKED, CAUSAL,
                                               NEGATIVE)  # fmt: skip
    # This wait has long been over. But it is a branch, over which the assembler does not move the next wait up, in
    # front of the weights, as it otherwise does.
    mbarrier.wait(v_full.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    weights = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return acc, weights, row_max, row_sum, stage, phase


@gluon.jit
def _next_ticket(pid, tickets, full, empty, phase, DRAW: gl.constexpr):
    """The ticket that the producer drew, or without DRAW the program's own next one."""
    if DRAW:
        mbarrier.wait(full, phase)
        pid = gl.max(tickets.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(empty)
    else:
        pid += gl.num_programs(0)
    return pid


@gluon.jit
def _consume(out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale, CAUSAL: gl.constexpr,
             NEGATIVE: gl.constexpr, PINGPONG: gl.constexpr, DRAW: gl.constexpr, OWN_RESULT: gl.constexpr,
             INDEX: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 query rows of each tile."""
    queries, keys, values, results, tickets = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, t_full, t_empty = barriers
    CONSUMERS: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[3]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = keys.shape[3]
    D: gl.constexpr = keys.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    query = _matrix(queries, INDEX)
    stage = 0
    phase = 0
    turn = 0
    if PINGPONG and INDEX == CONSUMERS - 1:
        _turn("arrive", 0)  # the first consumer begins
    pid = gl.program_id(0)
    while pid < heads * tiles:
        head, tile = _tile(pid, heads, tiles, section, CAUSAL)
        batch = head // heads_of_batch
        head = head % heads_of_batch
        row = tile * BLOCK_M + INDEX * ROWS
        start = (_blocks(tile, seq_k, CAUSAL, BLOCK_M, BLOCK_N) - 1) * BLOCK_N

        # The last block first: it alone is ragged, and on the diagonal if blocks are as long as tiles.
        mbarrier.wait(q_full.index(INDEX), turn)
        mbarrier.wait(k_full.index(stage), phase)
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(query, _matrix(keys, stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        weights, _, row_max, row_sum = _weigh(scores, row_max, row_sum, scale, start, row, seq_k, True, CAUSAL,
                                              NEGATIVE)  # fmt: skip
        weights = gl.convert_layout(weights.to(keys.dtype), WEIGHTS)
        mbarrier.wait(v_full.index(stage), phase)

        if CAUSAL and BLOCK_M != BLOCK_N:
            seen_by_all = gl.minimum(seq_k, tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N
            while start > seen_by_all:
                start -= BLOCK_N
                acc, weights, row_max, row_sum, stage, phase = _step(
                    acc, weights, row_max, row_sum, stage, phase, start, query, buffers, barriers, scale, row, seq_k,
                    True, CAUSAL, NEGATIVE, PINGPONG, INDEX)  # fmt: skip
        while start > 0:
            start -= BLOCK_N
            acc, weights, row_max, row_sum, stage, phase = _step(
                acc, weights, row_max, row_sum, stage, phase, start, query, buffers, barriers, scale, row, seq_k,
                False, CAUSAL, NEGATIVE, PINGPONG, INDEX)  # fmt: skip

        if OWN_RESULT:
            mbarrier.arrive(q_empty.index(INDEX))
        acc = warpgroup_mma(weights, _matrix(values, stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage))
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if OWN_RESULT:
            tma.store_wait(0)
        _matrix(results, INDEX).store(acc.to(keys.dtype))
        fence_async_shared()
        _bulk_store(out, [batch, head, row, 0], results.index(INDEX))
        if not OWN_RESULT:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(INDEX))
        stage, phase = _next_stage(stage, phase, keys.shape[0])
        pid = _next_ticket(pid, tickets, t_full, t_empty, turn, DRAW)
        turn ^= 1
    tma.store_wait(0)
    if PINGPONG and INDEX == 0:
        _turn("sync", 0)  # the last consumer's arrival


@gluon.jit
def _attention_by_roles(q, k, v, out, counter, heads, heads_of_batch, group, tiles, section, seq_k, scale,
                        CAUSAL: gl.constexpr, NEGATIVE: gl.constexpr, PINGPONG: gl.constexpr, DRAW: gl.constexpr,
                        OWN_RESULT: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Tiles of CONSUMERS * 64 rows: one warp loads, each other warpgroup computes 64 rows."""
    ROWS: gl.constexpr = q.block_shape[2]
    BLOCK_N: gl.constexpr = k.block_shape[2]
    D: gl.constexpr = q.block_shape[3]
    queries = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    results = queries
    if OWN_RESULT:  # then the next tile's queries can arrive while this one's results leave
        results = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], q.layout)
    tickets = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    t_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    t_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    mbarrier.init(t_full, count=1)
    mbarrier.init(t_empty, count=CONSUMERS)
    fence_async_shared()  # the copy engine must see the barriers

    buffers = (queries, keys, values, results, tickets)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, t_full, t_empty)
    # The first role is the launched warpgroup's; it gets the registers that the others leave.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale,
                            CAUSAL, NEGATIVE, PINGPONG, DRAW, OWN_RESULT, gl.constexpr(0))),
                (_produce, (q, k, v, counter, buffers, barriers, heads, heads_of_batch, group, tiles, section, seq_k,
                            CAUSAL, DRAW)),
            ], [1], [24]
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale,
                            CAUSAL, NEGATIVE, PINGPONG, DRAW, OWN_RESULT, gl.constexpr(0))),
                (_consume, (out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale,
                            CAUSAL, NEGATIVE, PINGPONG, DRAW, OWN_RESULT, gl.constexpr(1))),
                (_produce, (q, k, v, counter, buffers, barriers, heads, heads_of_batch, group, tiles, section, seq_k,
                            CAUSAL, DRAW)),
            ], [4, 1], [240, 24]
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale,
                            CAUSAL, NEGATIVE, PINGPONG, DRAW, OWN_RESULT, gl.constexpr(0))),
                (_consume, (out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale,
                            CAUSAL, NEGATIVE, PINGPONG, DRAW, OWN_RESULT, gl.constexpr(1))),
                (_consume, (out, buffers, barriers, heads, heads_of_batch, tiles, section, seq_k, scale,
                            CAUSAL, NEGATIVE, PINGPONG, DRAW, OWN_RESULT, gl.constexpr(2))),
                (_produce, (q, k, v, counter, buffers, barriers, heads, heads_of_batch, group, tiles, section, seq_k,
                            CAUSAL, DRAW)),
            ], [4, 4, 1], [160, 160, 32]
        )  # fmt: skip


@functools.cache
def _plan(target, dtype, batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, takes_bulk, takes_roles):
    """How to run one shape: (variant, pack, splits, grid, whole-number arguments, options, block shapes).

    `takes_bulk` and `takes_roles` say whether the layouts allow those variants.
    """
    itemsize = dtype.itemsize
    group = heads // kv_heads
    pack = group if seq_q < 64 else 1
    rows, packs = seq_q * pack, batch * heads // pack
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n, warps, stages = _tile_shape(target, itemsize, block_d, rows)
    splits = 1 if causal else CONFIG["SPLITS"] or _splits(target, triton.cdiv(rows, block_m) * packs, seq_k, rows)
    keys_of_split = triton.cdiv(triton.cdiv(seq_k, splits), block_n) * block_n
    splits = triton.cdiv(seq_k, keys_of_split)
    section = 1  # heads at a time; causal: as many as fit into the cache
    if causal:
        fitting = int(target.l2_bytes * CONFIG["L2_SHARE"]) // (2 * seq_k * head_dim * itemsize)
        section = min(packs, max(1, fitting) * (group // pack))

    if takes_roles and seq_q >= 64 and splits == 1 and block_d in (64, 128, 256):
        consumers, block_n, stages, own_result, programs = _roles(target, block_d, seq_q, packs, causal)
        tiles = triton.cdiv(seq_q, 64 * consumers)
        draw = CONFIG["SCHEDULE"] == "draw" and tiles * packs > programs
        options = {
            "PINGPONG": consumers > 1 and bool(CONFIG["PINGPONG"]),
            "DRAW": draw,
            "OWN_RESULT": own_result,
            "CONSUMERS": consumers,
            "STAGES": stages,
            "num_warps": 4,
            "maxnreg": 168 if consumers == 2 else 128,
        }
        sizes = (packs, heads, group, tiles, section, seq_k)
        grid = (programs if draw else tiles * packs,)
        blocks = tuple(
            ([1, 1, n, block_d], gl.NVMMASharedLayout.get_default_for([1, 1, n, block_d], GLUON_DTYPES[dtype]))
            for n in (64, block_n)
        )
        return "roles", pack, splits, grid, sizes, options, blocks
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": warps, "num_stages": stages}
    tiles = triton.cdiv(rows, block_m)
    sizes = (packs, heads // pack, group, seq_q, seq_k, tiles, section, keys_of_split)
    variant = "tma" if takes_bulk else "pointer"
    return variant, pack, splits, (tiles * packs, splits), sizes, options, [1, 1, block_n, block_d]


def _tile_shape(target, itemsize, block_d, rows):
    """(BLOCK_M, BLOCK_N, warps, stages) without roles."""
    if itemsize == 4:
        block_m, block_n, warps, stages = (64, 32, 8, 1) if block_d <= 64 else (32, 64, 8, 1)
        if block_d > 128:  # registers, as in the sizes below
            block_m, block_n = 16, 32
    elif target.vendor == "hip":
        block_m, block_n, warps, stages = (128, 64, 4, 1) if block_d <= 128 else (128, 32, 8, 1)
    elif target.shared_bytes > 200 << 10:
        block_m, block_n, warps, stages = 128, 128 if block_d <= 128 else 64, 8, 3 if block_d <= 64 else 2
    else:
        block_m, block_n, warps, stages = 128 if block_d <= 128 else 64, 64, 4 if block_d <= 64 else 8, 2
    while block_d > 256 and block_m > 16 and block_m * block_d > 64 * 256:
        block_m, block_n, stages = block_m // 2, min(block_n, 32), 1
    # Where tensor cores take 64 rows, fewer leave them idle, but the keys' and values' way from memory bounds the time.
    fitting = max(64 if target.has_wgmma and itemsize == 2 else 16, triton.next_power_of_2(rows))
    if fitting < block_m:
        block_m, block_n, warps, stages = fitting, min(block_n, 64), 4, stages + 1
    block_n = CONFIG["BLOCK_N"] or block_n
    stages = CONFIG["STAGES"] or stages
    fitting = (target.shared_bytes - block_m * block_d * itemsize) // (2 * block_n * block_d * itemsize)
    return CONFIG["BLOCK_M"] or block_m, block_n, CONFIG["WARPS"] or warps, max(1, min(stages, fitting))


def _roles(target, block_d, seq_q, packs, causal):
    """(consumers, BLOCK_N, stages, whether results get shared memory of their own, programs that fit on the GPU)."""
    block_n = max(32, min(CONFIG["BLOCK_N"] or 128, 64 if block_d == 256 else 128))  # registers
    consumers = CONFIG["CONSUMERS"] or _consumers(target, block_d, seq_q, packs, causal)
    consumers = 2 if block_d == 256 else min(consumers, 3 if block_d == 64 else 2)  # registers
    tile, stage, all_bytes = consumers * 64 * block_d * 2, 2 * block_n * block_d * 2, target.shared_bytes - 1024
    stages = max(2, min(CONFIG["STAGES"] or 2, (all_bytes - tile) // stage))
    own_result = 2 * tile + stages * stage <= all_bytes
    bytes_of_one = (2 if own_result else 1) * tile + stages * stage + 2048
    programs = target.sms * (2 if consumers == 1 and 2 * bytes_of_one <= all_bytes else 1)
    return consumers, block_n, stages, own_result, programs


def _consumers(target, block_d, seq_q, packs, causal):
    """The number of computing warpgroups that should be done first: more overlap better, fewer share out better."""
    clocks = (1200, 1300, 2370) if block_d == 64 else (1500, 2100)  # that a block takes, for 64, 128, 192 rows

    def estimate(consumers):
        tiles = triton.cdiv(seq_q, 64 * consumers) * packs
        if causal:
            return max(1, tiles / 2 / target.sms) * clocks[consumers - 1]
        return triton.cdiv(tiles, target.sms) * clocks[consumers - 1]

    return min(range(len(clocks), 0, -1), key=estimate)


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


def _descriptor(kind, x, block, layout=None):
    """kind(x, x.shape, x.stride(), block, layout) without its checks, which take a third of a call's time."""
    made = object.__new__(kind)
    made.base, made.shape, made.strides, made.block_shape, made.layout = x, x.shape, x.stride(), block, layout
    return made


def kernel_fn(q, k, v, causal=True, scale=None):
    """The weighted values [batch, heads, seq_q, head_dim], contiguous, in q's dtype.

    Raises: TypeError for tensors of unequal or other dtypes; ValueError for shapes that do not fit together.
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
    most = CONFIG["VARIANT"]
    bulk = target.has_tma and q.dtype != torch.float32 and most != "pointer"
    bulk = bulk and _takes_bulk_copies(k) and _takes_bulk_copies(v)
    roles = bulk and target.has_wgmma and most != "tma" and head_dim % 8 == 0 and _takes_bulk_copies(q)
    roles = roles and not triton.knobs.runtime.interpret
    variant, pack, splits, grid, sizes, options, blocks = _plan(
        target, q.dtype, batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, bulk, roles
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # The mask's -inf is scaled too: 0 would make it NaN, this leaves it and moves no weight.
    factor = LOG2E * (head_dim**-0.5 if scale is None else scale) or 1e-30
    with on_device(q):
        if variant == "roles":
            counter = torch.zeros(1, dtype=torch.int32, device=q.device) if options["DRAW"] else out
            (rows, rows_layout), (keys, keys_layout) = blocks
            _attention_by_roles[grid](
                _descriptor(LaidOutDescriptor, q, rows, rows_layout),
                _descriptor(LaidOutDescriptor, k, keys, keys_layout),
                _descriptor(LaidOutDescriptor, v, keys, keys_layout),
                _descriptor(LaidOutDescriptor, out, rows, rows_layout),
                counter, *sizes, abs(factor), CAUSAL=causal, NEGATIVE=factor < 0, **options,
            )  # fmt: skip
            return out
        parts, sums = out, out
        if splits > 1:
            parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
            sums = torch.empty((splits, *q.shape[:3], 2), dtype=torch.float32, device=q.device)
        keys, values = k, v
        if variant == "tma":
            keys, values = _descriptor(TensorDescriptor, k, blocks), _descriptor(TensorDescriptor, v, blocks)
        _attention[grid](
            q, keys, values, parts, sums, *sizes, abs(factor), *q.stride(), *k.stride(), *v.stride(),
            CAUSAL=causal, NEGATIVE=factor < 0, PACK=pack, SPLIT=splits > 1, TMA=variant == "tma",
            PRECISION=_precision(q.dtype, target), D=head_dim, **options,
        )  # fmt: skip
        if splits > 1:
            rows = batch * heads * seq_q
            _combine[(rows,)](
                out, parts, sums, rows, splits, D=head_dim, BLOCK_D=options["BLOCK_D"], CHUNK=8,
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
