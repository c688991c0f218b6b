"""The five correctness stages, in order. A stage is a function that checks cases and returns how many it checked.

It raises `Rejected` at the first fault. A new stage is one file with `run`, one line here, and one wrong kernel in
`tests/adversarial/wrong` that only it catches.
"""

from __future__ import annotations

from collections.abc import Callable

from autokernel.judge.stages import determinism, edges, smoke, stability, sweep
from autokernel.judge.trial import Trial

Stage = Callable[[Trial], int]

STAGES: tuple[tuple[str, Stage], ...] = (
    ("smoke", smoke.run),
    ("sweep", sweep.run),
    ("stability", stability.run),
    ("determinism", determinism.run),
    ("edges", edges.run),
)
