"""The command line: one typer app, one border where exceptions become a message and an exit code, log handlers.

Each command is a function in `autokernel.commands`; those modules import torch and the rest only when they are called,
so that `--help` is instant. A new command is a module there and one line here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from autokernel import __version__
from autokernel.errors import AutokernelError

COMMANDS = (
    "run",
    "report",
    "verify",
    "log",
    "show",
    "compare",
    "status",
    "watch",
    "clean",
    "next",
    "submit",
    "finish",
    "mcp",
    "profile",
    "judge",
    "tune",
    "doctor",
)
"""Modules of `autokernel.commands`, each with a function of the same name; in the order of `--help`."""

GROUPS = ("keys",)
"""Modules there with an `app` of several commands."""

INTERRUPTED = 130  # 128 + SIGINT, what shells expect
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h

OPTIONAL_VALUES = {"--resume": "latest"}
"""Options whose value may be left out, and what they then mean."""

app = typer.Typer(
    name="autokernel",
    help="Makes a PyTorch model's kernels faster, one judged experiment after another.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autokernel {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show the log's INFO lines.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    configure_logging(logging.INFO if verbose else logging.WARNING)


for _name in COMMANDS:
    app.command(_name)(getattr(importlib.import_module(f"autokernel.commands.{_name}"), _name))
for _name in GROUPS:
    app.add_typer(importlib.import_module(f"autokernel.commands.{_name}").app, name=_name)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at that moment: the live view puts its own in place while it is up."""

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def configure_logging(level: int) -> None:
    """One handler on stderr for the package's own log."""
    logger = logging.getLogger("autokernel")
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, or the code of the error (see `autokernel.errors`), 2 for misuse."""
    args = fill_optional_values(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(lambda: app(args, prog_name="autokernel")))


def guarded(command: Callable[[], None]) -> int:
    """Run `command`; what it raises becomes a message on stderr and the exit code. SystemExit passes through."""
    try:
        command()
    except AutokernelError as error:
        _complain(f"error: {error}")
        if error.hint:
            _complain(f"hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception as error:  # the last border: the user gets a line, the traceback goes to a file
        _complain(f"internal error: {type(error).__name__}: {error}")
        _complain(f"hint: please report it with the traceback in {_write_traceback(error)}")
        return INTERNAL_ERROR
    return 0


def fill_optional_values(args: Sequence[str]) -> list[str]:
    """The arguments with the value of an option like `--resume` filled in where it was left out."""
    filled = []
    for index, arg in enumerate(args):
        following = args[index + 1] if index + 1 < len(args) else "-"
        bare = arg in OPTIONAL_VALUES and following.startswith("-")
        filled.append(f"{arg}={OPTIONAL_VALUES[arg]}" if bare else arg)
    return filled


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed stderr must not hide the exit code
        print(line, file=sys.stderr, flush=True)  # noqa: T201  the border speaks for all commands


def _write_traceback(error: BaseException) -> Path:
    """Write the traceback into the project's run folder if there is one, else into the temporary folder."""
    runs = Path(".autokernel")
    folder = runs if runs.is_dir() and os.access(runs, os.W_OK) else Path(tempfile.gettempdir())
    path = folder / f"autokernel-error-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    path.write_text("".join(traceback.format_exception(error)))
    return path.resolve()
