"""Where a candidate's children keep what they compile: one folder per kernel text. For those who read it afterwards."""

from __future__ import annotations

from pathlib import Path

from autokernel.kerneltext import text_digest

LIBRARIES, TRITON = "build", "triton"
"""In the folder of a text: what `autokernel.native` built, and Triton's cache."""


def of_text(builds: Path, kernel_py: str) -> Path:
    """The folder of a kernel text below `builds`, the folder of its op."""
    return builds / text_digest(kernel_py)
