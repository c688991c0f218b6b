"""`autokernel report`: what a run of this directory brought, from its journal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autokernel.errors import ConfigError

if TYPE_CHECKING:
    from autokernel.report import Report
    from autokernel.state import RunState


def report(
    run: Annotated[str, typer.Argument(help="Name of the run (default: the latest).")] = "latest",
    markdown: Annotated[bool, typer.Option("--md", help="Markdown on stdout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write one self-contained HTML file, and progress.png.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where --html writes (default: report.html of the run).")
    ] = None,
) -> None:
    """Say what got faster, against what, and how sure that is."""
    from autokernel import report as reporting
    from autokernel.rundir import find_run
    from autokernel.state import load_state

    given = [flag for flag, is_given in (("--md", markdown), ("--json", as_json), ("--html", html)) if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given", hint="give one of them")
    if out is not None and not html:
        raise ConfigError(f"--out {out} is given without --html", hint="redirect the output of the other forms")
    run_dir = find_run(Path.cwd(), run)
    state = load_state(run_dir)
    found = reporting.from_state(run_dir.name, state)
    if html:
        _write_html(found, state, out or run_dir.page_path)
    elif as_json:
        print(json.dumps(reporting.to_json(found)))
    elif markdown:
        print(reporting.render_markdown(found))
    else:
        print(reporting.render_text(found))


def _write_html(found: Report, state: RunState, path: Path) -> None:
    """Write the page, with progress.png beside it where matplotlib can draw it; name what was written."""
    from autokernel.page import render_page
    from autokernel.picture import PICTURE, draw_progress

    picture = path.with_name(PICTURE)
    try:
        path.write_text(render_page(found, state), encoding="utf-8")
        missing = draw_progress(state, picture)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="name another file with --out")
    print(path)
    if missing:
        print(f"{PICTURE} was not drawn: {missing}", file=sys.stderr)
    else:
        print(picture)
