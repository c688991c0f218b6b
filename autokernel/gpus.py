"""What a GPU can do at most: published dense peaks per dtype, bandwidth and sizes, looked up in gpus.toml.

Names match exactly, as "A10G" is no A10 and "RTX 4080 SUPER" no RTX 4080. A part that is not in the table can be
estimated from clocks; the estimate says so, and holds nothing that cannot be computed. Knows no torch and no device.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("gpus.toml")
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")

REPORTED_MEMORY = (0.88, 1.05)
"""Bytes that a driver reports over those of the name, in GiB: it keeps some for itself and for error correction."""

DATA_RATE = 2
"""Transfers per memory clock, unless the architecture's entry says another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's published or estimated limits; None, or a missing dtype, is unknown.

    `peak_tflops` are dense TFLOP/s (int8: TOP/s) by dtype; fp32 is without tensor cores. `sms` are multiprocessors or
    compute units, `shared_bytes` what one block may use, `l2_bytes` what the driver reports (of one die for AMD).
    """

    name: str
    arch: str  # sm_90, gfx942
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_gbps: float | None = None
    l2_bytes: int | None = None
    sms: int | None = None
    shared_bytes: int | None = None
    shared_bytes_per_sm: int | None = None
    memory_gb: float | None = None
    source: str = ""
    estimated: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one multiprocessor or compute unit of an architecture holds at once.

    `registers` are 32-bit ones of the whole unit, `threads` and `blocks` the most that are resident, `shared_bytes` its
    shared memory and `shared_bytes_per_block` the part of it that one block may ask for.
    """

    arch: str
    registers: int
    threads: int
    blocks: int
    shared_bytes: int
    shared_bytes_per_block: int


def limits(arch: str) -> Limits | None:
    """The limits of an architecture (`sm_90`, `gfx942`); None where the table has none."""
    known = _toml()["architecture"].get(arch, {}).get("limits")
    if known is None:
        return None
    return Limits(
        arch=arch,
        registers=known["registers"],
        threads=known["threads"],
        blocks=known["blocks"],
        shared_bytes=known["shared_kib"] << 10,
        shared_bytes_per_block=known["shared_kib_per_block"] << 10,
    )


def lanes_per_clock(arch: str) -> float:
    """fp32 multiply-adds per clock of one unit. Raises: KeyError for an architecture that the table does not have."""
    per_clock: int = _toml()["architecture"][arch]["per_clock"]["fp32"]
    return per_clock / 2


def lookup(name: str, *, gcn_arch: str = "", memory_bytes: int = 0, units: int = 0, clock_mhz: float = 0) -> Gpu | None:
    """The table's entry for a device, or None when it is not certain which one that is.

    Args:
        name: as the driver reports it.
        gcn_arch: AMD's gcnArchName (`gfx942:sramecc+:xnack-`). With `units` and `memory_bytes` it identifies a part
            whose name says nothing ("AMD Radeon Graphics").
        memory_bytes: total memory; an entry of another size is no match (the RTX 3080 with 12 GB).
        units: multiprocessors or compute units; an entry with another number is no match (a partition of a GPU).
        clock_mhz: highest clock, which alone tells an unnamed MI350X from an MI355X.
    """
    arch = gcn_arch.split(":")[0]
    fits = [gpu for gpu in table() if _fits(gpu, arch, memory_bytes, units)]
    named = [gpu for gpu in fits if name.strip() in gpu.names]
    if not named and arch and memory_bytes and units and not _is_named(name):
        named = fits
        if len(named) > 1 and clock_mhz:
            named = [gpu for gpu in fits if abs(_fp32_clock_mhz(gpu) / clock_mhz - 1) < 0.02]
    return named[0] if len(named) == 1 else None


def estimate(
    *,
    name: str,
    sms: int,
    clock_mhz: float,
    capability: tuple[int, int] | None = None,
    gcn_arch: str = "",
    memory_clock_mhz: float = 0,
    bus_bits: int = 0,
    l2_bytes: int = 0,
    shared_bytes: int = 0,
    memory_bytes: int = 0,
) -> Gpu:
    """Limits of a part that is not in the table, computed from what its driver reports.

    peak = units x highest clock x FLOPs per clock of a unit of that architecture; bandwidth = memory clock x transfers
    per clock (2: double data rate) x bus width. What cannot be computed stays None or missing. A power limit may keep
    a GPU below its highest clock, so that an estimated peak is rather too high than too low.
    """
    arch = gcn_arch.split(":")[0] or (f"sm_{capability[0]}{capability[1]}" if capability else "")
    known: dict[str, Any] = _toml()["architecture"].get(arch, {})
    rates: dict[str, int] = known.get("per_clock", {})
    if "GeForce" in name:
        rates = known.get("per_clock_geforce", rates)
    bytes_per_us = memory_clock_mhz * known.get("data_rate", DATA_RATE) * bus_bits / 8
    return Gpu(
        name=name,
        arch=arch,
        peak_tflops={dtype: sms * clock_mhz * rate / 1e6 for dtype, rate in rates.items() if sms and clock_mhz},
        bandwidth_gbps=bytes_per_us / 1e3 or None,
        l2_bytes=l2_bytes or None,
        sms=sms or None,
        shared_bytes=shared_bytes or None,
        memory_gb=memory_bytes / 2**30 or None,
        source="estimated from clocks and unit counts that the driver reports",
        estimated=True,
    )


@functools.cache
def table() -> tuple[Gpu, ...]:
    """All entries of gpus.toml, in its order."""
    return tuple(_entry(row) for row in _toml()["gpu"])


def markdown() -> str:
    """The table of docs/gpus.md."""
    head = ["GPU", "arch", "SMs or CUs", *DTYPES, "GB/s", "L2 MiB", "shared KiB per block", "memory GB", "source"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in _toml()["gpu"]:
        cells = [row["name"], row["arch"], row["units"], *(row["tflops"].get(dtype, "") for dtype in DTYPES)]
        cells += [row["bandwidth_gbps"], row.get("l2_mib", ""), row["shared_kib_per_block"], row["memory_gb"]]
        cells.append(f"[{row['source']}]({row['url']})")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


@functools.cache
def _toml() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def _entry(row: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=row["name"],
        names=tuple(row["names"]),
        arch=row["arch"],
        peak_tflops=dict(row["tflops"]),
        bandwidth_gbps=float(row["bandwidth_gbps"]),
        l2_bytes=row["l2_mib"] << 20 if "l2_mib" in row else None,
        sms=row["units"],
        shared_bytes=row["shared_kib_per_block"] << 10,
        shared_bytes_per_sm=row["shared_kib_per_unit"] << 10,
        memory_gb=float(row["memory_gb"]),
        source=f"{row['source']}, {row['url']}",
    )


def _fits(gpu: Gpu, arch: str, memory_bytes: int, units: int) -> bool:
    """Whether nothing that was said contradicts the entry."""
    assert gpu.memory_gb is not None
    share = memory_bytes / 2**30 / gpu.memory_gb
    low, high = REPORTED_MEMORY
    return (
        (not arch or arch == gpu.arch)
        and (not memory_bytes or low <= share <= high)
        and (not units or units == gpu.sms)
    )


def _is_named(name: str) -> bool:
    """Whether the name is one of a particular part, if not of one in the table."""
    return "Instinct" in name


def _fp32_clock_mhz(gpu: Gpu) -> float:
    """The clock at which the published fp32 peak is reached."""
    assert gpu.sms is not None
    per_clock: int = _toml()["architecture"][gpu.arch]["per_clock"]["fp32"]
    return gpu.peak_tflops["fp32"] * 1e6 / (gpu.sms * per_clock)
