"""The whole-model measurement in words: speedups against each of PyTorch's ways, and lines that tell it; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autokernel.markup import counted
from autokernel.records import Interval


def against_eager(integration: Mapping[str, Any] | None) -> Interval | None:
    """Speedup of the model with the kernels over eager; None when it was not measured."""
    raw = integration["speedup"] if integration else None
    return Interval(**raw) if raw else None


def against_compile(integration: Mapping[str, Any] | None) -> Interval | None:
    """Speedup of the model with the kernels over torch.compile; None when either was not measured.

    Where they were not measured against each other, but each against eager, the bounds are those of the worst and the
    best case.
    """
    if integration and (measured := integration.get("speedup_over_compile")):
        return Interval(**measured)
    ours = against_eager(integration)
    raw = integration.get("compile_speedup") if integration else None
    if ours is None or raw is None:
        return None
    compiled = Interval(**raw)
    return Interval(
        low=ours.low / compiled.high, estimate=ours.estimate / compiled.estimate, high=ours.high / compiled.low
    )


def standing(speedup: Interval) -> str:
    """`faster`, `SLOWER` or `no sure difference`."""
    return "faster" if speedup.low > 1 else "SLOWER" if speedup.high < 1 else "no sure difference"


def model_lines(integration: Mapping[str, Any] | None) -> list[str]:
    """The headline, then which kernels are in the model and which are not; fields as in `integrate.Integration`."""
    if integration is None:
        return ["not measured"]
    return [
        *_headlines(integration),
        *(_use(op, integration) for op in integration["used"]),
        *(f"{op}: left out, {reason}" for op, reason in integration["left_out"].items()),
        *([f"outputs: {integration['outputs']}"] if integration["outputs"] else []),
        *integration["notes"],
    ]


def _headlines(integration: Mapping[str, Any]) -> list[str]:
    lines = ["no speedup: the model runs as it was"]
    if integration["speedup"] is not None:
        speedup = Interval(**integration["speedup"])
        before, after = integration["eager_us"] / 1e3, integration["optimized_us"] / 1e3
        lines = [f"{speedup} against eager, {standing(speedup)}: {before:.2f} -> {after:.2f} ms per forward"]
    if integration["used"] and (way := _WAYS.get(integration.get("compiler", ""))):
        lines.append(way)
    if integration.get("compile_speedup") is not None:
        lines.append(_against_compile(integration))
    if integration.get("autotune_speedup") is not None:
        lines.append(_against_autotune(integration))
    if integration.get("compile_note"):
        lines.append(integration["compile_note"])
    return lines


_WAYS = {
    "graph": "kernels in the captured graph",
    "inductor": "kernels in a torch.compile'd model",
    "cudagraph": "kernels in the captured graph, replayed as a CUDA graph",
    "inductor-cudagraph": "kernels in a torch.compile'd model, replayed as a CUDA graph",
}


def _against_compile(integration: Mapping[str, Any]) -> str:
    compiled = f"{Interval(**integration['compile_speedup'])} against eager"
    mode = integration.get("compile_mode", "default")
    way = "torch.compile" if mode == "default" else f"torch.compile in mode {mode}"
    if integration.get("speedup_over_compile") is None:
        return f"{way}, measured on its own: {compiled}"
    over = Interval(**integration["speedup_over_compile"])
    return f"{over} against {way}, {standing(over)}; torch.compile alone: {compiled}"


def _against_autotune(integration: Mapping[str, Any]) -> str:
    over, alone = (Interval(**integration[name]) for name in ("speedup_over_autotune", "autotune_speedup"))
    return f"{over} against torch.compile in mode max-autotune, {standing(over)}; that alone: {alone} against eager"


def _use(op: str, integration: Mapping[str, Any]) -> str:
    calls, fallbacks = integration["calls"].get(op, 0), integration["fallbacks"].get(op, 0)
    original = f", {fallbacks} more run the original" if fallbacks else ""
    return f"{op}: used, {counted(calls, 'call')} per forward{original}"
