"""Threads in which the calls of an asyncio client wait for the server.

Invariants
1. The call of a cancelled coroutine runs to its end: a write may have been done.
2. A stream that is not read to its end closes its connection.
3. A forked child starts threads of its own, because it has no thread of its parent.
4. A call runs in the context of its coroutine, so it belongs to the changeset of the coroutine.
5. A cancelled coroutine keeps nothing at the server: the thread of its call gives back what the
   call has taken.
6. Closing ends the calls that wait for news, each behind its request. It waits for all others.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from typing_extensions import ParamSpec

from kvstore.errors import ClosedError, KVStoreError
from kvstore.limits import CLIENT_CONNECTIONS_MAX

T = TypeVar("T")
P = ParamSpec("P")
_END: Final = object()


class CallThreads:
    """The threads of one client. `whose` names the client in errors."""

    def __init__(self, whose: str) -> None:
        self._whose, self._closed = whose, False
        self._threads = _threads()
        self._process = os.getpid()
        self._stops: list[Callable[[], object]] = []

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of a call. Raises `ClosedError` behind `close`."""
        if self._closed:
            raise ClosedError(self._whose)
        if self._process != os.getpid():
            self._threads, self._process = _threads(), os.getpid()
        work = partial(contextvars.copy_context().run, call, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def take(self, take: Callable[[], T], release: Callable[[T], object]) -> T:
        """The result of `take`. If the coroutine is cancelled, `release` gets the result."""
        taken: list[T] = []
        ending = _Ending(lambda: [release(each) for each in taken])
        try:
            await self.run(ending.before, lambda: taken.append(take()))
        except asyncio.CancelledError:
            with suppress(KVStoreError):  # the caller asked for the end, and gets no other error
                await self._end(ending)
            raise
        return taken[0]

    async def each(self, begin: Callable[[], Any]) -> AsyncIterator[Any]:
        """The items of an iterator whose every step waits for the server."""
        items: Iterator[Any] = iter(await self.run(begin))
        ending = _Ending(getattr(items, "close", lambda: None))
        try:
            while (item := await self.run(ending.before, partial(next, items, _END))) is not _END:
                yield item
        finally:
            await self._end(ending)

    @contextmanager
    def waiting(self, stop: Callable[[], object]) -> Iterator[None]:
        """A block whose calls wait for news, perhaps for ever. `close` calls `stop` to end them."""
        self._stops.append(stop)
        try:
            yield
        finally:
            self._stops.remove(stop)

    async def close(self) -> None:
        """End the threads, behind the calls under way. Repeatable. The threads of a parent stay."""
        self._closed = True
        for stop in [*self._stops]:
            stop()
        if self._process == os.getpid():
            await asyncio.to_thread(self._threads.shutdown)

    async def _end(self, ending: _Ending) -> None:
        if not ending.is_ours():
            return
        if self._closed:  # no thread is left
            ending.end()
        else:
            await asyncio.shield(self.run(ending.end))


class _Ending:
    """The end of something that threads use: done once, and behind the use that is under way."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.end = end
        self._lock = threading.Lock()
        self._is_used = self._is_wanted = False

    def before(self, use: Callable[[], T]) -> T:
        """The result of `use`. If the end comes meanwhile, this thread does it."""
        if not self._enter():
            raise asyncio.CancelledError
        try:
            return use()
        finally:
            if self._leave():
                self.end()

    def is_ours(self) -> bool:
        """Ask for the end. Returns whether the caller does it, because no thread is inside."""
        with self._lock:
            self._is_wanted = True
            return not self._is_used

    def _enter(self) -> bool:
        with self._lock:
            self._is_used = not self._is_wanted
            return self._is_used

    def _leave(self) -> bool:
        with self._lock:
            self._is_used = False
            return self._is_wanted


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CLIENT_CONNECTIONS_MAX, "kvstore-client")
