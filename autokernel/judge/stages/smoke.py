"""Smoke: one small call per dtype. Catches compile errors, wrong shapes and kernels that compute something else."""

from __future__ import annotations

from autokernel.judge.trial import Trial


def run(trial: Trial) -> int:
    """Check the op's first case."""
    cases = trial.in_dtypes(trial.spec.cases[:1])
    for case in cases:
        trial.check(case)
    return len(cases)
