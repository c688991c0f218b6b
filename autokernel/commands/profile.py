"""`autokernel profile`: what could be gained, and where the time of one forward goes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from autokernel.errors import AutokernelError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from autokernel.model import LoadedModel
    from autokernel.plan import Plan
    from autokernel.profiler import ModelProfile, OpTime
    from autokernel.roofline import Ceilings

SHAPES_WIDTH = 60
PIPED_WIDTH = 140  # columns when stdout is no terminal


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="model.py, model.py:factory, package.module:Class or hf:<architecture or path>"
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    device: Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu, cuda or cuda:<number>.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Convert the model to fp32, bf16 or fp16 first.")] = None,
    rows: Annotated[int, typer.Option(help="Ops to list, the longest first.")] = 20,
) -> None:
    """Show which ops of MODEL are worth optimizing, and each op's own time in one forward."""
    from autokernel.backends import present_device
    from autokernel.model import load_model
    from autokernel.profiler import profile_model

    if rows < 1:
        raise ConfigError(f"--rows is {rows}", hint="give a positive number")
    device = present_device() if device == "auto" else device
    loaded = load_model(model, device=device, dtype=dtype)
    profiled = profile_model(loaded)
    ceilings, plan, obstacle = _plan(loaded, profiled, "cpp" if device == "cpu" else "triton")
    if as_json:
        document = {
            "profile": profiled.to_json(),
            "ceilings": ceilings.to_json(),
            "plan": {**plan.to_json(), "files": {}} if plan else None,  # a run keeps them
            "obstacle": obstacle,
            "notes": list(loaded.notes),
        }
        print(json.dumps(document))
        return
    _show(loaded, profiled, plan, obstacle, rows)


def _plan(loaded: LoadedModel, profiled: ModelProfile, backend: str) -> tuple[Ceilings, Plan | None, str | None]:
    """The ceilings, the ranked plan, or why there is none: a profile is of use without a plan."""
    from autokernel.ceilings import measure_ceilings
    from autokernel.plan import make_plan

    ceilings = measure_ceilings(profiled.device)
    try:
        return ceilings, make_plan(loaded, profile=profiled, ceilings=ceilings, backend=backend), None
    except AutokernelError as error:
        return ceilings, None, str(error)


def _show(loaded: LoadedModel, profiled: ModelProfile, plan: Plan | None, obstacle: str | None, rows: int) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    console.print(
        f"{profiled.model} on {profiled.device}: {profiled.wall_us / 1e3:.2f} ms per forward "
        f"(median of {profiled.wall_samples}, interquartile range {profiled.wall_iqr_us / 1e3:.2f} ms)",
        markup=False,
    )
    for note in (*loaded.notes, *profiled.notes, *(plan.notes if plan else ())):
        console.print(f"note: {note}", markup=False)
    if plan is not None:
        _show_plan(console, plan)
    else:
        console.print(f"\nnothing to optimize was found: {obstacle}", markup=False)
    _show_ops(console, profiled, rows)


def _show_plan(console: Console, plan: Plan) -> None:
    from rich.table import Table

    table = Table(title="Worth optimizing, greatest potential first", title_justify="left", box=None, pad_edge=False)
    table.add_column("op")
    for heading in ("calls", "time us", "share", "headroom", "model speedup at most"):
        table.add_column(heading, justify="right")
    for op in plan.ops:
        headroom = "unknown" if op.headroom is None else f"{op.headroom:.0%}"
        calls = sum(timed.calls for timed in op.cases)
        table.add_row(op.op, str(calls), f"{op.time_us:.1f}", f"{op.share:.1%}", headroom, f"{op.potential:.2f}x")
    console.print()
    console.print(table)


def _show_ops(console: Console, profiled: ModelProfile, rows: int) -> None:
    from rich.table import Table

    table = Table(title="Own time by op and input shapes", title_justify="left", box=None, pad_edge=False)
    table.add_column("op", no_wrap=True)
    table.add_column("shapes", max_width=SHAPES_WIDTH, overflow="ellipsis", no_wrap=True)
    for heading in ("calls", "time us", "share", "cumulative"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown, rest = profiled.ops[:rows], profiled.ops[rows:]
    lines = [(op.op, _shapes(op), f"{op.calls:g}", op.time_us) for op in shown]
    if rest:
        lines.append(
            (f"({len(rest)} more ops)", "", f"{sum(op.calls for op in rest):g}", sum(op.time_us for op in rest))
        )
    lines.append(("(unattributed: Python, launches, waiting)", "", "", profiled.unattributed_us))
    total_us = 0.0
    for name, shapes, calls, time_us in lines:
        total_us += time_us
        share, cumulative = time_us / profiled.wall_us, total_us / profiled.wall_us
        table.add_row(name, shapes, calls, f"{time_us:.1f}", f"{share:.1%}", f"{cumulative:.1%}")
    console.print()
    console.print(table)
    console.print(
        f"own times {profiled.attributed_us / 1e3:.2f} ms of {profiled.wall_us / 1e3:.2f} ms; "
        f"the profiler itself saw {profiled.profiled_us / 1e3:.2f} ms",
        markup=False,
    )


def _shapes(op: OpTime) -> str:
    shapes = list(op.shapes)
    while shapes and shapes[-1] == ():
        shapes.pop()
    return ", ".join("x".join(map(str, shape)) if shape else "-" for shape in shapes)
