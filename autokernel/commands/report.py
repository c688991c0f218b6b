"""`autokernel report`: what a run of this directory brought, from its journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autokernel.errors import ConfigError


def report(
    run: Annotated[str, typer.Argument(help="Name of the run (default: the latest).")] = "latest",
    markdown: Annotated[bool, typer.Option("--md", help="Markdown on stdout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what got faster, against what, and how sure that is."""
    from autokernel import report as reporting
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    if markdown and as_json:
        raise ConfigError("--md and --json are both given", hint="give one of them")
    run_dir = find_run(Path.cwd(), run)
    found = reporting.from_state(run_dir.name, load_state(run_dir))
    if as_json:
        print(json.dumps(reporting.to_json(found)))
    elif markdown:
        print(reporting.render_markdown(found))
    else:
        print(reporting.render_text(found))
