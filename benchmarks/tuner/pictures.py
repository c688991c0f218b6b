"""Regret curves, and the spaces in two dimensions; nothing where matplotlib is missing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from arms import ARMS
from scoring import Score
from simulated import CURVE, Session
from tables import Table

from autokernel.tuner.coding import code

SHOWN = 10
"""Arms in the picture of regret."""

COLUMNS = 4


def draw(folder: Path, tables: Sequence[Table], scores: Sequence[Score], arms: Sequence[str]) -> None:
    """Write regret.png and spaces.png."""
    try:
        import matplotlib
    except ImportError:
        print("the plots are left out: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    _draw_regret(folder / "regret.png", tables, scores, [arm for arm in arms if not ARMS[arm].ablation][:SHOWN])
    _draw_spaces(folder / "spaces.png", tables)


def _draw_regret(path: Path, tables: Sequence[Table], scores: Sequence[Score], arms: Sequence[str]) -> None:
    """Median regret after each evaluation, one picture per table."""
    from matplotlib import pyplot

    rows = -(-len(tables) // COLUMNS)
    figure, places = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 3 * rows), squeeze=False)
    for place in places.flat[len(tables) :]:
        place.axis("off")
    for place, table in zip(places.flat, tables, strict=False):
        for arm in arms:
            curves = [one.regret for one in scores if one.arm == arm and one.table == table.name]
            if curves:
                middle = [100 * statistics.median(values) for values in zip(*curves, strict=True)]
                place.plot(range(1, CURVE + 1), middle, label=arm, linewidth=2 if arm == arms[0] else 1)
        place.set_title(table.name, fontsize=9)
        place.set_yscale("symlog", linthresh=1)
        place.set_ylim(bottom=0)
        place.tick_params(labelsize=7)
    places[0][0].set_ylabel("median regret, %", fontsize=8)
    places[-1][0].set_xlabel("evaluations", fontsize=8)
    handles, labels = places[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_spaces(path: Path, tables: Sequence[Table]) -> None:
    """Each space on the first two principal components of its encoding, coloured by latency over the best."""
    from matplotlib import pyplot

    rows = -(-len(tables) // COLUMNS)
    figure, places = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 3.2 * rows), squeeze=False)
    for place in places.flat[len(tables) :]:
        place.axis("off")
    shown = None
    for place, table in zip(places.flat, tables, strict=False):
        session = Session(table=table, seed=0)
        at = principal(code(table.space, [cell.point for cell in table.cells]).numbers)
        # Points that differ in what the two components do not show would hide each other.
        at = at + np.random.default_rng(0).normal(0, 0.02, at.shape)
        runs = np.array([cell.point in session.truth for cell in table.cells])
        ratio = np.array([session.truth[c.point] / session.best_us for c in table.cells if c.point in session.truth])
        place.scatter(*at[~runs].T, s=5, c="lightgrey", marker="x", linewidths=0.6)
        order = np.argsort(-ratio)
        colours = np.log2(ratio)[order]
        shown = place.scatter(*at[runs][order].T, s=7, c=colours, cmap="viridis_r", vmin=0, vmax=3)
        best = at[runs][int(ratio.argmin())]
        place.scatter(*best, s=60, facecolors="none", edgecolors="red")
        place.set_title(table.name, fontsize=9)
        place.set_xticks([])
        place.set_yticks([])
    figure.tight_layout(rect=(0, 0, 0.94, 1))
    if shown is not None:
        bar = figure.colorbar(shown, cax=figure.add_axes((0.95, 0.2, 0.01, 0.6)))
        bar.set_label("log2 of latency / best", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def principal(rows: np.ndarray) -> np.ndarray:
    """`rows` [points, columns] on their first two principal components, [points, 2]."""
    scale = rows.std(axis=0)
    centred = (rows - rows.mean(axis=0)) / np.where(scale > 0, scale, 1)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    projected: np.ndarray = centred @ directions[:2].T
    return projected
