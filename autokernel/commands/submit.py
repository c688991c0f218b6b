"""`autokernel submit`: judge a kernel.py against the incumbent of the open driven run, and keep or revert it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autokernel.commands import _flags as flags


def submit(
    kernel: Annotated[
        Path | None, typer.Argument(metavar="[KERNEL.py]", help="The file (default: the working copy).")
    ] = None,
    message: Annotated[str, typer.Option("-m", "--message", help="The hypothesis: what changes, and why.")] = "",
    op: Annotated[str | None, typer.Option(help="The op it is for (default: the file's KERNEL_TYPE).")] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who proposes it, for results.tsv (default: outside).")
    ] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Judge KERNEL.py, keep it if it is surely faster, else revert it. Exits 0 when it was judged, kept or not."""
    settings, run = flags.driven({})
    from autokernel import handout
    from autokernel.driven import open_driven, read_kernel

    with open_driven(settings, run) as driven:
        text = read_kernel(kernel or driven.draft(op))
        answer = driven.submit(text, message, op=op, agent=agent)
    print(json.dumps(handout.answer_json(answer)) if as_json else handout.answer_text(answer))
