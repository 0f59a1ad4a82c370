"""The client for asyncio: the methods of `Client` as coroutines, whose waits are in threads."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from typing_extensions import ParamSpec

from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.batch import Batch
from kvstore.changes import Change
from kvstore.changes.epochs import Changeset, Epoch
from kvstore.changes.events import Event
from kvstore.changes.streams import Generation
from kvstore.codec.tuples import desc
from kvstore.errors import ClosedError, KVStoreError
from kvstore.feeds import FeedBatch
from kvstore.limits import CLIENT_CONNECTIONS_MAX
from kvstore.metrics import Metric
from kvstore.mvcc import Version
from kvstore.remote.client.client import ClientHold, ClientSnapshot
from kvstore.remote.client.tables import ClientTable
from kvstore.retention.gc import GcReport
from kvstore.tables.table import RowVersion
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.holds import HoldRecord
from kvstore.transaction import Transaction
from kvstore.verify import StoreReport

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.remote.client.client import Client


# --------------------------------------------------------------------------------------------------
# Threads in which the calls of an asyncio client wait for the server.
#
# Invariants
# 1. The call of a cancelled coroutine runs to its end: a write may have been done.
# 2. A stream that is not read to its end closes its connection.
# 3. A forked child starts threads of its own, because it has no thread of its parent.
# 4. A call runs in the context of its coroutine, so it belongs to the changeset of the coroutine.
# 5. A cancelled coroutine keeps nothing at the server: the thread of its call gives back what the
#    call has taken.
# 6. Closing ends the calls that wait for news, each behind its request. It waits for all others.

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


# --------------------------------------------------------------------------------------------------
# The changes of a served store, and its times, for asyncio.


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


# --------------------------------------------------------------------------------------------------
# A snapshot of a served store, for asyncio.


class AsyncSnapshot:
    """Reads at `as_of`; `AsyncClient.snapshot` makes it. See `ClientSnapshot`."""

    def __init__(self, snapshot: ClientSnapshot, threads: CallThreads) -> None:
        self._snapshot = snapshot
        self._run, self._each = threads.run, threads.each

    @property
    def as_of(self) -> Timestamp:
        """The time of all reads."""
        return self._snapshot.as_of

    async def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """As `AsyncClient.get`, at this snapshot's time."""
        return await self._run(self._snapshot.get, key, default)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `AsyncClient.get_many`, at this snapshot's time."""
        return await self._run(self._snapshot.get_many, keys)

    async def floor(self, key: bytes, prefix: bytes | None = None) -> tuple[bytes, bytes] | None:
        """As `AsyncClient.floor`, at this snapshot's time."""
        return await self._run(self._snapshot.floor, key, prefix)

    async def floor_many(
        self, keys: Sequence[bytes], prefix: bytes | None = None
    ) -> list[tuple[bytes, bytes] | None]:
        """As `AsyncClient.floor_many`, at this snapshot's time."""
        return await self._run(self._snapshot.floor_many, keys, prefix)

    async def scan(self, *args: Any, **options: Any) -> AsyncIterator[tuple[bytes, bytes]]:
        """As `AsyncClient.scan`, at this snapshot's time."""
        async for batch in self.scan_batches(*args, **options):
            for row in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                yield row

    def scan_batches(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """As `AsyncClient.scan_batches`, at this snapshot's time."""
        return self._each(partial(self._snapshot.scan_batches, *args, **options))

    def join(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """As `AsyncClient.join`: no label is above this snapshot's time."""
        return self._each(partial(self._snapshot.join, *args, **options))

    async def close(self) -> None:
        """End the claim on history. Repeatable."""
        await self._run(self._snapshot.close)

    def __repr__(self) -> str:
        return f"<kvstore.AsyncSnapshot as of {self.as_of}>"


# --------------------------------------------------------------------------------------------------
# A table of a served store, for asyncio.


class AsyncTable:
    """Rows of a table; `AsyncClient.table` makes it. See `ClientTable`."""

    def __init__(self, table: ClientTable, threads: CallThreads) -> None:
        self._table = table
        self._run, self._each = threads.run, threads.each

    @property
    def name(self) -> str:
        """The name of the table."""
        return self._table.name

    async def schema(self) -> pa.Schema:
        """See `Table.schema`. One round trip, as for each name below."""
        return await self._run(lambda: self._table.schema)

    async def key(self) -> list[str | desc]:
        """See `Table.key`."""
        return await self._run(lambda: self._table.key)

    async def indexes(self) -> dict[str, list[str | desc]]:
        """See `Table.indexes`."""
        return await self._run(lambda: self._table.indexes)

    async def event_time(self) -> str | None:
        """See `Table.event_time`."""
        return await self._run(lambda: self._table.event_time)

    async def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str] | None = None
    ) -> Any:
        """See `Table.get`."""
        return await self._run(self._table.get, *key, as_of=as_of, columns=columns)

    async def get_many(
        self,
        keys: Iterable[Sequence[Any]],
        as_of: TimeLike | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> list[Any]:
        """See `Table.get_many`."""
        return await self._run(self._table.get_many, keys, as_of, columns=columns)

    def scan(self, *key: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """See `Table.scan`: record batches, by `async for`."""
        return self._each(partial(self._table.scan, *key, **options))

    def rows(self, *key: Any, **options: Any) -> AsyncIterator[Any]:
        """See `Table.rows`: rows, by `async for`."""
        return self._each(partial(self._table.rows, *key, **options))

    def find(self, index: str, *values: Any, **options: Any) -> AsyncIterator[Any]:
        """See `Table.find`: rows, by `async for`."""
        return self._each(partial(self._table.find, index, *values, **options))

    def join(self, labels: object, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """See `Table.join`: record batches, by `async for`."""
        return self._each(partial(self._table.join, labels, *args, **options))

    def changes(self, since: TimeLike, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """See `Table.changes`: record batches, by `async for`."""
        return self._each(partial(self._table.changes, since, *args, **options))

    async def history(self, *key: Any) -> list[RowVersion]:
        """See `Table.history`."""
        return await self._run(self._table.history, *key)

    async def latest(
        self,
        *key: Any,
        at: Any = None,
        known_at: TimeLike | None = None,
        columns: Sequence[str] | None = None,
    ) -> dict[str, Any] | None:
        """See `Table.latest`."""
        how: dict[str, Any] = {"at": at, "known_at": known_at, "columns": columns}
        return await self._run(self._table.latest, *key, **how)

    async def put(self, row: Any, *, expires: Expires | None = None) -> Timestamp | None:
        """See `Table.put`."""
        return await self._run(self._table.put, row, expires=expires)

    async def put_batch(self, rows: object, *, expires: Expires | None = None) -> Timestamp | None:
        """See `Table.put_batch`."""
        return await self._run(self._table.put_batch, rows, expires=expires)

    async def update(self, /, *key: Any, **columns: Any) -> Timestamp | None:
        """See `Table.update`."""
        return await self._run(partial(self._table.update, *key, **columns))

    async def delete(self, *key: Any) -> Timestamp | None:
        """See `Table.delete`."""
        return await self._run(self._table.delete, *key)

    async def alter(self, *args: Any, **alteration: Any) -> None:
        """See `Table.alter`."""
        await self._run(self._table.alter, *args, **alteration)

    async def build_index(self, index: str) -> Timestamp | None:
        """See `Table.build_index`."""
        return await self._run(self._table.build_index, index)

    async def ttl(self, *key: Any) -> timedelta | None:
        """See `Table.ttl`."""
        return await self._run(self._table.ttl, *key)

    def __repr__(self) -> str:
        return f"<kvstore.AsyncTable {self.name!r}>"


# --------------------------------------------------------------------------------------------------
# The client for asyncio: the methods of `Client` as coroutines.
#
#     async with await kvstore.connect_async("http://127.0.0.1:7447") as client:
#         await client.put(b"k", b"v")
#         async for key, value in client.scan(prefix=b"k"): ...
#
# A call runs in a thread of a small pool, which waits for the socket instead of the event loop.
# `CLIENT_CONNECTIONS_MAX` calls run at one time; more calls wait for their turn.


class AsyncClient(AsyncCapture):
    """A store behind a server, for asyncio; `kvstore.connect_async` makes one. See `Client`."""

    # -- the store --------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """See `Client.path`."""
        return self._client.path

    async def metrics(self) -> Mapping[str, Metric]:
        """See `Store.metrics`."""
        return await self._run(self._client.metrics)

    async def table(self, name: str, *new: Any, **made: Any) -> AsyncTable:
        """See `Client.table`. The rows are awaited: `await table.put(row)`."""
        return AsyncTable(await self._run(self._client.table, name, *new, **made), self._threads)

    async def tables(self) -> list[str]:
        """See `Store.tables`."""
        return await self._run(self._client.tables)

    async def stats(self) -> dict[str, Any]:
        """See `Store.stats`."""
        return await self._run(self._client.stats)

    async def sync(self) -> Timestamp:
        """See `Store.sync`."""
        return await self._run(self._client.sync)

    async def close(self) -> None:
        """Close the connections, behind the calls under way. Repeatable."""
        try:
            await self._threads.close()
        finally:
            self._client.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<kvstore.AsyncClient {self._client!r}>"

    # -- reading ----------------------------------------------------------------------------

    async def get(
        self, key: bytes, as_of: TimeLike | None = None, default: bytes | T | None = None
    ) -> bytes | T | None:
        """See `Store.get`."""
        value = await self._run(self._client.get, key, as_of)
        return default if value is None else value

    async def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """See `Store.get_many`."""
        return await self._run(self._client.get_many, keys, as_of)

    async def floor(
        self, key: bytes, as_of: TimeLike | None = None, prefix: bytes | None = None
    ) -> tuple[bytes, bytes] | None:
        """See `Store.floor`."""
        return await self._run(self._client.floor, key, as_of, prefix)

    async def floor_many(
        self,
        keys: Sequence[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None = None,
        prefix: bytes | None = None,
    ) -> list[tuple[bytes, bytes] | None]:
        """See `Store.floor_many`."""
        return await self._run(self._client.floor_many, keys, as_of, prefix)

    async def count(self, *args: Any, **options: Any) -> int:
        """See `Store.count`."""
        return await self._run(self._client.count, *args, **options)

    def keys(self, *args: Any, **options: Any) -> AsyncIterator[bytes]:
        """See `Store.keys`: keys, by `async for`."""
        return self._each(partial(self._client.keys, *args, **options))

    @asynccontextmanager
    async def snapshot(self, as_of: TimeLike | None = None) -> AsyncIterator[AsyncSnapshot]:
        """See `Client.snapshot`: `async with client.snapshot() as snap: await snap.get(...)`."""
        take = partial(self._client.snapshot, as_of)
        taken = await self._threads.take(take, ClientSnapshot.close)
        snapshot = AsyncSnapshot(taken, self._threads)
        try:
            yield snapshot
        finally:
            await asyncio.shield(snapshot.close())

    async def history(self, key: bytes) -> list[Version]:
        """See `Store.history`."""
        return await self._run(self._client.history, key)

    async def scan(self, *args: Any, **options: Any) -> AsyncIterator[tuple[bytes, bytes]]:
        """See `Store.scan`: `async for key, value in client.scan(...)`."""
        async for batch in self.scan_batches(*args, **options):
            for row in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                yield row

    def scan_batches(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """See `Store.scan_batches`: record batches, by `async for`."""
        return self._each(partial(self._client.scan_batches, *args, **options))

    def join(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """See `Client.join`: record batches, by `async for`."""
        return self._each(partial(self._client.join, *args, **options))

    # -- writing ----------------------------------------------------------------------------

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Client.put`."""
        how: dict[str, Any] = {"expires": expires, "durability": durability}
        return await self._run(self._client.put, key, value, **how)

    async def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """See `Store.delete`."""
        return await self._run(self._client.delete, key, durability=durability)

    async def delete_range(
        self,
        start: bytes,
        end: bytes,
        idempotent: bool = False,
        *,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.delete_range`."""
        return await self._run(
            self._client.delete_range, start, end, idempotent, durability=durability
        )

    async def put_if(self, key: bytes, value: bytes, *args: Any, **options: Any) -> Timestamp:
        """See `Store.put_if`."""
        return await self._run(self._client.put_if, key, value, *args, **options)

    async def delete_if(self, key: bytes, *args: Any, **options: Any) -> Timestamp:
        """See `Store.delete_if`."""
        return await self._run(self._client.delete_if, key, *args, **options)

    async def pop(self, key: bytes, *, durability: Durability | None = None) -> bytes | None:
        """See `Store.pop`."""
        return await self._run(self._client.pop, key, durability=durability)

    async def update(
        self,
        key: bytes,
        change: Callable[[bytes | None], bytes | None],
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> bytes | None:
        """See `Client.update`. `change` is a plain function, and runs in a thread."""
        how: Any = {"expires": expires, "durability": durability}
        return await self._run(self._client.update, key, change, **how)

    async def increment(
        self,
        key: bytes,
        by: int = 1,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> int:
        """See `Store.increment`."""
        how: Any = {"expires": expires, "durability": durability}
        return await self._run(self._client.increment, key, by, **how)

    async def ttl(self, key: bytes) -> timedelta | None:
        """See `Store.ttl`."""
        return await self._run(self._client.ttl, key)

    async def persist(
        self, key: bytes, *, durability: Durability | None = None
    ) -> Timestamp | None:
        """See `Store.persist`."""
        return await self._run(self._client.persist, key, durability=durability)

    async def put_many(
        self,
        rows: object,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.put_many`. The rows travel together."""
        how: dict[str, Any] = {"expires": expires, "durability": durability}
        return await self._run(self._client.put_many, rows, **how)

    @asynccontextmanager
    async def batch(self, *, durability: Durability | None = None) -> AsyncIterator[Batch]:
        """See `Store.batch`: `async with client.batch() as b: b.put(...)`."""
        batch = self._client.batch(durability=durability)
        batch.__enter__()
        try:
            yield batch
        except BaseException as error:
            batch.__exit__(type(error), error, None)
            raise
        await self._run(batch.__exit__, None, None, None)

    async def transact(self, body: Callable[[Transaction], T], **options: Any) -> T:
        """See `Store.transact`. `body` is a plain function, and runs in a thread."""
        return await self._run(lambda: self._client.transact(body, **options))

    # -- upkeep, with the right `admin` -----------------------------------------------------

    async def gc(self, *args: Any, **options: Any) -> GcReport:
        """See `Client.gc`."""
        return await self._run(self._client.gc, *args, **options)

    async def checkpoint(self, path: str | Path) -> Timestamp:
        """See `Client.checkpoint`."""
        return await self._run(self._client.checkpoint, path)

    async def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """See `Store.clear_range`."""
        return await self._run(self._client.clear_range, start, end, compact=compact)

    async def revert_import(self, import_id: int) -> Timestamp:
        """See `Store.revert_import`."""
        return await self._run(self._client.revert_import, import_id)

    async def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """See `Store.revert_range`."""
        return await self._run(self._client.revert_range, start, end, to)

    async def verify(self) -> StoreReport:
        """See `Client.verify`."""
        return await self._run(self._client.verify)

    @asynccontextmanager
    async def hold(
        self, name: str, at: TimeLike | None = None, max_age: timedelta | None = None
    ) -> AsyncIterator[None]:
        """See `Client.hold`: the history is kept until the block ends."""
        take = partial(self._client.hold, name, at, max_age)
        hold = await self._threads.take(take, ClientHold.release)
        try:
            yield
        finally:
            await asyncio.shield(self._run(hold.release))

    async def drop_hold(self, name: str) -> HoldRecord:
        """See `Client.drop_hold`."""
        return await self._run(self._client.drop_hold, name)
