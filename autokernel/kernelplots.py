"""The plots of one kernel, from its history: progress over experiments, shares of the roofline, the roofline itself."""

from __future__ import annotations

from collections.abc import Sequence

from autokernel.experimentlog import Entry
from autokernel.history import KernelHistory
from autokernel.markup import Markup
from autokernel.plots import Bar, Level, Mark, Roof, Shape, bar_plot, progress_plot, roofline_plot, time_text
from autokernel.report import KernelReport
from autokernel.roofline import Ceilings, arithmetic_intensity


def shape_of(entry: Entry) -> Shape:
    """How an experiment is marked in plots."""
    if entry.suspicious:
        return Shape.SUSPICIOUS
    if entry.experiment.latency_us is None:
        return Shape.UNTIMED
    return Shape.KEPT if entry.kept else Shape.REJECTED


def progress_marks(found: Sequence[Entry]) -> list[Mark]:
    """A mark for every experiment on one op, counted from 1 within the op."""
    return [
        Mark(x=index, y=entry.experiment.latency_us, shape=shape_of(entry), label=summary_of(entry))
        for index, entry in enumerate(found, start=1)
    ]


def summary_of(entry: Entry) -> str:
    """An experiment in one line: `#3 PASS REVERT, 380.3 us, 0.967x [0.965, 0.970]: hypothesis`."""
    experiment = entry.experiment
    latency = "" if experiment.latency_us is None else f", {experiment.latency_us:.1f} us"
    speedup = "" if entry.speedup is None else f", {entry.speedup}"
    verdict = f"{experiment.outcome.verdict} {experiment.decision}"
    return f"#{experiment.number} {verdict}{latency}{speedup}: {entry.hypothesis}"


def progress(kernel: KernelReport, history: KernelHistory, found: Sequence[Entry]) -> Markup:
    """Latency over the op's experiments, with PyTorch's fastest way and the roofline as levels."""
    baseline_us = kernel.baselines_us[kernel.baseline]
    levels = [Level(y=baseline_us, label=f"PyTorch {kernel.baseline} {time_text(baseline_us)}", class_="baseline")]
    if history.floor_us is not None:
        levels.append(Level(y=history.floor_us, label=f"roofline {time_text(history.floor_us)}", class_="floor"))
    title = f"{kernel.op}: latency over experiments, {time_text(kernel.starter_us)} to {time_text(kernel.latency_us)}"
    return progress_plot(progress_marks(found), kernel.starter_us, levels, title)


def shares(kernel: KernelReport, history: KernelHistory) -> Markup:
    """How much of the roofline each way reaches; where that is unknown, of the fastest way's speed."""
    ways = {f"PyTorch {name}": us for name, us in kernel.baselines_us.items()}
    ways |= {"starter": kernel.starter_us, "best kernel": kernel.latency_us}
    full_us, full = history.floor_us, "the roofline"
    if full_us is None:
        full_us, full = min(ways.values()), "the fastest"
    bars = [
        Bar(
            label=name,
            share=full_us / us,
            text=f"{time_text(us)}, {min(1.0, full_us / us):.0%}",
            class_="best" if name == "best kernel" else "other",
        )
        for name, us in sorted(ways.items(), key=lambda item: -item[1])
    ]
    return bar_plot(bars, f"{kernel.op}: share of {full}, and latency")


def roofline(kernel: KernelReport, history: KernelHistory, ceilings: Ceilings | None) -> Markup | None:
    """Where starter, best kernel and PyTorch's fastest stand under the roof; None when work or roof is unknown."""
    dtype = history.planned.cases[0].case.dtype
    tflops = ceilings.gemm_tflops.get(dtype) if ceilings else None
    if ceilings is None or tflops is None or not history.flops or not history.nbytes:
        return None
    ways = (
        ("starter", kernel.starter_us, Shape.REFERENCE),
        (f"PyTorch {kernel.baseline}", kernel.baselines_us[kernel.baseline], Shape.BASELINE),
        ("best kernel", kernel.latency_us, Shape.KEPT),
    )
    intensity = arithmetic_intensity(history.flops, history.nbytes)
    rates = [(name, us, history.flops / us / 1e6, shape) for name, us, shape in ways]
    marks = [
        Mark(x=intensity, y=rate, shape=shape, label=f"{name}: {rate:.3g} TFLOP/s ({time_text(us)})")
        for name, us, rate, shape in rates
    ]
    # A set that fits into a cache moves faster than the memory's rate: the roof is that of one call's bytes.
    calls = sum(item.calls for item in history.planned.cases)
    roof = Roof(gbps=ceilings.bandwidth_gbps(history.nbytes / calls), tflops=tflops, dtype=dtype)
    bound = "memory" if intensity * roof.gbps < roof.tflops * 1e3 else "compute"
    return roofline_plot(roof, marks, f"{kernel.op}: roofline, {intensity:.3g} FLOP/byte, {bound}-bound")
