"""Compile what the stages will need, on all cores, before they begin.

A kernel that is compiled when it is called (Triton, or a library built on demand) compiles anew for most cases, one
after the other: a minute for a judging that takes a second otherwise. Some extra children call it on all cases at once;
all that is used of them is the cache in the candidate's own folder. What they do wrong is met again by the stages.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from autokernel.judge.rejected import Rejected
from autokernel.judge.worker import Worker, close_all
from autokernel.machine import usable_cores
from autokernel.records import Case
from autokernel.spec import KernelSpec

LEAST_CHILDREN, MOST_CHILDREN = 3, 12
CASES_PER_CHILD = 5
CHILDREN_PER_S = 2.0
"""So many for each second that the first stage took: each needs a context on the GPU, which has to be worth it."""


def compile_ahead(
    spec: KernelSpec, cases: Sequence[Case], start: Callable[[], Worker], *, first_s: float, cores: int | None = None
) -> None:
    """Call the kernel of `start`'s children on all `cases`, shared out among them; returns when all are done.

    `first_s` is what the first stage took, which has compiled for a few cases. Does nothing where fewer than three
    `cores` (default: those of this machine) or very few cases make it pointless.
    """
    wanted = max(LEAST_CHILDREN, round(CHILDREN_PER_S * first_s))
    count = min(MOST_CHILDREN, wanted, (cores or usable_cores()) - 1, -(-len(cases) // CASES_PER_CHILD))
    if count < 2:
        return
    workers = [start() for _ in range(count)]
    try:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(_compile, workers, [spec] * count, [cases[i::count] for i in range(count)]))
    finally:
        close_all(workers)


def _compile(worker: Worker, spec: KernelSpec, cases: Sequence[Case]) -> None:
    with contextlib.suppress(Rejected):
        worker.load()
        for case in cases:
            worker.compile([spec.make_inputs(case, secrets.randbits(62), worker.device)])
