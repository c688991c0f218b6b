"""A child's own folder: what it prints, builds and caches stays there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from autokernel.judge import places

LAUNCHER = "__triton_launcher*"
"""What Triton, until 3.7, has a C compiler build for each signature; named by what it was built from."""


def settle(scratch: Path) -> None:
    """Move into the candidate's own folder: what it prints, builds and caches stays there."""
    os.chdir(scratch)
    with contextlib.suppress(OSError):
        os.unlink("output.log")  # noqa: PTH108
    try:
        log = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:  # an earlier child of this text has put something else there
        log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    keep_files_in(scratch)


def keep_files_in(folder: Path) -> None:
    """Have everything that caches or builds do so below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        HOME=str(folder),
        TMPDIR=str(folder),
        AUTOKERNEL_BUILD_DIR=str(folder / places.LIBRARIES),
        TRITON_CACHE_DIR=str(folder / places.TRITON),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    tempfile.tempdir = None  # it is remembered from the first use on


def inherit_launchers(before: Path, folder: Path) -> None:
    """Copy what `before` has of Triton's launchers to `folder`: half a second each, and neighbours need the same."""
    for found in (before / places.TRITON).glob(f"*/{LAUNCHER}"):
        target = folder / places.TRITON / found.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, target / found.name)  # its bytes alone: a child may not set attributes
