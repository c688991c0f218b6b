"""Usual amounts by role, for kernels whose work cannot be studied: CUDA C++ and C++.

A memory access of 16 bytes, enough threads for a row but no more than keep several blocks on a multiprocessor: what a
person would begin with on a GPU. For what has no usual amount, and on a CPU, CONFIG is the best guess. Configurations
are ranked by the distance from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autokernel.tuner.kinds import Kind
from autokernel.tuner.roles import Role, is_left_to_kernel
from autokernel.tuner.studies import ITEM_BYTES, WORD_BYTES, Facts

ACCESS_BYTES = 16
ROW_THREADS = (64, 512)  # fewest and most for one row
USUAL: Mapping[Role, float] = {Role.WARPS: 4, Role.THREADS: 256, Role.UNROLL: 2, Role.VECTOR: 4}
SINGLE = ("ROWS", "HEADS", "ROWS_PER_BLOCK")
"""Names of amounts that are one unless something speaks for more."""

WEIGHT: Mapping[Role, float] = {Role.VECTOR: 2.0, Role.THREADS: 1.5}
"""How much a factor of two matters, where it is not 1."""


def distance(facts: Facts, point: tuple[int, ...]) -> float:
    """How far a configuration is from the usual one: 1 and above, in factors of two weighted by role."""
    usual = {} if facts.backend == "cpp" else {**USUAL, **_of_rows(facts)}
    total = 1.0
    for knob, role, index in zip(facts.space.knobs, facts.roles, point, strict=True):
        value, config = knob.values[index], facts.space.config[knob.name]
        if role in (Role.OTHER, Role.FLAG) or is_left_to_kernel(value) or is_left_to_kernel(config):
            continue
        wanted = usual.get(role, float(config))
        if usual and knob.name.upper() in SINGLE:
            wanted = 1.0
        total += WEIGHT.get(role, 1.0) * abs(math.log2(float(value) / wanted))
    return total


def _of_rows(facts: Facts) -> dict[Role, float]:
    """Vector width by dtype, and for kernels of rows as many threads as its accesses take, twice each."""
    first = next(iter(facts.case.tensors.values()), None)
    if first is None or not first.shape:
        return {}
    vector = ACCESS_BYTES / ITEM_BYTES.get(first.dtype, WORD_BYTES)
    wanted: dict[Role, float] = {Role.VECTOR: vector}
    if facts.kind in (Kind.REDUCTION, Kind.POINTWISE):
        accesses = first.shape[-1] / vector / USUAL[Role.UNROLL]
        low, high = ROW_THREADS
        wanted[Role.THREADS] = min(high, max(low, 2 ** round(math.log2(max(1.0, accesses)))))
    return wanted
