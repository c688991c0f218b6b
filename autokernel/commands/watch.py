"""`autokernel watch`: `status` again and again, until the run ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from autokernel.commands import _flags as flags
from autokernel.errors import ConfigError

CLEAR = "\x1b[H\x1b[J"  # cursor to the corner, and nothing below it
LEAST_S = 0.1


def watch(
    run: flags.RunName = "latest",
    every: Annotated[float, typer.Option(metavar="SECONDS", help="How often to look.")] = 2.0,
) -> None:
    """Show a run's status until it ends; plain blocks of lines, one for each change, when the output is no terminal."""
    from autokernel.nowdoing import status_of

    if not LEAST_S <= every < float("inf"):
        raise ConfigError(f"--every is {every}", hint=f"give {LEAST_S} seconds or more")
    is_terminal = sys.stdout.isatty()
    shown: str | None = None
    while True:
        status = status_of(Path.cwd(), run)
        text = "\n".join(status.lines)
        # Not on a terminal, a block is worth printing when something has happened, not when a clock went on.
        change = text if is_terminal else "\n".join(line for line in status.lines if line.startswith(("run ", "last:")))
        if change != shown:
            print(CLEAR + text if is_terminal else text + "\n", flush=True)
            shown = change
        if status.is_over:
            return
        time.sleep(every)
