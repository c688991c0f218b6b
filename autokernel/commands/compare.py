"""`autokernel compare`: two runs of this directory side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autokernel.commands import _flags as flags

if TYPE_CHECKING:
    from autokernel.comparison import Side


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or latest.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Name of another.")],
    as_json: flags.AsJson = False,
) -> None:
    """Compare two runs: what differs in their conditions, the whole model, and each op."""
    from autokernel import comparison

    sides = _side(first), _side(second)
    print(json.dumps(comparison.to_json(*sides)) if as_json else comparison.render(*sides))


def _side(name: str) -> Side:
    from autokernel.comparison import Side
    from autokernel.report import from_state
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    run_dir = find_run(Path.cwd(), name)
    state = load_state(run_dir)
    return Side(report=from_state(run_dir.name, state), state=state)
