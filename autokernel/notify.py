"""`--notify CMD`: tell a program of the user's that a run has ended, or that it needs a person; no torch.

The run never depends on it: what goes wrong here is a warning.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from autokernel.errors import AutokernelError, ConfigError

if TYPE_CHECKING:
    from autokernel.report import Report

log = logging.getLogger(__name__)

DEADLINE_S = 60.0
SHOWN_CHARS = 200


class Notifier:
    """Runs `command` (a program and its arguments, no shell) with a JSON object on stdin."""

    def __init__(self, command: str) -> None:
        """Raises: ConfigError when there is no such program: now, and not after the night."""
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--notify {command!r} cannot be read: {error}", hint="close its quotes")
        if not self._arguments or shutil.which(self._arguments[0]) is None:
            raise ConfigError(
                f"--notify {command!r} names no program",
                hint="give a program and its arguments; sh -c '...' for a pipe",
            )

    def ended(self, report: Report) -> None:
        """The run is over. `text` is the report for people, `report` the same for machines."""
        from autokernel.report import render_text, to_json

        told = {"run": report.run, "reason": report.reason, "text": render_text(report), "report": to_json(report)}
        self._tell({"event": "ended", **told})

    def stopped(self, error: Exception, run: str | None) -> None:
        """Somebody has to mend something before the run can go on; `run` is None for one that just began."""
        hint, code = (error.hint, error.exit_code) if isinstance(error, AutokernelError) else ("", None)
        reason = str(error) or type(error).__name__
        self._tell({"event": "stopped", "run": run, "reason": reason, "hint": hint, "exit_code": code})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            done = subprocess.run(
                self._arguments, input=json.dumps(message), capture_output=True, text=True, timeout=DEADLINE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("--notify did not work: %s", error)
            return
        if done.returncode:
            said = " ".join(done.stderr.split())[-SHOWN_CHARS:]
            log.warning("--notify did not work: %s ended with %d: %s", self._arguments[0], done.returncode, said)
