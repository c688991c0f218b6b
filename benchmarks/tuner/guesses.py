"""What the heuristics' guesses are worth: choices made with no measurement, looked up in the recorded tables.

    python benchmarks/tuner/guesses.py
    python benchmarks/tuner/guesses.py --out guesses.md

Printed is a Markdown table. Latencies are compared as ratios; the last lines are geometric means and sums.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scoring import half_of
from seeding import heuristics_of
from simulated import Session
from summary import grid
from tables import TABLES, Table, read_table

from autokernel.tuner.heuristics import Heuristics
from autokernel.tuner.knobs import Knob
from autokernel.tuner.roles import Role, role_of
from autokernel.tuner.space import Point

SEEDS = 12

NAIVE = {Role.WARPS: 4, Role.THREADS: 128, Role.STAGES: 1}
NAIVE_SIDE, NAIVE_COUNT = 32, 1
"""A compiler's default with nothing known: tiles of 32, 4 warps, 1 stage; rows, groups, splits and the like are 1.
Sides of 16 are in use, too, and would choose the same configurations: no table has tiles below 32."""

COUNTS = ("ROWS", "HEADS", "TOKENS")
"""Tiles by their role that count whole rows."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One table. Ratios are of latencies, infinite for what does not run; `failures` are among the seeds.

    `below` counts configurations for which less shared memory was predicted than the binary takes, of `predicted`.
    """

    table: str
    half: str
    default_over_best: float
    naive_over_default: float
    seeds_over_best: float
    seeds: int
    failures: int
    below: int
    predicted: int


def guess(table: Table, heuristics: Heuristics) -> Guess:
    """Look the heuristics' choices up."""
    truth = Session(table=table, seed=0).truth
    best, default = min(truth.values()), truth.get(heuristics.default(), math.inf)
    seeds = heuristics.seeds(SEEDS)
    below, predicted = shared_below(table, heuristics)
    return Guess(
        table=table.name,
        half=half_of(table),
        default_over_best=default / best,
        naive_over_default=truth[naive(table, list(truth))] / default,
        seeds_over_best=min(truth.get(seed, math.inf) for seed in seeds) / best,
        seeds=len(seeds),
        failures=sum(seed not in truth for seed in seeds),
        below=below,
        predicted=predicted,
    )


def naive(table: Table, points: Sequence[Point]) -> Point:
    """The one of `points` nearest to NAIVE, in factors of two; what that does not speak of stays as in CONFIG."""
    knobs = table.space.knobs

    def distance(point: Point) -> tuple[float, Point]:
        return sum(_steps(knob, index, table) for knob, index in zip(knobs, point, strict=True)), point

    return min(points, key=distance)


def _steps(knob: Knob, index: int, table: Table) -> float:
    value, role = knob.values[index], role_of(knob)
    if role in (Role.FLAG, Role.OTHER) or not isinstance(value, int):
        return float(value != table.default[knob.name])
    side = role is Role.TILE and knob.name not in COUNTS
    wanted = NAIVE.get(role, NAIVE_SIDE if side else NAIVE_COUNT)
    return abs(math.log2(max(1, value) / wanted))


def shared_below(table: Table, heuristics: Heuristics) -> tuple[int, int]:
    """How many predictions of shared memory are below what was recorded, and of how many."""
    below = predicted = 0
    for cell in table.cells:
        estimates = heuristics.estimates(cell.point)
        if estimates and cell.shared_bytes is not None:
            predicted += 1
            below += max(each.shared_bytes for each in estimates) < cell.shared_bytes
    return below, predicted


def markdown(guesses: Sequence[Guess]) -> str:
    """One line per table, then dev, test and all."""
    head = ["table", "half", "default / best", "naive / default", f"best of {SEEDS} seeds / best",
            "failures among seeds", "shared memory below"]  # fmt: skip
    rows = [_row([one], one.table, one.half) for one in guesses]
    for half in ("dev", "test", "all"):
        if chosen := [one for one in guesses if half in ("all", one.half)]:
            rows.append(_row(chosen, "geometric mean", half))
    return "\n".join(grid(head, rows)) + "\n"


def _row(guesses: Sequence[Guess], name: str, half: str) -> list[str]:
    ratios = [
        statistics.geometric_mean(getattr(one, what) for one in guesses)
        for what in ("default_over_best", "naive_over_default", "seeds_over_best")
    ]
    failures = f"{sum(one.failures for one in guesses)} of {sum(one.seeds for one in guesses)}"
    predicted = sum(one.predicted for one in guesses)
    below = f"{sum(one.below for one in guesses)} of {predicted}" if predicted else "-"
    return [name, half, f"{ratios[0]:.3f}", f"{ratios[1]:.2f}", f"{ratios[2]:.3f}", failures, below]


def main() -> None:
    """Read the command line, look up, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of recorded tables")
    parser.add_argument("--out", type=Path, help="also write the Markdown table to this file")
    args = parser.parse_args()
    tables = [read_table(path) for path in sorted(args.tables.glob("*.json.gz"))]
    tables = [table for table in tables if table.device != "cpu"]
    if not tables:
        sys.exit(f"error: no tables of a GPU in {args.tables}; record.py makes them")
    text = markdown([guess(table, heuristics_of(table)) for table in tables])
    if args.out:
        args.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
