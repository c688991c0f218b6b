"""What an agent may do besides proposing: tell the user something, and account for calls and waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LimitReached(Exception):
    """The run's money, tokens or time do not allow another call: the run ends as it does when its time is up."""

    @property
    def reason(self) -> str:
        """Why, in one line."""
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model: what came of it, and what it cost (None: not known)."""

    op: str
    agent: str
    model: str
    outcome: str  # ok, or the fault of the reply, or the failure of the call
    reason: str = ""
    tokens: int | None = None
    cost_usd: float | None = None


class Host(Protocol):
    """The run that an agent works for."""

    def note(self, message: str) -> None:
        """One line that the user should see."""

    def stage(self, name: str) -> None:
        """What the agent is doing now, a countdown say."""

    def called(self, call: Call) -> None:
        """A call is over; it is recorded at once, so that a crash does not forget what was spent."""

    def waited(self, seconds: float) -> None:
        """Time that was spent waiting for a server: it is not work on a kernel."""

    def time_left_s(self) -> float:
        """Seconds until the run has to end."""


class QuietHost:
    """Listens to nothing and never ends."""

    def note(self, message: str) -> None:
        """Dropped."""

    def stage(self, name: str) -> None:
        """Dropped."""

    def called(self, call: Call) -> None:
        """Dropped."""

    def waited(self, seconds: float) -> None:
        """Dropped."""

    def time_left_s(self) -> float:
        """No limit."""
        return float("inf")
