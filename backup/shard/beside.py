"""Beside: work in a thread beside the caller, one call after the other, at most one unfinished.

For calls that spend their time outside the interpreter lock (encoding, hashing, writing), while
the caller makes what the next one needs. An error reaches the caller with its next `run`, or at
the end; nothing runs after it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


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
