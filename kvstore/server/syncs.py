"""Waiting for the disk on an event loop: commits that wait together share an fsync and a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.errors import KVStoreError


class Syncs:
    """The commits of one store that wait for the disk. Belongs to one event loop."""

    def __init__(self, wait: Callable[[int], Awaitable[None]]) -> None:
        """`wait` returns once everything below a time is on disk."""
        self._wait = wait
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def wait(self, upper: int) -> None:
        """Return once everything below `upper` is on disk. Raises `StorageError`."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((upper, future))
        if self._task is None:
            self._task = loop.create_task(self._run())
        await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                error: KVStoreError | None = None
                try:
                    await self._wait(max(upper for upper, _ in waiting))
                except KVStoreError as failed:
                    error = failed
                for _, future in waiting:
                    if future.done():  # the client has gone
                        continue
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)
        finally:
            self._task = None
