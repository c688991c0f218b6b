"""Sweep: the calls of the user's model first, then the op's own configurations in every dtype."""

from __future__ import annotations

from autokernel.judge.trial import Trial


def run(trial: Trial) -> int:
    """Check each configuration once on fresh inputs."""
    cases = [*trial.user_cases, *trial.in_dtypes(trial.spec.cases)]
    for case in cases:
        trial.check(case)
    return len(cases)
