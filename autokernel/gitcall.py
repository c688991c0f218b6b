"""Calls of git that use nothing of the user's: no identity, hook, signing key or variable of hers. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autokernel.errors import RepositoryError

IDENTITY = {
    "GIT_AUTHOR_NAME": "AutoKernel",
    "GIT_AUTHOR_EMAIL": "autokernel@localhost",
    "GIT_COMMITTER_NAME": "AutoKernel",
    "GIT_COMMITTER_EMAIL": "autokernel@localhost",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
}

_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.sparseCheckout=false",
    "core.splitIndex=false",
    "core.fsync=committed,reference",  # the journal names a commit only once it is on disk (git 2.36 and later)
    "commit.gpgSign=false",
    "i18n.commitEncoding=utf-8",
    "i18n.logOutputEncoding=utf-8",
    "worktree.useRelativePaths=false",  # would write an extension into the user's config
)

_KEPT = ("GIT_EXEC_PATH", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_PYTHON_")
"""What of the caller's GIT_* variables says where git is installed or configured; the rest points at repositories."""


def is_in_repository(workdir: Path) -> bool:
    """Whether git finds a repository for `workdir`.

    Raises: RepositoryError when it finds one that it refuses to use.
    """
    try:
        git_output(["-C", str(workdir), "rev-parse", "--git-dir"])
    except RepositoryError as error:
        if "not a git repository" in str(error):
            return False
        raise
    return True


def git_output(arguments: Sequence[str], *, stdin: bytes | None = None, accept: Sequence[int] = (0,)) -> str:
    """Output of a git command, with white space at its end removed; empty when it ended with another accepted code."""
    return run_git(arguments, stdin=stdin, accept=accept).decode("utf-8", "surrogateescape").rstrip()


def run_git(arguments: Sequence[str], *, stdin: bytes | None = None, accept: Sequence[int] = (0,)) -> bytes:
    """Output of a git command, every byte of it.

    Raises: RepositoryError with git's own words when it ends with a code that is not in `accept`, or is missing.
    """
    try:
        import git  # 0.1 s, and it fails when there is no git to run
    except ImportError:
        raise RepositoryError(
            "git was not found", hint="install git 2.30 or later (apt install git, brew install git) and run again"
        )
    strangers = [name for name in os.environ if name.startswith("GIT_") and not name.startswith(_KEPT)]
    unset = [part for name in strangers for part in ("-u", name)]
    ours = [f"{name}={value}" for name, value in IDENTITY.items()]
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    command = ["env", *unset, *ours, git.Git.GIT_PYTHON_GIT_EXECUTABLE, *settings, *arguments]
    try:
        with tempfile.TemporaryFile() as given:
            given.write(stdin or b"")
            given.seek(0)
            # Its own session: Ctrl-C is for the loop, which stops between two git commands and not within one.
            status, output, complaint = git.Git().execute(
                command,
                istream=given,
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
                start_new_session=True,
            )
    except (OSError, git.exc.GitError) as error:
        raise RepositoryError(f"git could not be run: {error}", hint="check the disk, memory and PATH, then run again")
    if status not in accept:
        said = str(complaint).strip() or f"exit code {status}"
        raise RepositoryError(
            f"git failed: {said} (git {' '.join(arguments)})", hint="mend what git says, then run again"
        )
    return bytes(output)
