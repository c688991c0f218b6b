"""Several children at once: one that gets ready beside something else, and many that end together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from autokernel.judge.worker import Worker


class EarlyChild:
    """A child that gets ready on a thread while something else is done; use as a context manager, which ends it."""

    def __init__(self, child: Worker, get_ready: Callable[[Worker], None]) -> None:
        self._child = child
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(get_ready, child)

    def ready(self) -> Worker:
        """The child, once it is ready. Raises: whatever kept it from that."""
        self._done.result()
        return self._child

    def kill(self) -> None:
        """Kill the child; the end of the context reaps it."""
        self._child.kill()

    def __enter__(self) -> EarlyChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pool.shutdown()
        self._child.close()


def close_all(workers: Iterable[Worker]) -> None:
    """Close them, all killed before the first is reaped: a GPU's context takes a while to end."""
    workers = list(workers)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.close()
