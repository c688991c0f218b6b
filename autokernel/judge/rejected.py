"""How a candidate's fault ends its judging."""

from __future__ import annotations

from autokernel.records import Verdict


class Rejected(Exception):
    """A candidate's fault: ends the judging with this verdict and reason."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


SIGKILLED = "the system killed the process (SIGKILL), usually for memory"
"""Why a child is gone that nobody here has killed; an outcome with it in its reason may not be the kernel's fault."""
