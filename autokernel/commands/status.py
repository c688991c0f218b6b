"""`autokernel status`: what a run is doing now, from another terminal as well."""

from __future__ import annotations

from pathlib import Path

from autokernel.commands import _flags as flags


def status(run: flags.RunName = "latest") -> None:
    """Say in a few lines what a run is doing now, and how far it has come."""
    from autokernel.nowdoing import status_of

    print("\n".join(status_of(Path.cwd(), run).lines))
