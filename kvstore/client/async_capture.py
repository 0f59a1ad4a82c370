"""The changes of a served store, and its times, for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.changes import Change
from kvstore.changes.changeset import Changeset
from kvstore.changes.epoch import Epoch
from kvstore.changes.event import Event
from kvstore.changes.generation import Generation
from kvstore.client.threads import CallThreads
from kvstore.errors import ClosedError
from kvstore.feeds import FeedBatch
from kvstore.timestamp import TimeLike, Timestamp

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.client.client import Client


class AsyncCapture:
    """The calls of an asyncio client that concern changes and times."""

    def __init__(self, client: Client) -> None:
        self._client, self._threads = client, CallThreads(repr(client))
        self._run, self._each = self._threads.run, self._threads.each

    # -- times ------------------------------------------------------------------------------

    async def upper(self) -> Timestamp:
        """See `Store.upper`."""
        return await self._run(lambda: self._client.upper)

    async def since(self) -> Timestamp:
        """See `Store.since`."""
        return await self._run(lambda: self._client.since)

    async def durable(self) -> Timestamp:
        """See `Store.durable`."""
        return await self._run(lambda: self._client.durable)

    async def whole_since(self) -> Timestamp:
        """See `Store.whole_since`."""
        return await self._run(lambda: self._client.whole_since)

    async def indexed_since(self) -> Timestamp:
        """See `Store.indexed_since`."""
        return await self._run(lambda: self._client.indexed_since)

    async def store_id(self) -> str:
        """See `Store.store_id`."""
        return await self._run(lambda: self._client.store_id)

    async def now(self) -> Timestamp:
        """See `Store.now`."""
        return await self._run(self._client.now)

    async def to_time(self, time: TimeLike, *, name: str = "time") -> Timestamp:
        """See `Client.to_time`."""
        return await self._run(self._client.to_time, time, name=name)

    async def wait_beyond(self, upper: int, *, timeout: float | None = None) -> None:
        """See `Client.wait_beyond`. A coroutine that is cancelled ends the wait. Raises
        `ClosedError` if the client is closed meanwhile."""
        gone = threading.Event()
        try:
            with self._threads.waiting(gone.set):
                await self._run(self._client.wait_beyond, upper, timeout=timeout, stop=gone.is_set)
            if gone.is_set():
                raise ClosedError(repr(self._client))
        finally:
            gone.set()

    # -- changes ----------------------------------------------------------------------------

    def changes(self, *args: Any, **options: Any) -> AsyncIterator[Change]:
        """See `Store.changes`: changes, by `async for`."""
        return self._each(partial(self._client.changes, *args, **options))

    def events(self, *args: Any, **options: Any) -> AsyncIterator[Event]:
        """See `Store.events`: events, by `async for`."""
        return self._each(partial(self._client.events, *args, **options))

    def changes_batches(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """See `Store.changes_batches`: record batches, by `async for`."""
        return self._each(partial(self._client.changes_batches, *args, **options))

    async def feed(
        self, name: str, *args: Any, follow: bool = True, **options: Any
    ) -> AsyncIterator[FeedBatch]:
        """The batches of a feed, see `Store.feed`. The next step of the loop acks the batch before
        it, so a consumer that fails receives its last batch again. A feed that follows raises
        `ClosedError` once the client is closed."""
        feed = await self._run(self._client.feed, name, *args, **options)
        try:
            with self._threads.waiting(feed.close):
                async for batch in self._each(partial(feed.batches, follow=follow)):
                    yield batch
                    await self._run(feed.ack, batch)
            if follow:  # a feed that follows ends with its client alone
                raise ClosedError(repr(self._client))
        finally:
            feed.close()  # so a step that waits for news ends, behind its request

    async def drop_feed(self, name: str) -> None:
        """See `Client.drop_feed`."""
        await self._run(self._client.drop_feed, name)

    @asynccontextmanager
    async def changeset(self) -> AsyncIterator[Changeset]:
        """See `Client.changeset`. Coroutines and tasks that begin inside the block take part."""
        changeset = self._client.changeset()
        await self._threads.take(changeset.open, lambda _: changeset.end())
        with changeset:
            try:
                yield changeset
            finally:
                await asyncio.shield(self._run(changeset.end))

    def epochs(self, since: TimeLike = 0) -> AsyncIterator[Epoch]:
        """See `Store.epochs`: epochs, by `async for`."""
        return self._each(partial(self._client.epochs, since))

    async def generations(self) -> list[Generation]:
        """See `Store.generations`."""
        return await self._run(self._client.generations)

    async def reshard(self, streams: int) -> Generation:
        """See `Client.reshard`."""
        return await self._run(self._client.reshard, streams)

    async def force_quiescence(
        self, after: timedelta | None = None, *, timeout: float | None = None
    ) -> Timestamp:
        """See `Client.force_quiescence`."""
        return await self._run(self._client.force_quiescence, after, timeout=timeout)
