"""What a knob does, told by its name: the one table from which the heuristics know knobs of kernels they never saw.

A name that is not in the table is a knob of the kernel's own: the heuristics leave it at CONFIG's value.
"""

from __future__ import annotations

import re
from enum import StrEnum

from autokernel.kernelfile import Value
from autokernel.tuner.knobs import Flag, Knob


class Role(StrEnum):
    """What a knob is about."""

    TILE = "tile"
    """A side of a tile, or elements or rows of a program: the IR shows what it does."""
    WARPS = "warps"
    THREADS = "threads"
    STAGES = "stages"
    GROUP = "group"
    """How many rows of tiles are walked together, for reuse in the L2 cache: it changes no program."""
    SPLIT = "split"
    """Programs that share one result."""
    UNROLL = "unroll"
    VECTOR = "vector"
    """Elements of one memory access."""
    FLAG = "flag"
    """On or off, whatever it does: the IR shows it, if anything."""
    OTHER = "other"


NAMES: tuple[tuple[Role, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        (Role.WARPS, r"(num_)?warps"),
        (Role.THREADS, r"(num_|block_)?threads"),
        (Role.STAGES, r"(num_)?stages|depth"),
        (Role.GROUP, r"group(_size)?(_?[mn])?"),
        (Role.SPLIT, r"splits?(_?k)?|k_splits?"),
        (Role.UNROLL, r"unroll|packs"),
        (Role.VECTOR, r"vec(tor)?(_?(size|width))?"),
        (Role.TILE, r"(block|tile|b|t|chunk)(_?size)?_?[a-z]{0,2}|x?block|rows|cols|columns|tokens|heads|rows_per_\w+"),
    )
)


def role_of(knob: Knob) -> Role:
    """The role of a knob; FLAG or OTHER for a flag or a choice, whatever its name."""
    if isinstance(knob, Flag):
        return Role.FLAG
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in knob.values):
        return Role.OTHER
    return next((role for role, pattern in NAMES if pattern.fullmatch(knob.name)), Role.OTHER)


def is_left_to_kernel(value: Value) -> bool:
    """Whether a value means that the kernel chooses by shape ("auto", 0, -1): it knows more than a rule here."""
    return isinstance(value, str) or value <= 0
