"""Cross entropy of class indices: log(sum(exp(logits))) - logits[target], then none, mean or sum over the rows.

logits: [rows, classes] fp16, bf16 or fp32, rows at any stride; targets: [rows] int64 or int32. All arithmetic is in
fp32; the result has the logits' dtype. Logits are read from memory once and nothing of their size is written.

Long rows: a program walks along one row. Each of its lanes takes 16 bytes at a time and keeps a maximum and a sum of
exponentials of its own, corrected once per group of 4 to 32 elements when the maximum has grown. So there is one
exponential per logit and no exchange between threads before the end of the row. A row may start anywhere: the few
elements before its first and after its last 16-byte boundary are read apart, so that all the rest are wide loads
(50257 classes). When rows are few, several programs share one, and a second kernel joins their maxima and sums.

Short rows: a program holds several whole rows in registers.

A mean or sum takes a second, tiny kernel that adds what the programs left in memory, always in the same order: results
repeat bit for bit. It is launched while the first still runs (compute capability 9.0 and later) and waits there.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from autokernel.target import on_device, target_of

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"
TUNABLES = {
    "WARPS": [0, 2, 4, 8, 16],  # per program, long rows; 0: 8, or 4 where a row is too short for that
    "UNROLL": [1, 2, 4],  # 16-byte loads per lane and step
    "STAGES": [1, 2, 3, 4],  # steps in flight through shared memory; 1: straight to registers
    "SPLITS": [0, 1, 2, 4, 8],  # programs per long row; 0: one, or more when the rows do not fill the GPU
    "WHOLE": [1024, 2048, 4096, 8192, 32768],  # rows of at most so many classes are held whole in registers
    "TILE": [2048, 4096, 8192],  # elements of short rows that a program holds
    "EVICT": ["", "evict_first", "evict_last"],  # what the cache is told about the logits
    "OVERLAP": [0, 1],  # 1: launch the second kernel early where the GPU can
}
CONFIG = {
    "WARPS": 0,
    "UNROLL": 4,
    "STAGES": 2,
    "SPLITS": 0,
    "WHOLE": 2048,
    "TILE": 4096,
    "EVICT": "evict_first",
    "OVERLAP": 1,
}

LOG2_E = tl.constexpr(1.4426950408889634)
NONE, SUM, MEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MODES = {"none": 0, "sum": 1, "mean": 2}
LOGIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TARGET_DTYPES = (torch.int64, torch.int32)
EARLY = {"launch_pdl": True}
"""Launch option: before the kernel in front is through, as the launched one waits for it."""


@triton.jit
def _reference(top):
    """What is subtracted before exp: the maximum, or 0 where that is infinite (inf - inf would be NaN)."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _load(pointer, offset, stop, MASKED: tl.constexpr, EVICT: tl.constexpr):
    if MASKED:
        x = tl.load(pointer + offset, mask=offset < stop, other=float("-inf"), eviction_policy=EVICT)
    else:
        x = tl.load(pointer + offset, eviction_policy=EVICT)
    return x


@triton.jit
def _terms(x, reference):
    return tl.sum(_exp(x.to(tl.float32) - reference[:, None]), 1)


@triton.jit
def _absorb(top, total, pointer, offset, stop, MASKED: tl.constexpr, UNROLL: tl.constexpr, EVICT: tl.constexpr):
    """Each lane's maximum and sum of exp(x - maximum), with UNROLL more tiles [lanes, elements] of the row."""
    SPAN: tl.constexpr = offset.shape[0] * offset.shape[1]
    a = _load(pointer, offset, stop, MASKED, EVICT)
    if UNROLL >= 2:
        b = _load(pointer, offset + SPAN, stop, MASKED, EVICT)
    if UNROLL == 4:
        c = _load(pointer, offset + 2 * SPAN, stop, MASKED, EVICT)
        d = _load(pointer, offset + 3 * SPAN, stop, MASKED, EVICT)
    new = tl.maximum(top, tl.max(a.to(tl.float32), 1))
    if UNROLL >= 2:
        new = tl.maximum(new, tl.max(b.to(tl.float32), 1))
    if UNROLL == 4:
        new = tl.maximum(new, tl.maximum(tl.max(c.to(tl.float32), 1), tl.max(d.to(tl.float32), 1)))
    reference = _reference(new)
    total = total * _exp(top - reference) + _terms(a, reference)
    if UNROLL >= 2:
        total += _terms(b, reference)
    if UNROLL == 4:
        total += _terms(c, reference) + _terms(d, reference)
    return new, total


@triton.jit
def _walk(
    body, start, stop, LANES: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Each lane's maximum and sum of exp(x - maximum) over its share of body[start:stop]."""
    STEP: tl.constexpr = LANES * WIDTH * UNROLL
    offset = (tl.arange(0, LANES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    whole = start + tl.maximum(stop - start, 0) // STEP * STEP
    for i in tl.range(start, whole, STEP, num_stages=STAGES):
        top, total = _absorb(top, total, body, i + offset, stop, False, UNROLL, EVICT)
    if whole < stop:
        top, total = _absorb(top, total, body, whole + offset, stop, True, UNROLL, EVICT)
    return top, total


@triton.jit
def _aligned(row, length, part):
    """(first address in a row on a 16-byte boundary, elements from there in whole 16 bytes, the elements around those).

    The first part of a row takes the latter.
    """
    BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    WIDTH: tl.constexpr = 16 // BYTES
    address = row.to(tl.int64)
    boundary = (address + 15) // 16 * 16
    head = ((boundary - address) // BYTES).to(tl.int32)
    body = (length - head) // WIDTH * WIDTH
    e = tl.arange(0, 2 * WIDTH)
    at = tl.where(e < WIDTH, e, head + body - WIDTH + e)
    limit = tl.where(part == 0, tl.where(e < WIDTH, head, length), 0)
    ends = tl.load(row + at, mask=at < limit, other=float("-inf")).to(tl.float32)
    return tl.multiple_of(boundary.to(row.dtype), 16), body, ends


@triton.jit
def _loss(reference, total, picked, target, ignore):
    """(loss, whether the row counts), from a row's sum of exp(x - reference) and its logit at the target."""
    counted = target != ignore
    return tl.where(counted, (reference - picked) + tl.log(total), 0.0), counted.to(tl.float32)


@triton.jit
def _put_result(out, total, count, MODE: tl.constexpr):
    value = total / count if MODE == MEAN else total
    tl.store(out, value.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["classes", "row_stride", "ignore", "splits", "steps_each"])
def _long_rows(
    logits, targets, out, classes, row_stride, target_stride, ignore, splits, steps_each,
    MODE: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, or with SPLIT the `steps_each` steps that are this program's part of it.

    WIDTH elements are 16 bytes. With ALIGNED every row starts at a 16-byte boundary, and classes and row_stride are in
    units of WIDTH. `out` becomes [2, programs] (maxima, sums) with SPLIT; else [rows] losses with MODE none, or
    [2, rows] (losses, counts).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    STEP = LANES * WIDTH * UNROLL
    pid = tl.program_id(0)
    row = (pid // splits if SPLIT else pid).to(tl.int64)
    part = pid % splits if SPLIT else 0
    unit = WIDTH if ALIGNED else 1
    classes = classes * unit
    base = logits + row * row_stride * unit
    if not SPLIT:  # early: these are two loads that wait for each other
        target = tl.load(targets + row * target_stride)
        valid = (target >= 0) & (target < classes)
        picked = tl.load(base + target, mask=valid, other=float("nan")).to(tl.float32)

    body, length = base, classes
    if not ALIGNED:
        body, length, ends = _aligned(base, classes, part)
    start = 0
    stop = length
    if SPLIT:
        start = part * steps_each * STEP
        stop = tl.minimum(length, start + steps_each * STEP)
    top, total = _walk(body, start, stop, LANES, WIDTH, UNROLL, STAGES, EVICT)

    row_top = tl.max(top, 0)
    if not ALIGNED:
        row_top = tl.maximum(row_top, tl.max(ends, 0))
    reference = _reference(row_top)
    row_total = tl.sum(total * _exp(top - reference), 0)
    if not ALIGNED:
        row_total += tl.sum(_exp(ends - reference), 0)

    if SPLIT:
        tl.store(out + pid, row_top)
        tl.store(out + tl.num_programs(0) + pid, row_total)
    else:
        loss, count = _loss(reference, row_total, picked, target, ignore)
        tl.store(out + pid, loss.to(out.dtype.element_ty))
        if MODE != NONE:
            tl.store(out + tl.num_programs(0) + pid, count)


@triton.jit(do_not_specialize=["rows", "classes", "row_stride", "ignore", "splits", "blocks"])
def _short_rows(
    logits, targets, parts, out, rows, classes, row_stride, target_stride, ignore, splits, blocks,
    MODE: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, EVICT: tl.constexpr, WAIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Blocks of ROWS rows, each held whole; with SPLIT a row is what `parts` holds of it, [2, rows, splits].

    classes and row_stride are in units of VEC elements. `out` becomes [rows] losses with MODE none, the result with
    ALONE, else [2, programs] (sums, counts).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if WAIT:
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    cols = tl.arange(0, COLS)[None, :]
    losses = tl.zeros((ROWS,), tl.float32)
    counts = tl.zeros((ROWS,), tl.float32)
    for block in range(pid, blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        there = row < rows
        base = logits + row * (row_stride * VEC)
        target = tl.load(targets + row * target_stride, mask=there, other=ignore)
        valid = there & (target >= 0) & (target < classes * VEC)
        picked = tl.load(base + target, mask=valid, other=float("nan")).to(tl.float32)
        if SPLIT:
            at = row[:, None] * splits + cols
            mask = there[:, None] & (cols < splits)
            x = tl.load(parts + at, mask=mask, other=float("-inf"))
            sums = tl.load(parts + tl.cast(rows, tl.int64) * splits + at, mask=mask, other=0.0)
        else:
            mask = there[:, None] & (cols < classes * VEC)
            x = tl.load(base[:, None] + cols, mask=mask, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
        reference = _reference(tl.max(x, 1))
        terms = _exp(x - reference[:, None])
        if SPLIT:
            terms *= sums
        loss, count = _loss(reference, tl.sum(terms, 1), picked, target, ignore)
        if MODE == NONE:
            tl.store(out + row, loss.to(out.dtype.element_ty), mask=there)
        else:
            losses += loss
            counts += count
    if MODE != NONE:
        if ALONE:
            _put_result(out, tl.sum(losses, 0), tl.sum(counts, 0), MODE)
        else:
            tl.store(out + pid, tl.sum(losses, 0))
            tl.store(out + tl.num_programs(0) + pid, tl.sum(counts, 0))


@triton.jit
def _finish(work, out, entries, MODE: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    """The result from [2, entries] (sums, counts): one program, in a fixed order."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    losses = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        losses += tl.load(work + at, mask=at < entries, other=0.0)
        counts += tl.load(work + entries + at, mask=at < entries, other=0.0)
    _put_result(out, tl.sum(losses, 0), tl.sum(counts, 0), MODE)


def kernel_fn(logits, targets, ignore_index=-100, reduction="mean"):
    """The loss in the logits' dtype: a scalar, or [rows] for reduction "none".

    A target that is neither a class nor `ignore_index` makes its row's loss NaN: a GPU kernel cannot raise.
    Raises: TypeError for other dtypes; ValueError for shapes that do not fit or an unknown reduction.
    """
    mode = MODES.get(reduction)
    if mode is None:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(MODES)}")
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}")
    if logits.dtype not in LOGIT_DTYPES or targets.dtype not in TARGET_DTYPES or targets.device != logits.device:
        raise TypeError(
            f"cross_entropy takes fp16, bf16 or fp32 logits and int64 targets on one device, not {logits.dtype} on "
            f"{logits.device} and {targets.dtype} on {targets.device}"
        )
    rows, classes = logits.shape
    if classes > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty((rows,) if mode == MODES["none"] else (), dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    target = target_of(logits)
    with on_device(logits):
        if classes > CONFIG["WHOLE"]:
            _launch_long(logits, targets, out, ignore_index, mode, target)
        else:
            _launch_short(logits, targets, out, ignore_index, mode, target)
    return out


def _launch_long(logits, targets, out, ignore, mode, target):
    rows, classes = logits.shape
    row_stride = logits.stride(0)
    width = 16 // logits.element_size()
    aligned = not (logits.data_ptr() % 16 or row_stride % width or classes % width)
    unit = width if aligned else 1
    warps, splits, steps_each = _long_plan(rows, classes, width, target.sms, target.warp_size)
    split = splits > 1
    overlap = _early(target) and (split or mode != MODES["none"])
    work = out
    if split or mode != MODES["none"]:
        work = torch.empty(2 * rows * splits, dtype=torch.float32, device=out.device)
    _long_rows[(rows * splits,)](
        logits, targets, work, classes // unit, row_stride // unit, targets.stride(0), ignore, splits, steps_each,
        MODE=mode, SPLIT=split, ALIGNED=aligned, LANES=warps * target.warp_size, WIDTH=width, UNROLL=CONFIG["UNROLL"],
        STAGES=CONFIG["STAGES"], EVICT=CONFIG["EVICT"], OVERLAP=overlap, num_warps=warps,
    )  # fmt: skip
    if split:
        _launch_short(logits, targets, out, ignore, mode, target, work, splits)
    elif mode != MODES["none"]:
        _launch_finish(work, out, rows, mode, overlap)


@functools.cache
def _long_plan(rows, classes, width, sms, warp_size):
    """(warps, programs per row, steps of each) for long rows.

    A row should be at least four steps, or the start and the end of a program are most of it. Programs of 8 warps fit
    four or more times on a multiprocessor; with fewer rows than twice that, some of it would idle in the end.
    """
    step = warp_size * width * CONFIG["UNROLL"]  # of one warp
    warps = CONFIG["WARPS"] or (8 if classes >= 4 * 8 * step else 4)
    steps = -(-classes // (warps * step))
    programs = CONFIG["SPLITS"] or max(1, 8 * sms // rows)
    each = -(-steps // min(programs, steps))
    return warps, -(-steps // each), each


def _launch_short(logits, targets, out, ignore, mode, target, parts=None, splits=1):
    """The kernel for short rows, on logits or on what the programs that shared long rows left in `parts`."""
    rows, classes = logits.shape
    row_stride = logits.stride(0)
    split = parts is not None
    programs, block, blocks, cols, vec = _short_plan(
        rows, classes, row_stride, 16 // logits.element_size(), logits.data_ptr() % 16 == 0, splits if split else 0,
        mode, target.sms,
    )  # fmt: skip
    alone = programs == 1
    more = mode != MODES["none"] and not alone
    overlap = _early(target)
    work = torch.empty(2 * programs, dtype=torch.float32, device=out.device) if more else out
    _short_rows[(programs,)](
        logits, targets, parts if split else work, work, rows, classes // vec, row_stride // vec, targets.stride(0),
        ignore, splits, blocks,
        MODE=mode, SPLIT=split, ALONE=alone, VEC=vec, ROWS=block, COLS=cols, EVICT=CONFIG["EVICT"],
        WAIT=overlap and split, OVERLAP=overlap and more, num_warps=min(32, max(1, block * cols // 1024)),
        **(EARLY if overlap and split else {}),
    )  # fmt: skip
    if more:
        _launch_finish(work, out, programs, mode, overlap)


@functools.cache
def _short_plan(rows, classes, row_stride, width, aligned, splits, mode, sms):
    """(programs, rows of a block, blocks, columns, elements known to be aligned) for short rows.

    Few rows are spread over all multiprocessors. For a mean or sum a program takes many blocks, as each leaves a number
    to be added in the end; the parts of long rows are so few that one program adds them at once.
    """
    cols = triton.next_power_of_2(max(splits or classes, 1))
    spread = triton.next_power_of_2(-(-max(rows, 1) // sms))
    block = max(1, min(CONFIG["TILE"] // cols, spread))
    if splits and mode != MODES["none"]:
        block = max(1, min(CONFIG["TILE"] // cols, triton.next_power_of_2(rows)))
    blocks = -(-rows // block)
    programs = blocks
    if mode != MODES["none"]:
        programs = max(1, min(blocks, 16 * sms)) if not splits or blocks > 16 else 1
    vec = math.gcd(width, row_stride, classes) if aligned else 1
    return programs, block, blocks, cols, vec


def _launch_finish(work, out, entries, mode, overlap):
    block = min(8192, triton.next_power_of_2(entries))
    _finish[(1,)](
        work, out, entries, MODE=mode, BLOCK=block, WAIT=overlap, num_warps=min(32, max(1, block // 256)),
        **(EARLY if overlap else {}),
    )  # fmt: skip


def _early(target):
    """Whether a kernel can be launched early and wait for the one in front of it."""
    able = target.vendor == "cuda" and target.arch >= 90 and not triton.knobs.runtime.interpret
    return able and CONFIG["OVERLAP"] == 1
