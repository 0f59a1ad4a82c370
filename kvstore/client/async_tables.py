"""A table of a served store, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.client.tables import ClientTable
from kvstore.client.threads import CallThreads
from kvstore.codec.tuples import desc
from kvstore.commit import Expires
from kvstore.tables.found import RowVersion
from kvstore.timestamp import TimeLike, Timestamp

if TYPE_CHECKING:
    import pyarrow as pa


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
