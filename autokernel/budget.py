"""`Budget`: a run's clock, and how much time and how many experiments are left. No torch."""

from __future__ import annotations

import time

from autokernel.settings import Settings

RESERVED_SHARE, RESERVED_MAX_S = 0.25, 600.0
"""Of the time budget, what is kept for measuring the whole model at the end."""

EXPERIMENT_S = 6.0
"""What one more experiment is expected to take, until this run has measured its own."""


class Budget:
    """Counts from its making, or from `already_s` seconds before that for a run that goes on by the same clock."""

    def __init__(self, settings: Settings, already_s: float = 0.0) -> None:
        self._budget_s, self._max_experiments = settings.budget_s, settings.max_experiments
        self._began = time.perf_counter() - already_s
        self._seconds: list[float] = []

    def took(self, seconds: float) -> None:
        """One more experiment is done."""
        self._seconds.append(seconds)

    def used_up(self, experiments: int) -> str | None:
        """Why there is no room for another experiment after `experiments` of them; None when there is."""
        if self._max_experiments is not None and experiments >= self._max_experiments:
            return f"{experiments} experiments done, as asked"
        usual_s = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else EXPERIMENT_S
        if usual_s > self.time_left_s():
            return f"the time of {self._budget_s / 60:g} minutes is used up"
        return None

    def experiments_left(self, experiments: int) -> int | None:
        """How many more may be made after `experiments` of them; None without a limit."""
        return None if self._max_experiments is None else max(0, self._max_experiments - experiments)

    def time_left_s(self) -> float:
        """Seconds until the loop has to end, so that the whole model can still be measured."""
        return self._budget_s - min(RESERVED_SHARE * self._budget_s, RESERVED_MAX_S) - self.elapsed_s()

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began
