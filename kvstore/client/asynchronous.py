"""The client for asyncio: the methods of `Client` as coroutines.

    async with await kvstore.connect_async("http://127.0.0.1:7447") as client:
        await client.put(b"k", b"v")
        async for key, value in client.scan(prefix=b"k"): ...

A call runs in a thread of a small pool, which waits for the socket instead of the event loop.
`CLIENT_CONNECTIONS_MAX` calls run at one time; more calls wait for their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.batch import Batch
from kvstore.claims import HoldRecord
from kvstore.client.async_capture import AsyncCapture
from kvstore.client.async_snapshots import AsyncSnapshot
from kvstore.client.async_tables import AsyncTable
from kvstore.client.holds import ClientHold
from kvstore.client.snapshots import ClientSnapshot
from kvstore.commit import Durability, Expires
from kvstore.gc import GcReport
from kvstore.metrics import Metric
from kvstore.mvcc import Version
from kvstore.timestamp import TimeLike, Timestamp
from kvstore.txn import Transaction
from kvstore.verify import StoreReport

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


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
