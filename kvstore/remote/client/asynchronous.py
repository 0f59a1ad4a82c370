"""The client for asyncio: the methods of `Client` as coroutines, whose waits are in threads.

    async with await kvstore.connect_async("http://127.0.0.1:7447") as client:
        await client.put(b"k", b"v")
        async for key, value in client.scan(prefix=b"k"): ...

A method of `Client` becomes a method here by one line, `get = awaited(Client.get)`, with its
signature and its docstring. Written out are the methods that are another thing for asyncio: a block
(`async with`), a property, a wait that the end of the client ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, TypeVar

from typing_extensions import ParamSpec

from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp
from kvstore.batch import Batch
from kvstore.changes.epochs import Changeset
from kvstore.codec.tuples import desc
from kvstore.errors import ClosedError, KVStoreError
from kvstore.feeds import FeedBatch
from kvstore.limits import CLIENT_CONNECTIONS_MAX
from kvstore.remote.client.client import Client, ClientHold, ClientSnapshot, connect
from kvstore.remote.client.tables import ClientTable
from kvstore.timeline.durability import Durability

if TYPE_CHECKING:
    import pyarrow as pa


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

    async def run(self, call: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
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
        if not ending.ask_for_end():
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

    def ask_for_end(self) -> bool:
        """Mark the end as wanted. Returns whether the caller has to do it: no thread is inside."""
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
# From a method to a coroutine.
#
# A call runs in a thread of a small pool, which waits for the socket instead of the event loop.
# `CLIENT_CONNECTIONS_MAX` calls run at one time; more calls wait for their turn.

S_co = TypeVar("S_co", covariant=True)


class AsyncFace(Generic[S_co]):
    """The methods of an object of a client, for asyncio."""

    def __init__(self, sync: S_co, threads: CallThreads) -> None:
        """`sync` is the object, `threads` are the threads of its client."""
        self._sync, self._threads = sync, threads


def awaited(
    method: Callable[Concatenate[S_co, P], T],
) -> Callable[Concatenate[AsyncFace[S_co], P], Coroutine[Any, Any, T]]:
    """A method as a coroutine."""

    @wraps(method)
    async def call(self: AsyncFace[S_co], /, *args: P.args, **options: P.kwargs) -> T:
        return await self._threads.run(method, self._sync, *args, **options)

    call.__qualname__ = f"awaited({method.__qualname__})"
    return call


def streamed(
    method: Callable[Concatenate[S_co, P], Iterable[T]],
) -> Callable[Concatenate[AsyncFace[S_co], P], AsyncIterator[T]]:
    """A method that returns an iterator, as an asynchronous iterator: a step is a call."""

    @wraps(method)
    def call(self: AsyncFace[S_co], /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        return self._threads.each(partial(method, self._sync, *args, **options))

    return _by_async_for(call)


def streamed_pairs(
    method: Callable[Concatenate[S_co, P], Iterable[tuple[bytes, bytes]]],
) -> Callable[Concatenate[AsyncFace[S_co], P], AsyncIterator[tuple[bytes, bytes]]]:
    """The method `scan`, as an asynchronous iterator. A step takes a batch of `scan_batches`: a
    change of the thread for each row would cost more than the row."""

    @wraps(method)
    async def call(
        self: AsyncFace[Any], /, *args: P.args, **options: P.kwargs
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        begin = partial(self._sync.scan_batches, *args, **options)
        async for batch in self._threads.each(begin):
            for row in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                yield row

    return _by_async_for(call)


def _by_async_for(call: Callable[P, T]) -> Callable[P, T]:
    call.__doc__ = f"{call.__doc__}\n\nThe items come by `async for`."
    return call


# --------------------------------------------------------------------------------------------------
# A snapshot of a served store, for asyncio.


class AsyncSnapshot(AsyncFace[ClientSnapshot]):
    """Reads at `as_of`; `AsyncClient.snapshot` makes it. See `ClientSnapshot`."""

    @property
    def as_of(self) -> Timestamp:
        """The time of all reads."""
        return self._sync.as_of

    get = awaited(ClientSnapshot.get)
    get_many = awaited(ClientSnapshot.get_many)
    floor = awaited(ClientSnapshot.floor)
    floor_many = awaited(ClientSnapshot.floor_many)
    scan = streamed_pairs(ClientSnapshot.scan)
    scan_batches = streamed(ClientSnapshot.scan_batches)
    join = streamed(ClientSnapshot.join)

    async def table(self, name: str, *, row: type | None = None) -> AsyncTable:
        """See `ClientSnapshot.table`."""
        table = await self._threads.run(partial(self._sync.table, name, row=row))
        return AsyncTable(table, self._threads)

    close = awaited(ClientSnapshot.close)

    def __repr__(self) -> str:
        return f"<kvstore.AsyncSnapshot as of {self.as_of}>"


# --------------------------------------------------------------------------------------------------
# A table of a served store, for asyncio.


class AsyncTable(AsyncFace[ClientTable]):
    """Rows of a table; `AsyncClient.table` makes it. See `ClientTable`."""

    @property
    def name(self) -> str:
        """The name of the table."""
        return self._sync.name

    async def schema(self) -> pa.Schema:
        """See `Table.schema`. One round trip, as for each name below."""
        return await self._threads.run(lambda: self._sync.schema)

    async def key(self) -> list[str | desc]:
        """See `Table.key`."""
        return await self._threads.run(lambda: self._sync.key)

    async def indexes(self) -> dict[str, list[str | desc]]:
        """See `Table.indexes`."""
        return await self._threads.run(lambda: self._sync.indexes)

    async def event_time(self) -> str | None:
        """See `Table.event_time`."""
        return await self._threads.run(lambda: self._sync.event_time)

    async def expires(self) -> str | None:
        """See `Table.expires`."""
        return await self._threads.run(lambda: self._sync.expires)

    async def valid_to(self) -> str | None:
        """See `Table.valid_to`."""
        return await self._threads.run(lambda: self._sync.valid_to)

    get = awaited(ClientTable.get)
    get_many = awaited(ClientTable.get_many)
    scan = streamed(ClientTable.scan)
    rows = streamed(ClientTable.rows)
    find = streamed(ClientTable.find)
    join = streamed(ClientTable.join)
    changes = streamed(ClientTable.changes)
    history = awaited(ClientTable.history)
    latest = awaited(ClientTable.latest)
    ttl = awaited(ClientTable.ttl)
    persist = awaited(ClientTable.persist)
    count = awaited(ClientTable.count)

    put = awaited(ClientTable.put)
    insert = awaited(ClientTable.insert)
    put_batch = awaited(ClientTable.put_batch)
    update = awaited(ClientTable.update)
    delete = awaited(ClientTable.delete)
    delete_many = awaited(ClientTable.delete_many)
    delete_range = awaited(ClientTable.delete_range)
    revert = awaited(ClientTable.revert)

    clear = awaited(ClientTable.clear)
    drop = awaited(ClientTable.drop)
    alter = awaited(ClientTable.alter)
    build_index = awaited(ClientTable.build_index)

    def __repr__(self) -> str:
        return f"<kvstore.AsyncTable {self.name!r}>"


# --------------------------------------------------------------------------------------------------
# The client for asyncio.


class AsyncClient(AsyncFace[Client]):
    """A store behind a server, for asyncio; `kvstore.connect_async` makes one. See `Client`."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, CallThreads(repr(client)))

    # -- the store --------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """See `Client.path`."""
        return self._sync.path

    stats = awaited(Client.stats)
    metrics = awaited(Client.metrics)
    sync = awaited(Client.sync)

    async def close(self) -> None:
        """Close the connections, behind the calls under way. Repeatable."""
        try:
            await self._threads.close()
        finally:
            self._sync.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<kvstore.AsyncClient {self._sync!r}>"

    # -- times ------------------------------------------------------------------------------

    async def upper(self) -> Timestamp:
        """See `Store.upper`."""
        return await self._threads.run(lambda: self._sync.upper)

    async def since(self) -> Timestamp:
        """See `Store.since`."""
        return await self._threads.run(lambda: self._sync.since)

    async def durable(self) -> Timestamp:
        """See `Store.durable`."""
        return await self._threads.run(lambda: self._sync.durable)

    async def whole_since(self) -> Timestamp:
        """See `Store.whole_since`."""
        return await self._threads.run(lambda: self._sync.whole_since)

    async def indexed_since(self) -> Timestamp:
        """See `Store.indexed_since`."""
        return await self._threads.run(lambda: self._sync.indexed_since)

    async def store_id(self) -> str:
        """See `Store.store_id`."""
        return await self._threads.run(lambda: self._sync.store_id)

    now = awaited(Client.now)
    to_time = awaited(Client.to_time)

    async def wait_beyond(self, upper: int, *, timeout: float | None = None) -> None:
        """See `Client.wait_beyond`. A coroutine that is cancelled ends the wait. Raises
        `ClosedError` if the client is closed meanwhile."""
        gone = threading.Event()
        try:
            with self._threads.waiting(gone.set):
                wait = partial(self._sync.wait_beyond, upper, timeout=timeout, stop=gone.is_set)
                await self._threads.run(wait)
            if gone.is_set():
                raise ClosedError(repr(self._sync))
        finally:
            gone.set()

    # -- reading ----------------------------------------------------------------------------

    get = awaited(Client.get)
    get_many = awaited(Client.get_many)
    floor = awaited(Client.floor)
    floor_many = awaited(Client.floor_many)
    scan = streamed_pairs(Client.scan)
    scan_batches = streamed(Client.scan_batches)
    keys = streamed(Client.keys)
    count = awaited(Client.count)
    history = awaited(Client.history)
    ttl = awaited(Client.ttl)
    join = streamed(Client.join)

    @asynccontextmanager
    async def snapshot(self, as_of: TimeLike | None = None) -> AsyncIterator[AsyncSnapshot]:
        """See `Client.snapshot`: `async with client.snapshot() as snap: await snap.get(...)`."""
        take = partial(self._sync.snapshot, as_of)
        taken = await self._threads.take(take, ClientSnapshot.close)
        snapshot = AsyncSnapshot(taken, self._threads)
        try:
            yield snapshot
        finally:
            await asyncio.shield(snapshot.close())

    # -- writing ----------------------------------------------------------------------------

    put = awaited(Client.put)
    put_many = awaited(Client.put_many)
    put_if = awaited(Client.put_if)
    delete = awaited(Client.delete)
    delete_if = awaited(Client.delete_if)
    delete_range = awaited(Client.delete_range)
    trim = awaited(Client.trim)
    pop = awaited(Client.pop)
    increment = awaited(Client.increment)
    persist = awaited(Client.persist)
    update = awaited(Client.update)
    """`change` is a plain function, and runs in a thread."""
    transact = awaited(Client.transact)
    """`body` is a plain function, and runs in a thread."""
    revert_range = awaited(Client.revert_range)

    @asynccontextmanager
    async def batch(self, *, durability: Durability | None = None) -> AsyncIterator[Batch]:
        """See `Store.batch`: `async with client.batch() as b: b.put(...)`."""
        batch = self._sync.batch(durability=durability)
        batch.__enter__()
        try:
            yield batch
        except BaseException as error:
            batch.__exit__(type(error), error, None)
            raise
        await self._threads.run(batch.__exit__, None, None, None)

    # -- tables -----------------------------------------------------------------------------

    tables = awaited(Client.tables)

    async def table(self, name: str, *new: Any, **made: Any) -> AsyncTable:
        """See `Client.table`. The rows are awaited: `await table.put(row)`."""
        table = await self._threads.run(partial(self._sync.table, name, *new, **made))
        return AsyncTable(table, self._threads)

    # -- changes ----------------------------------------------------------------------------

    changes = streamed(Client.changes)
    events = streamed(Client.events)
    changes_batches = streamed(Client.changes_batches)
    epochs = streamed(Client.epochs)
    generations = awaited(Client.generations)
    reshard = awaited(Client.reshard)
    force_quiescence = awaited(Client.force_quiescence)
    drop_feed = awaited(Client.drop_feed)

    async def feed(
        self, name: str, *args: Any, follow: bool = True, **options: Any
    ) -> AsyncIterator[FeedBatch]:
        """The batches of a feed, see `Store.feed`. The next step of the loop acks the batch before
        it, so a consumer that fails receives its last batch again. A feed that follows raises
        `ClosedError` once the client is closed."""
        feed = await self._threads.run(partial(self._sync.feed, name, *args, **options))
        try:
            with self._threads.waiting(feed.close):
                async for batch in self._threads.each(partial(feed.batches, follow=follow)):
                    yield batch
                    await self._threads.run(feed.ack, batch)
            if follow:  # a feed that follows ends with its client alone
                raise ClosedError(repr(self._sync))
        finally:
            feed.close()  # so a step that waits for news ends, behind its request

    @asynccontextmanager
    async def changeset(self) -> AsyncIterator[Changeset]:
        """See `Client.changeset`. Coroutines and tasks that begin inside the block take part."""
        changeset = self._sync.changeset()
        await self._threads.take(changeset.open, lambda _: changeset.end())
        with changeset:
            try:
                yield changeset
            finally:
                await asyncio.shield(self._threads.run(changeset.end))

    # -- upkeep, with the right `admin` -----------------------------------------------------

    gc = awaited(Client.gc)
    checkpoint = awaited(Client.checkpoint)
    clear_range = awaited(Client.clear_range)
    revert_import = awaited(Client.revert_import)
    verify = awaited(Client.verify)
    drop_hold = awaited(Client.drop_hold)

    @asynccontextmanager
    async def hold(
        self, name: str, at: TimeLike | None = None, max_age: AgeLike | None = None
    ) -> AsyncIterator[None]:
        """See `Client.hold`: the history is kept until the block ends."""
        take = partial(self._sync.hold, name, at, max_age)
        hold = await self._threads.take(take, ClientHold.release)
        try:
            yield
        finally:
            await asyncio.shield(self._threads.run(hold.release))


async def connect_async(
    address: str | os.PathLike[str],
    token: str | None = None,
    *,
    ca: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    patience: float | None = None,
) -> AsyncClient:
    """The same as `connect`, for asyncio."""
    how = partial(connect, address, token, ca=ca, timeout=timeout, patience=patience)
    return AsyncClient(await asyncio.to_thread(how))
