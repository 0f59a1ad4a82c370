"""The client: the names of `Store`, on a store that another process serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from kvstore import joins
from kvstore.arguments import VALUE_COLUMNS
from kvstore.batch import Batch
from kvstore.client import calls, streams
from kvstore.client.joins import RemoteSide
from kvstore.client.metrics import metrics_of
from kvstore.client.pool import Pool
from kvstore.client.snapshots import ClientSnapshot
from kvstore.client.tables import ClientDefinitions, ClientRows, ClientTable
from kvstore.client.tasks import ClientTasks
from kvstore.client.transactions import RemoteTransactions
from kvstore.client.upkeep import ServedUpkeep
from kvstore.client.writes import SentWriteSet
from kvstore.codec.tuples import desc
from kvstore.commit import Durability, Expires, sent_expiry
from kvstore.joins import Join, OnGone
from kvstore.mapping import MappingCodec, StoreMapping
from kvstore.metrics import Metric
from kvstore.mvcc import Version
from kvstore.span import Span
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.evolve import IndexColumns
from kvstore.tasks import Tasks
from kvstore.timestamp import TimeLike, Timestamp
from kvstore.txn import UNCHECKED, Transaction, Unchecked, transact

T = TypeVar("T")


class Client(ServedUpkeep):
    """A store behind a server; `kvstore.connect` makes one. Use it from any thread.

    It has the methods of `Store`: same arguments, same results, same errors. Besides, each call
    raises `DeterminateError` if it surely did nothing, and `IndeterminateError` if that is unknown.
    Reads and writes are sent again for `patience` seconds first; a write that is sent again is done
    once. The rows of a scan or of changes that have begun are not asked for again.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._catalogue = Catalogue(ClientDefinitions(pool))
        self._transactions = RemoteTransactions(pool, self._catalogue)

    # -- the store --------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The directory of the store, for a client by path; None for a client of an address."""
        return self._pool.endpoint.store

    @property
    def tasks(self) -> Tasks:
        """The queue of the store's tasks, to submit tasks to. The owner's process does them."""
        return ClientTasks(self.call)

    def stats(self) -> dict[str, Any]:
        """See `Store.stats`."""
        return self._pool.send(calls.fields_of("stats"))

    def metrics(self) -> Mapping[str, Metric]:
        """See `Store.metrics`."""
        return metrics_of(self._pool.send(calls.fields_of("metrics")))

    def sync(self) -> Timestamp:
        """See `Store.sync`."""
        return Timestamp(self._pool.send(calls.fields_of("sync"))["upper"])

    def close(self) -> None:
        """Close the connections. The server and its store stay. Repeatable."""
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvstore.Client {self._pool.where}>"

    # -- reading ----------------------------------------------------------------------------

    def get(
        self, key: bytes, as_of: TimeLike | None = None, default: bytes | T | None = None
    ) -> bytes | T | None:
        """See `Store.get`."""
        value = self._pool.send(calls.get(key, as_of))
        return default if value is None else value

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """See `Store.get_many`."""
        return self._pool.send(calls.get_many(keys, self.times_still(as_of)))

    def floor(
        self, key: bytes, as_of: TimeLike | None = None, prefix: bytes | None = None
    ) -> tuple[bytes, bytes] | None:
        """See `Store.floor`."""
        return self._pool.send(calls.floor_many([key], as_of, prefix))[0]

    def floor_many(
        self,
        keys: Sequence[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None = None,
        prefix: bytes | None = None,
    ) -> list[tuple[bytes, bytes] | None]:
        """See `Store.floor_many`."""
        return self._pool.send(calls.floor_many(keys, self.times_still(as_of), prefix))

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `Store.scan`."""
        reader = self.scan_batches(start, end, prefix, as_of, reverse, limit)
        for batch in reader:
            yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)

    def keys(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[bytes]:
        """See `Store.keys`. No value travels."""
        request = calls.keys(Span.of(start, end, prefix), as_of, reverse, limit)
        for batch in streams.rows(self._pool, request):
            yield from batch.column(0).to_pylist()

    def count(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
    ) -> int:
        """See `Store.count`. The server counts."""
        return self._pool.send(calls.count(Span.of(start, end, prefix), as_of))

    def mapping(self, codec: str | MappingCodec = "bytes", *, prefix: bytes = b"") -> StoreMapping:
        """See `Store.mapping`. Each look-up and each write is a round trip."""
        return StoreMapping(self, codec, prefix)

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
        *,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """See `Store.scan_batches`. The whole stream is of one time."""
        request = calls.scan(Span.of(start, end, prefix), as_of, reverse, limit, batch_rows)
        return streams.rows(self._pool, request)

    def join(
        self,
        labels: object,
        key: str = "id",
        at: str | None = "ts",
        max_age: timedelta | None = None,
        *,
        columns: tuple[str, str] = VALUE_COLUMNS,
        on_gone: OnGone = "error",
    ) -> pa.RecordBatchReader:
        """See `Store.join`. Labels travel in pieces; a lease keeps the history until the end."""
        source = Join(self, max_age=max_age, columns=columns)
        return joins.join(labels, [source], key=key, at=at, on_gone=on_gone)

    def join_side(self) -> RemoteSide:
        """The side of the served store in a join of several sources: see `kvstore.join`."""
        return RemoteSide(self._pool)

    def snapshot(self, as_of: TimeLike | None = None) -> ClientSnapshot:
        """See `Store.snapshot`. A lease keeps the time readable, and runs out by itself once this
        process has ended."""
        return ClientSnapshot(self._pool, as_of)

    def history(self, key: bytes) -> list[Version]:
        """See `Store.history`."""
        return self._pool.send(calls.history(key))

    def lease(self, name: str, at: TimeLike | None = None, *, seconds: float) -> Timestamp:
        """Keep history from `at` on readable (default: the whole kept history), for readers in many
        processes. Returns the time from which it is kept.

        The lease `name`, a random text of the caller, ends after `seconds`; the same call again
        moves it or makes it longer. Raises `HistoryGoneError` and `NotYetWrittenError` for `at`.
        """
        return Timestamp(self._pool.send(calls.lease(name, at, seconds))["at"])

    def release_lease(self, name: str) -> None:
        """End a lease before its time. Repeatable."""
        self._pool.send(calls.release_lease(name))

    # -- writing ----------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Store.put`. A timedelta counts from the time at which the server takes the write."""
        return self._pool.send(calls.put(key, value, durability, expires))

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """See `Store.delete`."""
        return self._pool.send(calls.delete(key, durability))

    def delete_range(
        self,
        start: bytes,
        end: bytes,
        idempotent: bool = False,
        *,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.delete_range`."""
        return self._pool.send(calls.delete_range(start, end, idempotent, durability))

    def put_if(
        self,
        key: bytes,
        value: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Store.put_if`."""
        condition = (expected, unchanged_since)
        request = calls.conditional("put_if", key, value, *condition, durability, expires)
        return self._pool.send(request)

    def delete_if(
        self,
        key: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """See `Store.delete_if`."""
        request = calls.conditional("delete_if", key, None, expected, unchanged_since, durability)
        return self._pool.send(request)

    def pop(self, key: bytes, *, durability: Durability | None = None) -> bytes | None:
        """See `Store.pop`."""
        return self._pool.send(calls.pop(key, durability))

    def update(
        self,
        key: bytes,
        change: Callable[[bytes | None], bytes | None],
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> bytes | None:
        """See `Store.update`. The function runs here, in a transaction: three round trips or
        more. It runs again after each conflict."""
        update = partial(Transaction.update, key=key, change=change, expires=expires)
        return self.transact(update, durability=durability)

    def increment(
        self,
        key: bytes,
        by: int = 1,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> int:
        """See `Store.increment`."""
        return self._pool.send(calls.increment(key, by, durability, expires))

    def ttl(self, key: bytes) -> timedelta | None:
        """See `Store.ttl`."""
        return self._pool.send(calls.ttl(key))

    def persist(self, key: bytes, *, durability: Durability | None = None) -> Timestamp | None:
        """See `Store.persist`."""
        return self._pool.send(calls.persist(key, durability))

    def put_many(
        self,
        rows: object,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """See `Store.put_many`. The rows travel together."""
        with self.batch(durability=durability) as batch:
            batch.put_many(rows, expires=expires)
        return batch.timestamp

    def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """See `Store.revert_range`. The server finds the changes and writes the new versions."""
        return self._pool.send(calls.revert_range(Span(start, end), to))

    def batch(self, *, durability: Durability | None = None) -> Batch:
        """See `Store.batch`. The writes travel together when the block ends."""
        rows = self.table_rows()
        commit = partial(rows.commit, durability)
        return Batch(commit, SentWriteSet, rows=lambda: rows, due=sent_expiry)

    def transaction(self, *, durability: Durability | None = None) -> Transaction:
        """See `Store.transaction`. Each read is a round trip, and so is the commit, which brings
        the reads with the writes. Raises `HistoryGoneError` once GC has removed history that the
        transaction reads: run it again."""
        return self._transactions.begin(durability)

    def transact(
        self,
        body: Callable[[Transaction], T],
        *,
        attempts: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        durability: Durability | None = None,
    ) -> T:
        """See `Store.transact`."""
        begin = partial(self.transaction, durability=durability)
        return transact(begin, body, attempts=attempts, wait=wait)

    # -- tables -----------------------------------------------------------------------------

    def table(
        self,
        name: str,
        schema: pa.Schema | type | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
    ) -> ClientTable:
        """See `Store.table`. Rows are encoded here; the server makes the entries of indexes, checks
        the unique ones, and decodes the rows of scans. A token with a prefix opens no table."""
        return self.table_rows().table(name, schema, key, indexes, event_time)

    def tables(self) -> list[str]:
        """See `Store.tables`."""
        return self._catalogue.names()

    def table_rows(self) -> ClientRows:
        """The writer of rows of tables, for a handle that reads them elsewhere."""
        return ClientRows(self._pool, self._catalogue, self.transact)
