"""`autokernel verify`: does the run's model still compute the same with the run's kernels in it?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autokernel.commands import _flags as flags


def verify(
    run: Annotated[str, typer.Argument(help="Name of the run (default: the latest).")] = "latest",
    as_json: flags.AsJson = False,
) -> None:
    """Compare the model's output with and without the run's kernels; exit code 1 when it is not the same."""
    from autokernel import wholemodel
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    run_dir = find_run(Path.cwd(), run)
    settings = load_state(run_dir).settings
    found = {"run": run_dir.name, **wholemodel.verify(settings, run_dir)}
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if not found["agrees"]:
        raise typer.Exit(1)


def _show(found: Mapping[str, Any]) -> None:
    print(f"{found['run']}: {found['model']}, {found['dtype']}, compiler {found['compiler']}")
    for op, calls in found["calls"].items():
        fallbacks = found["fallbacks"][op]
        print(
            f"  {op:<18} {calls:4d} calls"
            + (f", {fallbacks} of the original (a call that was not verified)" * (fallbacks > 0))
        )
    worst = found["worst"]
    if worst and worst["error"] is not None:
        print(
            f"  worst output       {worst['name']} {tuple(worst['shape'])}: error {worst['error']:.3g}, "
            f"PyTorch's own {worst['eager_error']:.3g}, accepted {worst['accepted']:.3g}"
        )
    for note in found["notes"]:
        print(f"  note: {note}")
    if found["agrees"]:
        print(f"AGREES: {found['tensors']} output tensors, compared with a run in {found['truth']}")
    if found["problem"]:
        print(f"DIFFERS from a run in {found['truth']}: {found['problem']}")
        for op, problem in found["alone"].items():
            print(f"  {op} alone: {problem}")
        if not found["alone"]:
            print("  no kernel alone: only together")
    if found["idle"]:
        print(f"IDLE: {found['idle']}")
