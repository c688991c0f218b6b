"""`autokernel show`: one experiment in full, also a rejected one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autokernel.commands import _flags as flags


def show(
    number: Annotated[int, typer.Argument(metavar="N", help="Number of the experiment.")],
    run: Annotated[str, typer.Option(help="Name of the run (default: the latest).")] = "latest",
    as_json: flags.AsJson = False,
) -> None:
    """Show an experiment: verdict, stages, measurements, what the agent said, and its diff."""
    from autokernel.experimentlog import find_entry, render_entry
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    run_dir = find_run(Path.cwd(), run)
    entry = find_entry(load_state(run_dir), number)
    if as_json:
        outcome = entry.experiment.outcome.to_json()
        print(json.dumps({"run": run_dir.name, **entry.to_json(), "outcome": outcome, "diff": entry.diff()}))
    else:
        print(render_entry(entry, run_dir))
