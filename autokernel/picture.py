"""progress.png: latency over experiments for every op of a run, drawn by matplotlib where it is installed; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autokernel.experimentlog import Entry, entries
from autokernel.kernelplots import progress_marks
from autokernel.markup import one_line
from autokernel.plots import Mark, Shape
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
        history = state.histories[op]
        _draw(axes, progress_marks(found), found[0].experiment.incumbent_us or history.incumbent_us)
        baseline = history.baseline
        axes.axhline(baseline.latency_us, color="tab:orange", linestyle="--", label=f"PyTorch {baseline.fastest}")
        axes.set(title=one_line(f"{op} on {history.device}"), xlabel="experiment on this op", ylabel="latency, us")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return None


def _draw(axes: Any, marks: list[Mark], starter_us: float) -> None:
    for shape, style in _STYLES.items():
        chosen = [mark for mark in marks if mark.shape is shape and mark.y is not None]
        if chosen:
            axes.scatter([mark.x for mark in chosen], [mark.y for mark in chosen], **style)
    steps = [(0.0, starter_us), *((mark.x, mark.y) for mark in marks if mark.shape is Shape.KEPT)]
    steps.append((float(len(marks)), steps[-1][1]))
    axes.step([x for x, _ in steps], [y for _, y in steps], where="post", color="tab:green", label="incumbent")
