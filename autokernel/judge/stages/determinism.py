"""Determinism: the same input three times, with another one in between, must give the same bits.

All outputs stay alive, so a kernel that hands out one static buffer, or keys a cache on shape, is wrong here too.
"""

from __future__ import annotations

from autokernel.judge.rejected import Rejected
from autokernel.judge.trial import Trial, same_bits
from autokernel.records import Verdict


def run(trial: Trial) -> int:
    """Check the user's calls, or the op's stress case in every dtype when there are none."""
    cases = list(trial.user_cases) or trial.in_dtypes([trial.spec.stress_case])
    for case in cases:
        same, other = trial.inputs(case), trial.inputs(case)
        first, _, second, third = trial.check_outputs(case, [same, other, same, same])
        for repeat in (second, third):
            if not same_bits(first, repeat):
                raise Rejected(Verdict.FAIL, f"{case.name} ({case.label}): equal inputs gave different bits")
    return len(cases)
