"""Compile what the stages will need, on all cores, from the moment a candidate is there.

A kernel that is compiled when it is called (Triton, or a library built on demand) compiles anew for most cases, one
after the other: a minute for a judging that takes a second otherwise. Some extra children call it on the cases, beside
the stages, which wait for each as they come to it. They have no GPU, whose contexts take longer than the
compiling: what is launched is compiled for it and not run. A kernel that wants a GPU to choose its path by gets
children that have one, a little later. All that is used of them is the cache in the candidate's own folder; what they
do wrong is met again by the stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

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
        """Have the kernel of `start`'s children called on all `cases`, each by the first child that is free, in order.

        Nothing is done where too few `cores` (default: those of this machine) or cases make it pointless.
        """
        free = (cores or usable_cores()) - FREE_CORES
        wanted = {case.key: case for case in cases}
        children = min(most, free, -(-len(wanted) // CASES_PER_CHILD))
        self._children = children if children >= 2 else 0
        self._spec, self._start = spec, start
        self._compiled = {key: Future[bool]() for key in wanted if self._children}  # whether each could be
        self._next, self._lock = iter(wanted.values()), Lock()
        self._workers = list[Worker]()
        self._pool = ThreadPoolExecutor(max(1, children))
        self._ended = False
        self._left = self._children  # of the children, those that still compile
        for _ in range(self._children):
            self._pool.submit(self._compile)

    def await_case(self, case: Case) -> None:
        """Return when `case` is compiled, or when it will not be."""
        if compiled := self._compiled.get(case.key):
            compiled.result()

    def works(self) -> bool:
        """Whether most of the first cases, one for each child, could be compiled; waits for them."""
        first = list(self._compiled.values())[: self._children]
        return 2 * sum(compiled.result() for compiled in first) >= len(first)

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        close_all(self._workers)
        self._pool.shutdown()
        close_all(self._workers)  # one may have been started meanwhile

    def _compile(self) -> None:
        """What one child does: the next case, as long as there is one and the child lives."""
        try:
            worker = self._start()
            self._workers.append(worker)
            if self._ended:
                return
            worker.load(DEADLINE_S)
            while worker.alive and (case := self._take()):
                compiled = False
                try:
                    compiled = _could_compile(worker, list(self._spec.arguments(case).values()))
                finally:
                    self._compiled[case.key].set_result(compiled)
        except (Rejected, WorkerError) as error:
            log.debug("nothing more is compiled ahead by a child: %s", error)
        finally:
            self._leave()

    def _leave(self) -> None:
        """The last child leaves the rest to the stages."""
        with self._lock:
            self._left -= 1
            rest = [] if self._left else list(self._next)
        for case in rest:
            self._compiled[case.key].set_result(False)

    def _take(self) -> Case | None:
        with self._lock:
            return next(self._next, None)


def _could_compile(worker: Worker, arguments: Sequence[TensorMeta | Scalar]) -> bool:
    try:
        worker.compile(arguments, DEADLINE_S)
    except Rejected as rejected:
        log.debug("not compiled ahead: %s", rejected)
        return False
    return True
