"""`autokernel log`: one line per experiment of a run, kept and rejected alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autokernel.commands import _flags as flags


def log(
    run: flags.RunName = "latest",
    op: Annotated[str | None, typer.Option(help="Only the experiments on this op.")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """List a run's experiments: verdict, decision, latency, speedup, hypothesis."""
    from autokernel.experimentlog import entries, render_log
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    run_dir = find_run(Path.cwd(), run)
    found = entries(load_state(run_dir), op)
    if as_json:
        print(json.dumps({"run": run_dir.name, "experiments": [entry.to_json() for entry in found]}))
    else:
        print(render_log(found))
