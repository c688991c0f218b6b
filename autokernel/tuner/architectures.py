"""What the cost model knows of each architecture beyond gpus.toml, in one table.

Rates per clock of one multiprocessor or compute unit follow from the instruction tables of the CUDA programming guide
(16 special functions per clock) and the vendors' architecture papers. Latencies and the cost of a block are rounded
from public microbenchmarks; they only have to be right in proportion, as the model ranks configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Product(StrEnum):
    """How a multiprocessor multiplies matrices."""

    MMA = "mma"
    """Operands and sums in registers."""
    WGMMA = "wgmma"
    """Operands in shared memory, sums in the registers of four warps."""
    TCGEN05 = "tcgen05"
    """Operands in shared memory, sums in tensor memory."""
    MFMA = "mfma"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Rates per clock of one multiprocessor, and times in us.

    `l2_bytes` come from the L2 cache; `latency_us` is that of a load from memory, `loaded_us` where many operands of
    products are under way; `block_us` what a block costs before its first load and after its last store; `step_us` what
    warps lose in an iteration by waiting for each other. `efficiency` is the share of the published rate of products
    that compiled kernels reach at best.
    """

    product: Product
    special: float = 16.0
    l2_bytes: float = 40.0
    latency_us: float = 0.7
    block_us: float = 0.4
    loaded_us: float = 1.3
    step_us: float = 0.02
    efficiency: float = 0.78


ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_80": Architecture(product=Product.MMA, efficiency=0.8, latency_us=0.6),
    "sm_86": Architecture(product=Product.MMA, efficiency=0.8, latency_us=0.6),
    "sm_89": Architecture(product=Product.MMA, efficiency=0.8, latency_us=0.6),
    "sm_90": Architecture(product=Product.WGMMA),
    "sm_100": Architecture(product=Product.TCGEN05),
    "sm_103": Architecture(product=Product.TCGEN05),
    "sm_120": Architecture(product=Product.MMA, efficiency=0.8),
    "gfx942": Architecture(product=Product.MFMA, l2_bytes=64.0, latency_us=1.0, efficiency=0.6),
    "gfx950": Architecture(product=Product.MFMA, l2_bytes=64.0, latency_us=1.0, efficiency=0.6),
}
