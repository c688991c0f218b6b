"""Whether there is room on the disk to judge a kernel: without, compilers fail as they do on a bad kernel. No torch."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from autokernel.errors import LogError

LEAST_FREE_BYTES = 32 << 20
"""For the builds of a candidate and the logs of an experiment; on a GPU, Triton's cache of one kernel takes some MB."""


def require_space(run_dir: Path) -> None:
    """Raises: LogError when the disk of the run's directory, or that of temporary files, is as good as full."""
    for folder in (run_dir, Path(tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            raise LogError(
                f"the disk of {folder} is full: {free >> 20} MiB are free, {LEAST_FREE_BYTES >> 20} are needed",
                hint="free some space; what was recorded is intact, and `autokernel run --resume` goes on",
            )
