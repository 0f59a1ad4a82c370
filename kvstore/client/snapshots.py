"""A snapshot of a served store: reads at one time, under a lease that the client renews.

Invariants
1. A read shows the state at `as_of`, or raises `HistoryGoneError`: the time alone decides its rows,
   and the lease keeps them.
2. A client that has gone leaves a lease that ends by itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain

import pyarrow as pa

from kvstore import joins
from kvstore.arguments import VALUE_COLUMNS
from kvstore.client import calls, streams
from kvstore.client.calls import ns
from kvstore.client.joins import RemoteSide
from kvstore.client.pool import FROM_CLIENT, Pool
from kvstore.client.reply import Reply
from kvstore.errors import ClosedError, HistoryGoneError, KVStoreError
from kvstore.forks import own
from kvstore.joins import Join, OnGone
from kvstore.limits import CLIENT_SNAPSHOT_LEASE_S
from kvstore.span import Span
from kvstore.timestamp import TimeLike, Timestamp

_ATTEMPTS = 3


class ClientSnapshot:
    """Reads at `as_of`, which stays readable until the snapshot is closed; see `Store.snapshot`.

    Each read renews the lease if a third of `CLIENT_SNAPSHOT_LEASE_S` has passed. After a pause
    longer than the lease a read raises `HistoryGoneError` if garbage collection has removed history
    of its time.
    """

    def __init__(self, pool: Pool, as_of: TimeLike | None) -> None:
        """Take the lease. Raises `HistoryGoneError` and `NotYetWrittenError` for `as_of`."""
        self._pool, self._is_open = pool, True
        resolve = calls.verb("resolve", {"as_of": ns(as_of)}, Reply.json, is_read=True)
        self._name = secrets.token_hex(12)
        for attempt in range(_ATTEMPTS):
            try:
                self.as_of = Timestamp(pool.send(resolve)["as_of"])
                self._lease()
                own(self, repr(self), remedy=FROM_CLIENT)
                return
            except HistoryGoneError:  # noqa: PERF203  # GC has passed the newest time meanwhile
                if as_of is not None or attempt == _ATTEMPTS - 1:
                    raise

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """As `Client.get`, at this snapshot's time."""
        value = self._open().send(calls.get(key, self.as_of))
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `Client.get_many`, at this snapshot's time."""
        return self._open().send(calls.get_many(keys, self.as_of))

    def floor(self, key: bytes, prefix: bytes | None = None) -> tuple[bytes, bytes] | None:
        """As `Client.floor`, at this snapshot's time."""
        return self._open().send(calls.floor_many([key], self.as_of, prefix))[0]

    def floor_many(
        self, keys: Sequence[bytes], prefix: bytes | None = None
    ) -> list[tuple[bytes, bytes] | None]:
        """As `Client.floor_many`, at this snapshot's time."""
        return self._open().send(calls.floor_many(keys, self.as_of, prefix))

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """As `Client.scan`, at this snapshot's time."""
        batches = self.scan_batches(start, end, prefix, reverse=reverse, limit=limit)
        return chain.from_iterable(
            zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
            for batch in batches
        )

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """As `Client.scan_batches`, at this snapshot's time."""
        span = Span.of(start, end, prefix)
        request = calls.scan(span, self.as_of, reverse, limit, batch_rows)
        return streams.rows(self._open(), request)

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
        """As `Snapshot.join`: no label is above this snapshot's time."""
        source = Join(self, max_age=max_age, columns=columns)
        return joins.join(labels, [source], key=key, at=at, on_gone=on_gone)

    def join_side(self) -> RemoteSide:
        """The side of this snapshot in a join of several sources: see `kvstore.join`."""
        self._open()
        return RemoteSide(self._pool, newest=self.as_of)

    def close(self) -> None:
        """End the claim on history. Repeatable."""
        if self._is_open:
            self._is_open = False
            with suppress(KVStoreError):  # it ends by itself
                self._pool.send(calls.release_lease(self._name))

    def __repr__(self) -> str:
        return f"<kvstore.ClientSnapshot as of {self.as_of}>"

    def __enter__(self) -> ClientSnapshot:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Pool:
        if not self._is_open:
            raise ClosedError("the snapshot")
        if time.monotonic() > self._renew_at:
            self._lease()
        return self._pool

    def _lease(self) -> None:
        self._renew_at = time.monotonic() + CLIENT_SNAPSHOT_LEASE_S / 3
        self._pool.send(calls.lease(self._name, self.as_of, CLIENT_SNAPSHOT_LEASE_S))
