"""The kernels in the HTML report: a table of all, then an article for each, with its plots and the kept diffs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autokernel import kernelplots
from autokernel.experimentlog import Entry
from autokernel.history import KernelHistory
from autokernel.markup import Markup, counted, escaped, joined, tag
from autokernel.pagetable import COMMIT_CHARS, Column, number, sortable
from autokernel.plots import Shape, time_text
from autokernel.report import KernelReport, Report, tally
from autokernel.reproduce import judge_command
from autokernel.roofline import Ceilings

KEYS = {
    Shape.KEPT: ("\N{BLACK CIRCLE}", "kept"),
    Shape.REJECTED: ("\N{MULTIPLICATION X}", "rejected"),
    Shape.UNTIMED: ("\N{BLACK UP-POINTING TRIANGLE}", "failed"),
    Shape.SUSPICIOUS: ("\N{WHITE DIAMOND}", "suspicious"),
    Shape.REFERENCE: ("\N{BLACK SQUARE}", "starter"),
    Shape.BASELINE: ("\N{WHITE SQUARE}", "PyTorch"),
}
"""How the marks of the plots are explained."""


DIFF_HEAD = 2
"""Lines that name the two texts; they begin like added and removed ones."""


def kernels_table(report: Report) -> Markup:
    """Where every kernel stands, each with a link to its article."""
    columns: tuple[Column[KernelReport], ...] = (
        Column(title="Op", text=lambda k: tag("a", k.op, href=f"#kernel-{k.op}")),
        Column(title="Starter, us", text=lambda k: number(",.1f", k.starter_us), key=lambda k: k.starter_us),
        Column(title="Best, us", text=lambda k: number(",.1f", k.latency_us), key=lambda k: k.latency_us),
        Column(title="PyTorch, us", text=_baseline, key=lambda k: k.baselines_us[k.baseline]),
        Column(
            title="Against PyTorch", text=lambda k: f"{k.speedup:.2f}x", key=lambda k: k.speedup, class_=_speedup_class
        ),
        Column(title="Roofline", text=lambda k: number(".0%", k.roofline_fraction), key=lambda k: k.roofline_fraction),
        Column(title="Experiments", text=lambda k: str(k.experiments), key=lambda k: k.experiments),
        Column(title="Kept", text=lambda k: str(k.kept), key=lambda k: k.kept),
        Column(title="In the model", text=lambda k: _use(k.op, report.integration)),
    )
    caption = "Latency of all of one forward's calls; PyTorch's is that of its fastest way."
    return sortable(columns, report.kernels, caption=caption, label="Table of all kernels", id_=lambda _: None)


def _baseline(kernel: KernelReport) -> str:
    return f"{kernel.baseline} {kernel.baselines_us[kernel.baseline]:,.1f}"


def _speedup_class(kernel: KernelReport) -> str:
    return "good" if kernel.speedup >= 1 else "bad"


def _use(op: str, integration: Mapping[str, Any] | None) -> str:
    if integration is None:
        return "not measured"
    return "used" if op in integration["used"] else "left out" if op in integration["left_out"] else "not measured"


def kernel_article(
    report: Report, kernel: KernelReport, history: KernelHistory, found: Sequence[Entry], ceilings: Ceilings | None
) -> Markup:
    """One kernel; `found` are the experiments on it."""
    kept = [change(entry) for entry in found if entry.kept]
    none = "Nothing was kept: the starter is the best kernel." if found else "The starter is the best kernel."
    return tag(
        "article",
        tag("h3", kernel.op, " ", tag("span", f"({kernel.backend})", class_="quiet")),
        definitions(_facts(report, kernel, history)),
        _plots(kernel, history, found, ceilings),
        *([tag("h4", "Kept changes"), *kept] if kept else [tag("p", none, class_="quiet")]),
        tag("p", "Judge it again: ", tag("code", judge_command(report, kernel.op)), class_="quiet"),
        id=f"kernel-{kernel.op}",
    )


def definitions(facts: Mapping[str, str]) -> Markup:
    """Names with what they stand for, side by side where there is room."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items()))


def _facts(report: Report, kernel: KernelReport, history: KernelHistory) -> dict[str, str]:
    ways = ", ".join(f"{name} {time_text(us)}" for name, us in kernel.baselines_us.items())
    word = f"{kernel.speedup:.2f}x" if kernel.speedup >= 1 else f"SLOWER, {kernel.speedup:.2f}x"
    standing = tag("b", word, class_=_speedup_class(kernel))
    gain = f" ({kernel.starter_us / kernel.latency_us:.2f}x)" if kernel.kept else ""
    starter, best = time_text(kernel.starter_us), tag("b", time_text(kernel.latency_us))
    facts: dict[str, str] = {
        "Latency": joined(f"{starter} (starter) \N{RIGHTWARDS ARROW} ", best, gain),
        "Against PyTorch": joined(standing, f" its fastest way, {kernel.baseline} ({ways})"),
    }
    if kernel.roofline_fraction is not None:
        facts["Roofline"] = f"{kernel.roofline_fraction:.0%} of what the device's measured ceilings allow"
    facts["Calls timed"] = f"{history.cases}, on {history.device}"
    facts["Experiments"] = tally(kernel).partition(": ")[2] or "none"
    facts["In the model"] = _use_told(kernel.op, report.integration)
    facts["Moved on"] = kernel.stop_reason or "not yet; the run ended first"
    return facts


def _use_told(op: str, integration: Mapping[str, Any] | None) -> str:
    use = _use(op, integration)
    if integration is None or use == "not measured":
        return use
    if use == "left out":
        return f"left out: {integration['left_out'][op]}"
    fallbacks = integration["fallbacks"].get(op, 0)
    original = f", {fallbacks} more run the original" if fallbacks else ""
    return f"used, {counted(integration['calls'].get(op, 0), 'call')} per forward{original}"


def _plots(kernel: KernelReport, history: KernelHistory, found: Sequence[Entry], ceilings: Ceilings | None) -> Markup:
    plots = []
    if found:
        marks = dict.fromkeys(kernelplots.shape_of(entry) for entry in found)
        legend = [KEYS[shape] + (shape,) for shape in KEYS if shape in marks]
        line = ("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "incumbent", Shape.KEPT)
        plots.append(_figure("Progress", kernelplots.progress(kernel, history, found), [*legend, line]))
    of = "Share of the roofline" if history.floor_us is not None else "Speed, of the fastest"
    plots.append(_figure(of, kernelplots.shares(kernel, history), []))
    if (roof := kernelplots.roofline(kernel, history, ceilings)) is None:
        why = "No roofline plot: the op's work or the device's ceilings are not known."
        return joined(tag("div", *plots, class_="plots"), tag("p", why, class_="quiet"))
    legend = [("\N{BLACK CIRCLE}", "best", Shape.KEPT)]
    legend += [KEYS[shape] + (shape,) for shape in (Shape.REFERENCE, Shape.BASELINE)]
    plots.append(_figure("Roofline", roof, legend))
    return tag("div", *plots, class_="plots")


def _figure(title: str, plot: Markup, legend: Sequence[tuple[str, str, Shape]]) -> Markup:
    keys = [
        tag("span", tag("span", symbol, class_=f"key {shape}", aria_hidden="true"), f" {text}")
        for symbol, text, shape in legend
    ]
    return tag("figure", tag("figcaption", tag("b", title), *keys), plot)


def change(entry: Entry) -> Markup:
    """An experiment that can be opened: why it was decided so, and its diff."""
    experiment = entry.experiment
    diff = enumerate(entry.diff())
    lines = [tag("span", f"{line}\n", class_="at" if index < DIFF_HEAD else _diff_class(line)) for index, line in diff]
    commit = f"commit {experiment.commit[:COMMIT_CHARS]}; " if experiment.commit else ""
    return tag(
        "details",
        tag("summary", kernelplots.summary_of(entry)),
        tag("p", entry.reason),
        tag(
            "pre",
            *(lines or [escaped("the same text")]),
            class_="diff",
            tabindex="0",
            role="region",
            aria_label=f"Diff of experiment {experiment.number}",
        ),
        tag("p", commit, tag("code", f"autokernel show {experiment.number}"), class_="quiet"),
    )


def _diff_class(line: str) -> str | None:
    return {"+": "add", "-": "del", "@": "at"}.get(line[:1])
