"""Usual amounts by role, for kernels whose work cannot be studied: CUDA C++ and C++.

A memory access of 16 bytes, enough threads for a row or a tile but no more than keep several blocks on a
multiprocessor, and no sharing of results: what a person would begin with. The distance from that ranks configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autokernel.tuner.kinds import Kind
from autokernel.tuner.roles import Role, is_left_to_kernel, role_of
from autokernel.tuner.studies import ITEM_BYTES, WORD_BYTES, Facts

ACCESS_BYTES = 16
ROW_THREADS = (64, 512)  # fewest and most for one row
USUAL: Mapping[Role, float] = {
    Role.WARPS: 4,
    Role.THREADS: 256,
    Role.STAGES: 3,
    Role.GROUP: 8,
    Role.SPLIT: 1,
    Role.UNROLL: 2,
    Role.VECTOR: 4,
    Role.TILE: 64,
}
WEIGHT: Mapping[Role, float] = {Role.VECTOR: 2.0, Role.THREADS: 1.5}
"""How much a factor of two matters, where it is not 1."""


def distance(facts: Facts, point: tuple[int, ...]) -> float:
    """How far a configuration is from the usual one: 1 and above, in factors of two weighted by role."""
    wanted = {**USUAL, **_of_rows(facts)}
    total = 1.0
    for knob, index in zip(facts.space.knobs, point, strict=True):
        value, role = knob.values[index], role_of(knob)
        if role in wanted and isinstance(value, int) and not is_left_to_kernel(value):
            usual = 1.0 if knob.name.upper() in ("ROWS", "HEADS") else wanted[role]
            total += WEIGHT.get(role, 1.0) * abs(math.log2(value / usual))
    return total


def _of_rows(facts: Facts) -> dict[Role, float]:
    """Vector width by dtype, and for kernels of rows as many threads as its accesses take, twice each."""
    first = next(iter(facts.case.tensors.values()), None)
    if first is None or not first.shape:
        return {}
    vector = ACCESS_BYTES / ITEM_BYTES.get(first.dtype, WORD_BYTES)
    wanted = {Role.VECTOR: vector}
    if facts.kind in (Kind.REDUCTION, Kind.POINTWISE):
        accesses = first.shape[-1] / vector / USUAL[Role.UNROLL]
        low, high = ROW_THREADS
        wanted[Role.THREADS] = min(high, max(low, 2 ** round(math.log2(max(1.0, accesses)))))
    return wanted
