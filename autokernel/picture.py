"""progress.png: latency over experiments for every op of a run, drawn by matplotlib where it is installed; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autokernel.experimentlog import Entry, entries
from autokernel.history import KernelHistory
from autokernel.kernelplots import progress_marks
from autokernel.markup import one_line
from autokernel.plots import LOG_FROM, Mark, Shape
from autokernel.state import RunState

PICTURE = "progress.png"

_STYLES: dict[Shape, dict[str, Any]] = {
    Shape.KEPT: {"marker": "o", "color": "tab:green", "label": "kept"},
    Shape.REJECTED: {"marker": "x", "color": "tab:red", "label": "rejected"},
    Shape.SUSPICIOUS: {"marker": "D", "facecolors": "none", "edgecolors": "tab:orange", "label": "suspicious"},
}


def draw_progress(state: RunState, path: Path) -> str | None:
    """Draw the picture into `path`; why it was not drawn, or None when it was.

    Raises: OSError when the file cannot be written.
    """
    by_op: dict[str, list[Entry]] = {}
    for entry in entries(state):
        by_op.setdefault(entry.experiment.op, []).append(entry)
    if not by_op:
        return "there is no experiment yet"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed (pip install 'autokernel[plot]')"
    figure = Figure(figsize=(8, 3 * len(by_op)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (op, found) in zip(figure.subplots(len(by_op), squeeze=False)[:, 0], by_op.items(), strict=True):
        _draw_op(axes, state.histories[op], found)
    figure.savefig(path, dpi=120)
    return None


def _draw_op(axes: Any, history: KernelHistory, found: list[Entry]) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    baseline, marks = history.baseline, progress_marks(found)
    starter_us = history.starter_us
    levels = {f"PyTorch {baseline.fastest}": (baseline.latency_us, "tab:orange", "--")}
    if history.floor_us is not None:
        levels["roofline"] = (history.floor_us, "black", ":")
    _draw(axes, marks, starter_us)
    for label, (us, color, style) in levels.items():
        axes.axhline(us, color=color, linestyle=style, label=label)
    values = [starter_us, *(us for us, _, _ in levels.values()), *(mark.y for mark in marks if mark.y is not None)]
    if max(values) >= LOG_FROM * min(values):
        axes.set_yscale("log", subs=(1, 2, 5))
        axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=one_line(f"{history.op} on {history.device}"), xlabel="experiment on this op (0: starter)")
    axes.set(ylabel="latency, us", xlim=(0, len(marks) + 0.5))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _draw(axes: Any, marks: list[Mark], starter_us: float) -> None:
    for shape, style in _STYLES.items():
        chosen = [mark for mark in marks if mark.shape is shape and mark.y is not None]
        if chosen:
            axes.scatter([mark.x for mark in chosen], [mark.y for mark in chosen], zorder=3, **style)
    if untimed := [mark.x for mark in marks if mark.y is None]:
        # On the axis: there is no latency.
        place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.scatter(untimed, [0.0] * len(untimed), marker="^", color="tab:red", label="not timed", zorder=3, **place)
    steps = [(0.0, starter_us), *((mark.x, mark.y) for mark in marks if mark.shape is Shape.KEPT)]
    steps.append((len(marks) + 0.5, steps[-1][1]))
    axes.step([x for x, _ in steps], [y for _, y in steps], where="post", color="tab:green", label="incumbent")
