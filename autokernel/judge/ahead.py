"""Compile what the stages will need, on all cores, from the moment a candidate is there.

A kernel that is compiled when it is called (Triton, or a library built on demand) compiles anew for most cases, one
after the other: a minute for a judging that takes a second otherwise. Some extra children call it on all cases, beside
the first stage. They have no GPU, whose contexts take longer than the compiling: what is launched is compiled for it
and not run. A kernel that wants a GPU to choose its path by gets children that have one, a little later. All that is
used of them is the cache in the candidate's own folder; what they do wrong is met again by the stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from autokernel.errors import WorkerError
from autokernel.judge.rejected import Rejected
from autokernel.judge.worker import Worker, close_all
from autokernel.machine import usable_cores
from autokernel.records import Case
from autokernel.spec import KernelSpec

MOST_CHILDREN, CASES_PER_CHILD = 12, 4
MOST_CONTEXTS = 4
"""Of children with a GPU: as several make theirs at once, each takes longer."""

FREE_CORES = 2
"""For the candidate's own child, which compiles for its first calls, and for the judge."""


class CompileAhead:
    """Children that compile; use as a context manager, which ends them."""

    def __init__(
        self,
        spec: KernelSpec,
        cases: Sequence[Case],
        start: Callable[[], Worker],
        *,
        most: int = MOST_CHILDREN,
        cores: int | None = None,
    ) -> None:
        """Have the kernel of `start`'s children called on all `cases`, shared out among them, the first ones first.

        Nothing is done where too few `cores` (default: those of this machine) or cases make it pointless.
        """
        free = (cores or usable_cores()) - FREE_CORES
        count = min(most, free, -(-len(cases) // CASES_PER_CHILD))
        self._cases = len(cases)
        self._workers = list[Worker]()
        self._pool = ThreadPoolExecutor(max(1, count))
        self._done = list[Future[int]]()
        if count >= 2:
            self._done = [self._pool.submit(self._compile, start, spec, cases[i::count]) for i in range(count)]

    def wait(self) -> bool:
        """Return when everything is compiled that can be: whether most cases were, if any was tried."""
        compiled = [future.result() for future in self._done]
        return not compiled or 2 * sum(compiled) > self._cases

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        close_all(self._workers)
        self._pool.shutdown()
        close_all(self._workers)  # one may have been started meanwhile

    def _compile(self, start: Callable[[], Worker], spec: KernelSpec, cases: Sequence[Case]) -> int:
        """How many of the cases could be compiled."""
        compiled = 0
        with contextlib.suppress(Rejected, WorkerError):
            worker = start()
            self._workers.append(worker)
            worker.load()
            for case in cases:
                with contextlib.suppress(Rejected):
                    worker.compile(list(spec.arguments(case).values()))
                    compiled += 1
        return compiled
