"""`autokernel doctor`: a table of what is here and what is missing, with the command that mends it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autokernel.doctor import Check

CANNOT_RUN = 3


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Check compiler, git, torch, GPU, keys and sandbox. Exits 0 if the main job can run, else 3."""
    from autokernel.doctor import can_run, examine

    checks = examine(Path.cwd(), os.environ)
    able = can_run(checks)
    if as_json:
        print(json.dumps({"can_run": able, "checks": [asdict(check) for check in checks]}))
    else:
        _show(checks, able)
    raise typer.Exit(0 if able else CANNOT_RUN)


def _show(checks: list[Check], able: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "warn": "yellow", "missing": "dim"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for width in (max(len(check.name) for check in checks), max(len(status) for status in colors), None):
        table.add_column(min_width=width, overflow="fold")
    for check in checks:
        broken = check.needed and check.status == "missing"
        style = "bold red" if broken else colors[check.status]
        table.add_row(check.name, Text(check.status, style=style), Text(check.detail))
        if check.fix:
            table.add_row("", "", Text(f"-> {check.fix}", style="bold" if broken else "cyan"))
    Console().print(table)
    verdict = "the main job can run here" if able else "the main job cannot run: mend what is missing first"
    print(f"\n{verdict}")
