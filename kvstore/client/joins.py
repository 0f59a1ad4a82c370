"""The side of a join that a server answers: labels go to the server, and history stays there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Final

import pyarrow as pa

from kvstore.client import calls, streams
from kvstore.client.pool import Pool
from kvstore.errors import KVStoreError
from kvstore.joins.side import VALUE_FIELDS, Asked, Search
from kvstore.limits import JOIN_ROWS_FIRST, JOIN_ROWS_MAX, SERVER_BODY_BYTES_MAX
from kvstore.timestamp import TIMESTAMP_MAX

LEASE_S: Final = 3600.0
"""Seconds for which a join keeps the history of the server, if its process ends before the join
does."""


class RemoteSide:
    """See `kvstore.joins.side.Side`."""

    fields = VALUE_FIELDS

    def __init__(self, pool: Pool, newest: int | None = None) -> None:
        """No label is above `newest`: the newest complete time of the server by default."""
        self._pool, self._newest = pool, newest

    @contextmanager
    def opened(self) -> Iterator[RemoteAnswers]:
        """Take a lease on all history that the server keeps."""
        name = secrets.token_hex(12)
        self._pool.send(calls.lease(name, None, LEASE_S))
        try:
            yield RemoteAnswers(self._pool, self._newest)
        finally:
            with suppress(KVStoreError):  # it ends by itself
                self._pool.send(calls.release_lease(name))


class RemoteAnswers:
    """See `kvstore.joins.side.Answers`. One round trip for each piece of labels."""

    def __init__(self, pool: Pool, newest: int | None = None) -> None:
        self._pool, self._given = pool, newest
        self.rows_first = JOIN_ROWS_FIRST
        self.rows_max = JOIN_ROWS_MAX

    @cached_property
    def newest(self) -> int:
        """The newest complete time of the server at the first use, unless another one was given."""
        if self._given is not None:
            return self._given
        return int(self._pool.send(calls.newest()))

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels and the timestamps of their versions."""
        request = calls.join(
            labels.keys,
            pa.array(labels.times, pa.int64()),
            labels.first,
            None if search.age_max == TIMESTAMP_MAX else search.age_max,
            null_if_gone=search.is_gone_null,
        )
        if len(request.body) > SERVER_BODY_BYTES_MAX and len(labels.times) > 1:
            return None  # the labels come again in halves

        def read(reader: pa.RecordBatchReader) -> list[pa.Array] | None:
            size = 0
            batches: list[pa.RecordBatch] = []
            for batch in reader:
                size += batch.column(0).nbytes
                if size > search.bytes_max and len(labels.times) > 1:
                    return None
                batches.append(batch)
            table = pa.Table.from_batches(batches, pa.schema(VALUE_FIELDS)).combine_chunks()
            return [pa.concat_arrays(column.chunks) for column in table.columns]

        return streams.read_whole(self._pool, request, read)
