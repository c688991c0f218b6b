"""The commands that reproduce what a report says, as lines for a shell with comments; no torch.

They are to be run where the run was started. Folders outside of it are named by their last part alone: a report may be
shown to others. A server's address is left out for the same reason.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from autokernel.records import Case, TimedCase

if TYPE_CHECKING:
    from autokernel.report import KernelReport, Report

_FLAGS = {
    "ops": "--ops",
    "agent": "--agent",
    "backend": "--backend",
    "dtype": "--dtype",
    "patience": "--patience",
    "starters": "--starters",
    "sandbox": "--sandbox",
    "tune_s": "--tune",
    "llm_model": "--model",
    "temperature": "--temperature",
    "effort": "--effort",
}
"""Field of the settings -> flag of `autokernel run`."""

_DEFAULTS: Mapping[str, Any] = {"agent": "auto", "backend": "auto", "patience": 5, "sandbox": "auto", "tune_s": 45.0}


def commands(report: Report) -> list[str]:
    """All of them: the run, the whole model, each kernel's judgement and its search of numbers."""
    experiments = sum(kernel.experiments for kernel in report.kernels)
    lines = ["# the whole run again", run_command(report)]
    if report.integration:
        lines += [
            "# the speedup of the whole model, measured again",
            f"autokernel run --resume {report.run} --experiments {max(1, experiments)}",
            "# the model's outputs with the kernels, compared again",
            f"autokernel verify {report.run}",
        ]
    for kernel in report.kernels:
        lines += [
            f"# {kernel.op}: the verdict, and its time beside the starter's on the op's usual calls",
            judge_command(report, kernel.op),
            _tune_comment(kernel),
            tune_command(report, kernel),
        ]
    return [*lines, "# what was kept", f"git -C .autokernel/{report.run}/worktree log --oneline {report.branch}"]


def _tune_comment(kernel: KernelReport) -> str:
    """The first configuration that is timed is the kernel's own."""
    calls = "calls like the model's" if kernel.shapes else "the op's usual calls"
    return f"# {kernel.op}: the latency on {calls}, then that with other numbers"


def run_command(report: Report) -> str:
    """A new run with the same settings. An agent's ideas and the clock may differ."""
    settings = report.settings
    words = ["autokernel", "run", report.model, "--minutes", f"{settings['budget_s'] / 60:.4g}"]
    if settings["max_experiments"] is not None:
        words += ["--experiments", str(settings["max_experiments"])]
    for field, flag in _FLAGS.items():
        value = settings.get(field)
        if value is not None and value != _DEFAULTS.get(field):
            words += [flag, _shown(value, settings["workdir"])]
    if not settings["compile_baseline"]:
        words.append("--no-compile-baseline")
    return shlex.join([*words, "--seed", str(settings["seed"])])


def _shown(value: object, workdir: str) -> str:
    """A flag's value; `replay:/a/folder` and `/a/folder` without what lies above the working directory."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    kind, colon, rest = text.rpartition(":")
    path = PurePath(rest)
    if not path.is_absolute():
        return text
    below = path.is_relative_to(workdir)
    return f"{kind}{colon}{path.relative_to(workdir) if below else path.name}"


def judge_command(report: Report, op: str) -> str:
    """Judges and times the op's best kernel again."""
    return f"autokernel judge {_best(report, op)} --op {op}"


def tune_command(report: Report, kernel: KernelReport) -> str:
    """Times the best kernel, then searches its numbers; for contiguous calls of the same sizes where there are such."""
    shapes = "".join(f" --shape {shape}" for shape in kernel.shapes)
    dtype = f" --dtype {kernel.dtype}" if kernel.dtype else ""
    return f"autokernel tune {_best(report, kernel.op)} --op {kernel.op}{dtype}{shapes}"


def _best(report: Report, op: str) -> str:
    return f".autokernel/{report.run}/optimized/{op}/kernel.py"


def shape_argument(item: TimedCase) -> str | None:
    """A call as `autokernel tune --shape` takes it, `4x2048x2048*17`; None where it has no such form."""
    sizes = _sizes(item.case)
    return None if sizes is None else f"{'x'.join(map(str, sizes))}*{item.calls}"


def _sizes(case: Case) -> tuple[int, ...] | None:
    """Inverse of `autokernel.sizes.sized_case` for what it can make."""
    shapes = {name: tuple(meta.shape) for name, meta in case.tensors.items()}
    match case.op:
        case "matmul":
            a, b = shapes.get("a", ()), shapes.get("b", ())
            return (math.prod(a[:-1]), b[1], a[-1]) if len(a) >= 2 and len(b) == 2 else None
        case "fused_mlp":
            x, gate = shapes.get("x", ()), shapes.get("w_gate", ())
            return (math.prod(x[:-1]), x[-1], gate[0]) if x and len(gate) == 2 else None
        case "cross_entropy":
            return _of_rank(shapes.get("logits"), 2)
        case "flash_attention":
            same = len({shapes.get(name) for name in "qkv"}) == 1
            return _of_rank(shapes.get("q"), 4) if same else None
        case "masked_attention":
            return None  # its mask may be of any shape
        case "rotary_embedding":
            return _of_rank(shapes.get("x"), 4)
    return shapes.get("x") or None


def _of_rank(shape: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    return shape if shape is not None and len(shape) == rank else None
