"""Edges: sizes that are no power of two, size one and empty, in every dtype."""

from __future__ import annotations

from autokernel.judge.trial import Trial


def run(trial: Trial) -> int:
    """Check each of the op's edge cases."""
    cases = trial.in_dtypes(trial.spec.edges)
    for case in cases:
        trial.check(case)
    return len(cases)
