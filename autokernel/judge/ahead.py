"""Compile what the stages will need, on all cores, from the moment a candidate is there.

A kernel that is compiled when it is called (Triton, or a library built on demand) compiles anew for most cases, one
after the other: a minute for a judging that takes a second otherwise. Some extra children call it on all cases, beside
the first stage. They have no GPU, whose contexts take longer than the compiling: what is launched is compiled for it
and not run. A kernel that wants a GPU to choose its path by gets children that have one, a little later. All that is
used of them is the cache in the candidate's own folder; what they do wrong is met again by the stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from autokernel.errors import WorkerError
from autokernel.judge.children import close_all
from autokernel.judge.rejected import Rejected
from autokernel.judge.worker import Worker
from autokernel.machine import usable_cores
from autokernel.records import Case, Scalar, TensorMeta
from autokernel.spec import KernelSpec

log = logging.getLogger(__name__)

MOST_CHILDREN, CASES_PER_CHILD = 12, 4
MOST_CONTEXTS = 4
"""Of children with a GPU: as several make theirs at once, each takes longer."""

DEADLINE_S = 60.0
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
        self._spec, self._start = spec, start
        self._cases = [Future[bool]() for _ in cases]  # whether each could be compiled
        self._workers = list[Worker]()
        self._pool = ThreadPoolExecutor(max(1, count))
        self._working, self._ended = count >= 2, False
        if self._working:
            for share in range(count):
                self._pool.submit(self._compile, list(zip(cases, self._cases, strict=True))[share::count])

    def wait(self) -> bool:
        """Return when all cases are compiled, if they can be: whether most of them were."""
        compiled = [case.result() for case in self._cases if self._working]
        return 2 * sum(compiled) >= len(compiled)

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        close_all(self._workers)
        self._pool.shutdown()
        close_all(self._workers)  # one may have been started meanwhile

    def _compile(self, share: Sequence[tuple[Case, Future[bool]]]) -> None:
        try:
            worker = self._start()
            self._workers.append(worker)
            if self._ended:
                return
            worker.load(DEADLINE_S)
            for case, compiled in share:
                compiled.set_result(_could_compile(worker, list(self._spec.arguments(case).values())))
        except (Rejected, WorkerError) as error:
            log.debug("nothing more is compiled ahead by a child: %s", error)
        finally:
            for _, compiled in share:
                if not compiled.done():
                    compiled.set_result(False)


def _could_compile(worker: Worker, arguments: Sequence[TensorMeta | Scalar]) -> bool:
    try:
        worker.compile(arguments, DEADLINE_S)
    except Rejected as rejected:
        log.debug("not compiled ahead: %s", rejected)
        return False
    return True
