"""Asks again when a call fails: as the server says, else with growing pauses; a used-up quota is waited out overnight.

Failures that a person must mend end it at once, and so does Ctrl-C. No failure costs an experiment, and time spent
here is not counted as work on a kernel.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autokernel.agents.host import Host, LimitReached
from autokernel.agents.talk import Failure, FailureKind, Reply
from autokernel.errors import AgentError, ConfigError

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 300.0
QUOTA_PAUSE_S = 900.0
TRIES_UNREACHED = 4
"""Calls to a server that never answered at all, before it counts as the wrong address."""

TRIES_BROKEN = 3
"""Runs in a row of a program that fails."""

TICK_S = 60.0
"""How often the countdown is shown."""

SLICE_S = 1.0
"""Of sleep, so that Ctrl-C ends it even when another thread gets the signal."""


@dataclass(slots=True, kw_only=True)
class Waiter:
    """Makes the calls of one client. `scale` shortens every pause of its own (not those that a server names)."""

    host: Host
    scale: float = 1.0
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)
    reached: bool = False  # whether the server has ever answered

    def ask(self, call: Callable[[], Reply]) -> Reply:
        """The reply of the first call that succeeds.

        Raises: ConfigError for a refused request, AgentError for a server or program that never works, LimitReached
        when the run would be over before the next try, Failure when the prompt is too long.
        """
        tries = 0
        while True:
            try:
                reply = call()
            except Failure as failure:
                tries += 1
                self._check(failure, tries)
                self._pause(failure, tries)
            else:
                self.reached = True
                return reply

    def _check(self, failure: Failure, tries: int) -> None:
        if failure.kind is FailureKind.REFUSED:
            raise ConfigError(str(failure), hint=failure.hint) from None
        if failure.kind is FailureKind.TOO_LONG:
            raise failure
        if failure.kind is FailureKind.BROKEN and tries >= TRIES_BROKEN:
            raise AgentError(str(failure), hint=failure.hint) from None
        if failure.kind in (FailureKind.DROPPED, FailureKind.SILENT):
            if not self.reached and tries >= TRIES_UNREACHED:
                raise AgentError(f"{failure}, {tries} times", hint="check --base-url and the network") from None
        else:
            self.reached = True

    def _pause(self, failure: Failure, tries: int) -> None:
        seconds = self._pause_s(failure, tries)
        if seconds >= self.host.time_left_s():
            raise LimitReached(f"{failure}; the next try in {clock(seconds)} would be after the run's time")
        if failure.kind is FailureKind.QUOTA or seconds > TICK_S:
            self.host.note(f"{failure}; asking again in {clock(seconds)}")
        begin, shown_s = time.monotonic(), -TICK_S
        try:
            while (passed_s := time.monotonic() - begin) < seconds:
                if passed_s - shown_s >= TICK_S:
                    shown_s = passed_s
                    self.host.stage(f"{failure.kind}: asking again in {clock(seconds - passed_s)}")
                self.sleep(min(seconds - passed_s, SLICE_S))
        finally:
            self.host.waited(time.monotonic() - begin)

    def _pause_s(self, failure: Failure, tries: int) -> float:
        if failure.retry_after_s is not None:
            return failure.retry_after_s
        if failure.kind is FailureKind.QUOTA:
            return self.scale * QUOTA_PAUSE_S
        longest: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 20))
        return self.scale * self.rng.uniform(longest / 2, longest)  # so that many clients do not come back together


def clock(seconds: float) -> str:
    """`4:05`, or `3:04:05` for an hour and more."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
