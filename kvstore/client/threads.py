"""Threads in which the calls of an asyncio client wait for the server.

Invariants
1. The call of a cancelled coroutine runs to its end: a write may have been done.
2. A stream that is not read to its end closes its connection.
3. A forked child starts threads of its own, because it has no thread of its parent.
4. A call runs in the context of its coroutine, so it belongs to the changeset of the coroutine.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from typing_extensions import ParamSpec

from kvstore.limits import CLIENT_CONNECTIONS_MAX

T = TypeVar("T")
P = ParamSpec("P")
_END: Final = object()


class CallThreads:
    """The threads of one client."""

    def __init__(self) -> None:
        self._threads = _threads()
        self._process = os.getpid()

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of a call."""
        if self._process != os.getpid():
            self._threads, self._process = _threads(), os.getpid()
        work = partial(contextvars.copy_context().run, call, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def each(self, begin: Callable[[], Any]) -> AsyncIterator[Any]:
        """The items of an iterator whose every step waits for the server."""
        items: Iterator[Any] = iter(await self.run(begin))
        try:
            while (item := await self.run(next, items, _END)) is not _END:
                yield item
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                await asyncio.shield(self.run(close))

    async def close(self) -> None:
        """End the threads, behind the calls under way. Repeatable. The threads of a parent stay."""
        if self._process == os.getpid():
            await asyncio.to_thread(self._threads.shutdown)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CLIENT_CONNECTIONS_MAX, "kvstore-client")
