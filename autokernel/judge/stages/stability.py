"""Stability: hard values (large equal rows, extreme range, variance near zero) at one shape in every dtype."""

from __future__ import annotations

from autokernel.judge.trial import Trial


def run(trial: Trial) -> int:
    """Check the op's stress case under each of its adversaries."""
    checked = 0
    for name, adversary in trial.spec.adversarial.items():
        for case in trial.in_dtypes([trial.spec.stress_case]):
            trial.check(case, adversary, label=name)
            checked += 1
    return checked
