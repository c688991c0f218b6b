"""What a launch takes of a GPU and about how long, from the work of one program: a model to rank configurations by.

The time is that of the busiest multiprocessor, which is held up by whichever is slowest of its tensor cores, its other
units, its share of the L2 cache and of memory, and the latency that too few blocks and stages leave open. Shared memory
is an upper bound: what is predicted to fit does fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autokernel import gpus
from autokernel.gpus import Gpu, Limits
from autokernel.tuner import occupancy
from autokernel.tuner.architectures import ARCHITECTURES, Architecture, Product
from autokernel.tuner.kinds import Kind, Work

WORD = 4  # bytes of a register
BASE_REGISTERS = 24  # of a thread, for indices and bounds: the least that kernels with a loop and masks take
ACCESS_BYTES = 16  # of one load by one thread; each has an address of two registers
MMA_OPERANDS = 32  # registers for operands where products read them from there
MOST_REGISTERS = 255
CONVERSION = 1.125  # a layout change pads the rows of what it writes to shared memory
BARRIER_BYTES = 64  # of the asynchronous operations of a loop
SPILL_COST = 2.0  # of a register that lies in memory, over one that does not, per share of all registers
PRODUCT_ROWS = 64  # of one instruction that takes its operands from shared memory, by four warps
GROUP_WARPS = 4
SLAB_BYTES = 128  # of a row of operands in shared memory, from which products read without conflicts
SHORT_SLAB = 0.97  # share of their rate that they reach with shorter rows
L2_SHARE = 0.5  # of the cache, in which what programs read again is thought to stay
DTYPE_OF_BYTES = {1.0: "fp8", 2.0: "bf16", 4.0: "tf32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Prediction for one launch. `parts` are the times in us that the busiest multiprocessor would need if only one of
    its units counted; `fits` is whether a block can be launched.
    """

    us: float
    parts: dict[str, float]
    fits: bool
    shared_bytes: int
    registers: int
    pressure: float  # registers wanted over registers that a thread may have
    blocks_per_sm: int
    occupancy: float
    waves: float
    wave_efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU and what the model knows of its architecture. Rates are per us and multiprocessor."""

    gpu: Gpu
    limits: Limits
    architecture: Architecture

    @classmethod
    def of(cls, gpu: Gpu) -> Device | None:
        """The model's view of a GPU; None where its architecture or its rates are not known."""
        limits, architecture = gpus.limits(gpu.arch), ARCHITECTURES.get(gpu.arch)
        if limits is None or architecture is None or not gpu.sms or not gpu.bandwidth_gbps or not gpu.peak_tflops:
            return None
        return cls(gpu=gpu, limits=limits, architecture=architecture)

    @property
    def sms(self) -> int:
        """Multiprocessors or compute units."""
        return self.gpu.sms or 1

    @property
    def lanes(self) -> int:
        """Threads of a warp or wave."""
        return occupancy.WAVE_SIZE if self.gpu.arch.startswith("gfx") else occupancy.WARP_SIZE

    @property
    def arithmetic(self) -> float:
        """Elements that ordinary operations make."""
        return self.gpu.peak_tflops["fp32"] * 1e6 / 2 / self.sms

    @property
    def clock(self) -> float:
        """Clocks."""
        return self.arithmetic / gpus.lanes_per_clock(self.gpu.arch)

    def products(self, element_bytes: float) -> float:
        """FLOPs of matrix products with such operands."""
        peaks = self.gpu.peak_tflops
        rate = peaks.get(DTYPE_OF_BYTES.get(element_bytes, ""), peaks["fp32"])
        return rate * 1e6 / self.sms * self.architecture.efficiency

    @property
    def memory(self) -> float:
        """Bytes of its share of memory."""
        return (self.gpu.bandwidth_gbps or 0.0) * 1e3 * 0.9 / self.sms


def shared_bytes(work: Work, warps: int, stages: int, product: Product, *, bound: bool = True) -> int:
    """Shared memory that one block takes: at most, or (without `bound`) as a rule.

    As a rule a kernel without products changes no layout, so that what it loads, holds and stores stays in registers.
    """
    ring = work.ring_bytes * buffers(work, warps, stages, product)
    streamed = work.streamed_bytes * (stages - (not bound) if work.loop_stages > 1 else 0)
    left = 0.0 if reads_shared(work, warps, product) else work.left_bytes
    converts = bound or work.dot[0] > 0
    loop = ring + streamed + (work.loop_scratch_bytes + left) * CONVERSION * converts
    outside = work.scratch_bytes * CONVERSION * converts
    if product is Product.MFMA:  # operands that stay do so in registers
        most = max(loop, outside, work.resident_bytes * CONVERSION)
    else:
        most = max(loop, outside) + work.resident_bytes
    reduced = work.row_bytes * warps if bound or not work.dot[0] else 0.0
    return math.ceil(most + reduced + BARRIER_BYTES * (1 + stages) * bound)


def buffers(work: Work, warps: int, stages: int, product: Product) -> int:
    """Copies of a loop's operands in shared memory.

    Copies into it that are waited for one by one leave a stage in registers; products that read from it, and copies of
    whole tiles by descriptor, do not.
    """
    if reads_shared(work, warps, product) or work.by_descriptor:
        return max(1, stages)
    return max(1, stages - 1)


def reads_shared(work: Work, warps: int, product: Product) -> bool:
    """Whether the kernel's products take their operands from shared memory: four warps and 64 rows are a must."""
    rows, _, _ = work.dot
    return product in (Product.WGMMA, Product.TCGEN05) and rows >= PRODUCT_ROWS and warps >= GROUP_WARPS


def registers(work: Work, threads: int, warps: int, product: Product) -> int:
    """Registers that a thread wants: values that live at once, addresses of its loads, and what every kernel needs."""
    live = work.live_bytes
    in_shared = reads_shared(work, warps, product)
    if in_shared:
        live = max(0.0, live - work.resident_bytes)
    if product is Product.TCGEN05 and in_shared and work.kind is Kind.MATMUL:
        live = max(live / 2, live - work.accumulator_bytes)  # sums come to registers in pieces, at the end
    moved = max(work.iteration_bytes, work.store_bytes if work.iterations == 1 else 0.0)
    addresses = 2 * moved / ACCESS_BYTES / threads
    operands = MMA_OPERANDS if work.dot[0] and not in_shared else 0
    return math.ceil(live / WORD / threads + addresses + operands + BASE_REGISTERS)


def estimate(work: Work, warps: int, stages: int, device: Device, input_bytes: float = math.inf) -> Estimate:
    """Resources and time of a launch of `work` with so many warps and stages.

    `input_bytes` is what the whole launch has to read at least: what programs load beyond it comes from the L2 cache.
    """
    threads, product = warps * device.lanes, device.architecture.product
    shared = shared_bytes(work, warps, stages, product)
    wanted = registers(work, threads, warps, product)
    allowed = min(MOST_REGISTERS, device.limits.registers // threads)
    taken = min(wanted, allowed) // 8 * 8 or 8
    usual = shared_bytes(work, warps, stages, product, bound=False)
    fits = occupancy.fit(device.limits, registers=taken, shared_bytes=shared, threads=threads).blocks > 0
    fit = occupancy.fit(device.limits, registers=taken, shared_bytes=usual, threads=threads)
    busiest = math.ceil(work.programs / device.sms)
    blocks = max(1, min(fit.blocks, busiest))
    parts = _parts(work, warps, stages, blocks, device)
    parts["memory"] = _memory_us(work, blocks, device, input_bytes) / busiest
    pressure = wanted / allowed
    if pressure > 1:
        parts["spilled registers"] = SPILL_COST * (pressure - 1) * max(parts.values())
    each = _together(parts)
    tail = device.architecture.block_us + device.architecture.latency_us
    waves = work.programs / (max(1, fit.blocks) * device.sms)
    return Estimate(
        us=busiest * each + tail,
        parts={name: busiest * value for name, value in parts.items()},
        fits=fits,
        shared_bytes=shared,
        registers=taken,
        pressure=pressure,
        blocks_per_sm=fit.blocks,
        occupancy=fit.occupancy,
        waves=waves,
        wave_efficiency=work.programs / device.sms / busiest,
    )


ADDED = ("spilled registers",)
"""Parts that come on top of the others, which go on side by side."""

OVERLAP, HIDING = 3.0, 6.0
"""Of units that work side by side the longest counts most: a sum of so high powers, as none hides quite behind another.
A latency counts little until it is longer than all of them."""

JOIN_US, JOIN_WARPS_US = 0.01, 0.02
"""us of a reduction within a warp, as those of a product's rows are, and for each doubling of the warps beside it."""

HIDDEN = 0.7  # of the shorter of products and other operations, where one group of warps does each

OVERLAPPING_STAGES = 3  # of a loop with products: with fewer, a load waits for the product that uses its buffer

WARP_ROWS = 16  # of a product, which one warp has to itself

BUSY_WARPS = 16  # on a multiprocessor: with fewer, the schedulers wait for results of the warps' own operations


def _together(parts: Mapping[str, float]) -> float:
    """us of a program from the us of its parts."""
    units = sum(us**OVERLAP for name, us in parts.items() if name not in (*ADDED, "latency")) ** (1 / OVERLAP)
    hidden: float = (units**HIDING + parts["latency"] ** HIDING) ** (1 / HIDING)
    return hidden + sum(parts.get(name, 0.0) for name in ADDED)


def _parts(work: Work, warps: int, stages: int, blocks: int, device: Device) -> dict[str, float]:
    """us for one program of a multiprocessor that has `blocks` of them at a time."""
    architecture = device.architecture
    lanes_used = min(1.0, work.elements / (warps * device.lanes))
    issue = min(1.0, warps * blocks / BUSY_WARPS) * lanes_used
    ordinary = (work.arithmetic / device.arithmetic + work.special / (architecture.special * device.clock)) / issue
    ordinary *= spread(work, warps)
    products = _product_us(work, warps, device)
    moved = work.load_bytes + work.store_bytes
    hidden = HIDDEN if blocks * warps >= 2 * GROUP_WARPS else 0.0
    alone = products + ordinary - hidden * min(products, ordinary)
    return {
        "products and arithmetic": alone,
        "L2 cache": moved / (architecture.l2_bytes * device.clock),
        "latency": _latency_us(work, warps, stages, alone, device) / blocks,
    }


def _memory_us(work: Work, blocks: int, device: Device, input_bytes: float) -> float:
    """us of the whole launch for what goes to memory and back."""
    resident = min(work.programs, blocks * device.sms)
    cached = resident * (work.load_bytes if not work.dot[0] else 0.0) <= L2_SHARE * (device.gpu.l2_bytes or math.inf)
    loads = work.programs * work.load_bytes
    return (
        (min(loads, input_bytes if cached else loads) + work.programs * work.store_bytes) / device.memory / device.sms
    )


def spread(work: Work, warps: int) -> float:
    """How many warps share each 16 rows of a product: its rows are then reduced across warps, and held in parts."""
    return max(1.0, WARP_ROWS * warps / work.dot[0]) if work.dot[0] else 1.0


def _product_us(work: Work, warps: int, device: Device) -> float:
    """us of the products of one program, with all tensor cores for it."""
    rows, columns, depth = work.dot
    if not work.flops or not rows or not columns:
        return 0.0
    element_bytes = work.ring_bytes / (depth * (rows + columns)) if work.ring_bytes else 2.0
    rate = device.products(2.0 if element_bytes < 3 else 4.0)
    if reads_shared(work, warps, device.architecture.product):
        share = min(1.0, 2 * columns / (PRODUCT_ROWS + columns))  # operands come from shared memory, 128 bytes a clock
        share *= 1.0 if depth * element_bytes >= SLAB_BYTES else SHORT_SLAB
    elif device.architecture.product in (Product.WGMMA, Product.TCGEN05):
        share = 0.5  # the older instructions
    else:
        share = 1.0
    tile = rows * columns / warps  # of one warp: the larger, the fewer operands per product
    share *= min(1.0, tile / (32 * 32)) ** 0.5 if share == 1.0 else 1.0
    return work.flops / (rate * share)


def _latency_us(work: Work, warps: int, stages: int, busy_us: float, device: Device) -> float:
    """us from the start of a program to its end when it has to wait for its own loads and barriers alone."""
    architecture = device.architecture
    sharing = spread(work, warps) if work.dot[0] else 2 * warps
    ends = architecture.block_us + work.reductions * (JOIN_US + JOIN_WARPS_US * math.log2(sharing))
    if not work.ring_bytes:
        ahead = max(1, stages - 1) if work.loop_stages > 1 else 1
        return ends + max(1.0, work.iterations / ahead) * architecture.latency_us + busy_us
    waits = max(1.0, work.iterations / max(1, stages - 1)) * architecture.loaded_us
    if stages < OVERLAPPING_STAGES:
        return ends + waits + busy_us
    steps = work.iterations * architecture.step_us * math.sqrt(warps / GROUP_WARPS)
    return ends + max(waits, busy_us + steps)
