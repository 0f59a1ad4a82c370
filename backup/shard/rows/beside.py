"""Work in a thread beside the caller, one call after the other, at most one unfinished.

`Beside` carries out the caller's calls. `ahead` makes the next item of an iterator while the caller
is busy with the last one. Both are for work outside the interpreter lock (reading, decoding,
encoding, writing). An error reaches the caller with its next call, or at the end; no later call
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

_T = TypeVar("_T")


class Beside:
    """`with Beside() as run: run(call)`. Leaving waits for the last call."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvstore-beside")
        self._running: Future[None] | None = None

    def __enter__(self) -> Callable[[Callable[[], None]], None]:
        return self._run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def _run(self, call: Callable[[], None]) -> None:
        if self._running is not None:
            self._running.result()
        self._running = self._pool.submit(call)


def ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yield `items`, each made in a thread while the caller is busy with the one before.

    One item more is held in memory. Closing waits for the item that is being made.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="kvstore-ahead")
    with pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
