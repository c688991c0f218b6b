"""Recorded grids: for every configuration of a kernel what it compiled to and how long its calls took.

A table is one gzipped JSON file whose columns run over the cells. Nothing here needs PyTorch or a GPU.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autokernel.kernelfile import Config, Value
from autokernel.tuner.knobs import knob_of
from autokernel.tuner.rules import Rule
from autokernel.tuner.space import Space

FORMAT = 1
TABLES = Path(__file__).resolve().parent / "tables"
COMPILE_DIGITS, LATENCY_DIGITS, TIMING_DIGITS = 3, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One configuration. `us` holds the medians of the passes; it is empty unless `status` is OK.

    `status` is OK, COMPILE_ERROR, LAUNCH_ERROR, TIMEOUT or WRONG. `compile_s` and `timing_s` are what it cost to
    compile, and to load, check and time once; `calls` were timed in a pass (1: it was hopelessly slow). Resources are
    the largest of the kernels that a call launches; None is unknown. `digest` is of the device code.
    """

    point: tuple[int, ...]
    status: str
    compile_s: float
    us: tuple[float, ...] = ()
    timing_s: float = 0.0
    calls: int = 0
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    digest: str | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One kernel on one case. `source` is the SHA-256 of its kernel.py, `knobs` the grid's, in the order of a point."""

    name: str
    op: str
    backend: str
    kernel: str
    source: str
    device: str
    target: str
    torch: str
    triton: str
    recorded: str
    dtype: str
    shapes: dict[str, list[int]]
    scalars: dict[str, Value]
    knobs: dict[str, list[Value]]
    default: Config
    constraints: list[str]
    cells: list[Cell]

    @property
    def space(self) -> Space:
        """The space that was recorded."""
        rules = tuple(Rule.of(text, self.default) for text in self.constraints)
        knobs = tuple(knob_of(name, values) for name, values in self.knobs.items())
        return Space(knobs=knobs, config=self.default, constraints=rules)


def write_table(path: Path, table: Table) -> None:
    """The whole file or none of it."""
    content = asdict(table) | {"format": FORMAT, "cells": _columns(table.cells)}
    packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(packed)
    os.replace(partial, path)  # noqa: PTH105


def read_table(path: Path) -> Table:
    """Inverse of `write_table`. Raises: ValueError for a file of another format."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no table of format {FORMAT}")
    columns = content.pop("cells")
    columns["point"] = [tuple(point) for point in columns["point"]]
    columns["us"] = [tuple(us) for us in columns["us"]]
    rows = zip(*columns.values(), strict=True)
    return Table(cells=[Cell(**dict(zip(columns, row, strict=True))) for row in rows], **content)


def table_path(folder: Path, name: str) -> Path:
    """Where a table of that name lies."""
    return folder / f"{name}.json.gz"


def _columns(cells: list[Cell]) -> dict[str, list[Any]]:
    digits = {"compile_s": COMPILE_DIGITS, "timing_s": TIMING_DIGITS}
    columns: dict[str, list[Any]] = {}
    for field in fields(Cell):
        values = [getattr(cell, field.name) for cell in cells]
        if field.name in digits:
            values = [round(value, digits[field.name]) for value in values]
        elif field.name == "us":
            values = [[round(us, LATENCY_DIGITS) for us in value] for value in values]
        columns[field.name] = values
    return columns
