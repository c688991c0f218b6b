"""A kernel's text on its way into a child: read as Python, and written where a candidate may have been before."""

from __future__ import annotations

import ast
import os
import tempfile
from pathlib import Path

from autokernel.judge.rejected import Rejected
from autokernel.records import Verdict


def place(kernel_py: str, folder: Path) -> Path:
    """Path of a file with this text in a folder that a candidate could write: no link that it left is followed."""
    descriptor, fresh = tempfile.mkstemp(prefix="kernel-", dir=folder)
    with os.fdopen(descriptor, "w") as file:
        file.write(kernel_py)
    return Path(fresh).replace(folder / "kernel.py")


def check_syntax(kernel_py: str) -> None:
    """Raises: Rejected for a text that is not Python."""
    try:
        ast.parse(kernel_py)
    except (SyntaxError, ValueError) as error:
        raise Rejected(Verdict.CRASH, f"not valid Python: {error}") from None
