"""`autokernel clean`: remove runs that brought nothing, after they were shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autokernel.errors import AutokernelError

if TYPE_CHECKING:
    from autokernel.cleaning import Found


def clean(
    run: Annotated[
        list[str] | None, typer.Option(help="Only this run, also when it holds something kept; may be repeated.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """List the runs that hold nothing kept, and remove them: directory, worktree, branch, rejected refs."""
    from autokernel.cleaning import survey

    named = run or []
    found = survey(Path.cwd(), named)
    for each in found:
        fate = "can go" if each.stays is None else f"stays: {each.stays}"
        print(f"{each.run_dir.name}: {each.holds}; {fate}")
    going = [each for each in found if each.stays is None]
    if not going:
        print("nothing to remove")
    elif yes or _asked(len(going)):
        _remove([each.run_dir.name for each in going], named)
    else:
        print("nothing was removed; --yes removes what can go")


def _asked(count: int) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return typer.confirm(f"Remove {'this run' if count == 1 else f'these {count} runs'} for good?")


def _remove(names: list[str], named: list[str]) -> None:
    """Remove the runs that were shown, as far as they can still go now that nobody else can begin to work."""
    from autokernel.cleaning import removal_error, remove, survey
    from autokernel.rundir import lock

    workdir = Path.cwd()
    failures: list[str] = []
    last: AutokernelError | None = None
    with lock(workdir, "(clean)"):
        still: list[Found] = [each for each in survey(workdir, named) if each.run_dir.name in names]
        for each in still:
            if each.stays is not None:
                print(f"{each.run_dir.name} stays: {each.stays}")
                continue
            try:
                remove(workdir, each.run_dir)
                print(f"{each.run_dir.name} removed")
            except AutokernelError as error:
                failures.append(removal_error(each, error))
                last = error
    for line in failures:
        print(line, file=sys.stderr)
    if last is not None:
        raise typer.Exit(last.exit_code)
