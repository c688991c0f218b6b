"""Two runs side by side, for `autokernel compare`: each op's kernels and baseline, the whole model, and what differs.

Latencies of two runs were not measured alternately: only what each run measured against its own baseline is exact, and
where machine, model or versions differ even that answers another question. So the differences come first. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autokernel.modelnumbers import against_compile, against_eager
from autokernel.records import Interval
from autokernel.report import KernelReport, Report
from autokernel.state import RunState

OF_THE_MACHINE = ("workdir", "budget_s", "max_experiments", "base_url", "max_cost_usd", "max_tokens", "model")
"""Settings whose difference says nothing about the numbers, or that is told in other words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the runs."""

    report: Report
    state: RunState

    def conditions(self) -> dict[str, str]:
        """What the numbers depend on, by name."""
        profile = (self.state.plan or {}).get("profile", {})
        given = {name: value for name, value in self.report.settings.items() if name not in OF_THE_MACHINE}
        cases = {f"cases of {op}": history.cases for op, history in self.state.histories.items()}
        return {
            "model": self.report.model,
            "device": self.report.device or profile.get("device", "unknown"),
            "sandbox": self.report.sandbox or "unknown",
            **self.report.environment,
            **{name: _text(value) for name, value in given.items()},
            **cases,
        }


def _text(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def differences(first: Side, second: Side) -> list[tuple[str, str, str]]:
    """Name and both values of every condition that both runs have and that is not the same."""
    mine, theirs = first.conditions(), second.conditions()
    return [(name, mine[name], theirs[name]) for name in mine if name in theirs and mine[name] != theirs[name]]


def to_json(first: Side, second: Side) -> dict[str, Any]:
    """The comparison as a JSON object; an op that a run has not begun is null there."""
    kernels = {op: [_kernel_json(side, op) for side in (first, second)] for op in _ops(first, second)}
    return {
        "runs": [side.report.run for side in (first, second)],
        "differences": [{"name": name, "values": [mine, theirs]} for name, mine, theirs in differences(first, second)],
        "whole_model": [_model_json(side) for side in (first, second)],
        "kernels": kernels,
    }


def _kernel_json(side: Side, op: str) -> dict[str, Any] | None:
    kernel = _kernel(side, op)
    return None if kernel is None else asdict(kernel)


def _model_json(side: Side) -> Mapping[str, Any]:
    numbers = {"eager": against_eager(side.report.integration), "compile": against_compile(side.report.integration)}
    return {name: asdict(value) if value else None for name, value in numbers.items()}


def render(first: Side, second: Side) -> str:
    """The comparison for a terminal."""
    told = [f"{name}: {mine} | {theirs}" for name, mine, theirs in differences(first, second)]
    blocks = [
        _block(f"{first.report.run} | {second.report.run}", told or ["same device, model, settings and versions"]),
        _block("Whole model", _model_lines(first, second)),
    ]
    blocks += [_block(op, _op_lines(first, second, op)) for op in _ops(first, second)]
    return "\n\n".join(blocks)


def _block(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _ops(first: Side, second: Side) -> list[str]:
    return list(dict.fromkeys(kernel.op for side in (first, second) for kernel in side.report.kernels))


def _kernel(side: Side, op: str) -> KernelReport | None:
    return next((kernel for kernel in side.report.kernels if kernel.op == op), None)


def _model_lines(first: Side, second: Side) -> list[str]:
    both = [side.report.integration for side in (first, second)]
    eager, compiled = [against_eager(each) for each in both], [against_compile(each) for each in both]
    return [
        f"against eager: {_interval(eager[0])} | {_interval(eager[1])}",
        f"against torch.compile: {_interval(compiled[0])} | {_interval(compiled[1])}",
    ]


def _interval(value: Interval | None) -> str:
    return "not measured" if value is None else str(value)


def _op_lines(first: Side, second: Side, op: str) -> list[str]:
    mine, theirs = _kernel(first, op), _kernel(second, op)
    told = [_kernel_text(kernel) for kernel in (mine, theirs)]
    return [f"{name}: {a} | {b}" for name, a, b in zip(_ROWS, *told, strict=True)]


_ROWS = ("start", "best", "PyTorch's fastest", "speedup", "roofline", "experiments")


def _kernel_text(kernel: KernelReport | None) -> tuple[str, ...]:
    if kernel is None:
        return ("not begun",) + ("-",) * (len(_ROWS) - 1)
    fraction = kernel.roofline_fraction
    return (
        f"{kernel.starter_us:.1f} us",
        f"{kernel.latency_us:.1f} us",
        f"{kernel.baseline} {kernel.baselines_us[kernel.baseline]:.1f} us",
        f"{kernel.speedup:.2f}x",
        "-" if fraction is None else f"{fraction:.0%}",
        f"{kernel.experiments}, {kernel.kept} kept",
    )
