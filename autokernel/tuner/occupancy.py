"""How many blocks (CTAs, workgroups) share one multiprocessor, by the vendors' allocation rules.

NVIDIA: registers are handed out to warps in units, from four partitions of a multiprocessor; shared memory to blocks,
with what the driver keeps of each. AMD: vector registers limit the waves of each of four SIMDs, LDS the workgroups.
The numbers of each architecture stand in gpus.toml. Knows no torch and no device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

from autokernel.gpus import Limits

PARTITIONS = 4  # of an NVIDIA multiprocessor, and SIMDs of an AMD compute unit

WARP_SIZE = 32
REGISTER_UNIT = 256
"""Registers that a warp gets at a time, on every NVIDIA GPU since compute capability 3.0."""

REGISTERS_PER_THREAD = 255
THREADS_PER_BLOCK = 1024
SHARED_UNIT = 128
"""Bytes of shared memory that a block gets at a time, from compute capability 8.0 on."""

RESERVED_SHARED_BYTES = 1024
"""Of each block, kept by the driver on compute capability 8.0 and later; cuobjdump counts it from 9.0 on."""

WAVE_SIZE = 64
VECTOR_REGISTERS = 512  # of a lane, ordinary and accumulation ones together, from CDNA 2 on
VECTOR_REGISTER_UNIT = 8
WAVES_PER_SIMD = 8
BARRIERS_PER_UNIT = 16
"""Workgroups of more than one wave that a compute unit holds: each takes a barrier."""

LDS_UNITS = {"gfx942": 512, "gfx950": 1280}  # bytes that a workgroup gets at a time


class Bound(StrEnum):
    """What keeps one more block from the multiprocessor."""

    REGISTERS = "registers"
    SHARED = "shared memory"
    THREADS = "threads"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Blocks that are resident at once (0: the kernel cannot be launched), their share of the most threads in [0, 1],
    and the resource that is used up first."""

    blocks: int
    occupancy: float
    bound: Bound


def fit(limits: Limits, *, registers: int, shared_bytes: int, threads: int) -> Fit:
    """The blocks of a kernel that one multiprocessor holds.

    `registers` are those of one thread (AMD: vector registers, accumulation ones included), `shared_bytes` what the
    block declares and is launched with, without what the driver keeps, `threads` those of the block.
    """
    amd = limits.arch.startswith("gfx")
    lanes = WAVE_SIZE if amd else WARP_SIZE
    warps = -(-max(threads, 1) // lanes)
    rooms = (_amd_rooms if amd else _nvidia_rooms)(limits, registers, shared_bytes, warps)
    if threads > THREADS_PER_BLOCK:
        rooms[Bound.THREADS] = 0
    bound = min(rooms, key=lambda name: rooms[name])
    blocks = rooms[bound]
    return Fit(blocks=blocks, occupancy=min(1.0, blocks * warps * lanes / limits.threads), bound=bound)


def _nvidia_rooms(limits: Limits, registers: int, shared_bytes: int, warps: int) -> dict[Bound, int]:
    """Blocks for which each of a multiprocessor's resources is enough, by NVIDIA's rules."""
    per_warp = _rounded(registers * WARP_SIZE, REGISTER_UNIT)
    if registers > REGISTERS_PER_THREAD or per_warp * _rounded(warps, PARTITIONS) > limits.registers:
        by_registers = 0  # a launch is checked as if every partition held as many warps
    elif per_warp:
        by_registers = limits.registers // PARTITIONS // per_warp * PARTITIONS // warps
    else:
        by_registers = sys.maxsize
    taken = _rounded(shared_bytes + RESERVED_SHARED_BYTES, SHARED_UNIT)
    return {
        Bound.REGISTERS: by_registers,
        Bound.SHARED: limits.shared_bytes // taken if shared_bytes <= limits.shared_bytes_per_block else 0,
        Bound.THREADS: limits.threads // WARP_SIZE // warps,
        Bound.BLOCKS: limits.blocks,
    }


def _amd_rooms(limits: Limits, registers: int, shared_bytes: int, waves: int) -> dict[Bound, int]:
    """The same for a compute unit."""
    per_lane = _rounded(registers, VECTOR_REGISTER_UNIT)
    resident = min(WAVES_PER_SIMD, VECTOR_REGISTERS // per_lane if per_lane else WAVES_PER_SIMD) * PARTITIONS
    taken = _rounded(shared_bytes, LDS_UNITS.get(limits.arch, 512))
    return {
        Bound.REGISTERS: resident // waves,
        Bound.SHARED: limits.shared_bytes // taken if taken else sys.maxsize,
        Bound.THREADS: limits.threads // WAVE_SIZE // waves,
        Bound.BLOCKS: limits.blocks if waves == 1 else BARRIERS_PER_UNIT,
    }


def _rounded(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
