"""The records of expiries in a backup: `kvstore.mvcc.expiry_records` has their keys.

They are ordinary rows of a collection. A read of changes meets the records of the window by key,
beside the changes. A restore of a few keys reads the records of these keys from where they lie,
beside the rows. A restore into a live store reads the time of each key from the records, because
the import that it makes has records of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.backup.shard.rows.rules import OP_PUT, AsOf, View, Window
from kvstore.backup.shard.shard_snapshot import ShardSnapshot
from kvstore.base.span import Span
from kvstore.bulk.sort import sorted_batches
from kvstore.changes import Change
from kvstore.changes.events import ExpiringChange
from kvstore.mvcc.expiry_records import EXPIRY, carried_of, decode_waiting, waiting_from


class Rows(Protocol):
    """Reads the live rows of a snapshot in a span, with the times at which they expire in a column
    `expires`, as `bulk.PartWriter` takes it. It may write to `scratch`, which the caller
    removes."""

    def __call__(self, span: Span, scratch: Path) -> Iterator[pa.RecordBatch]: ...


RECORDS: Final = Span.of_prefix(EXPIRY)
"""Where the records lie."""


def has_expiries(snapshot: ShardSnapshot, span: Span | None = None) -> bool:
    """Whether `span`, if it holds the records of expiries, has any in a snapshot, alive or not."""
    span = span or Span()
    found = span.intersect(RECORDS.start, RECORDS.end)
    return found is not None and _any(snapshot.view(Window(-1, snapshot.as_of), found))


def some_expire(snapshot: ShardSnapshot, span: Span) -> bool:
    """Whether keys in `span` may expire, as of the time of a snapshot."""
    return _any(snapshot.view(AsOf(snapshot.as_of), carried_of(span)))


def rows_with_expiries(snapshot: ShardSnapshot) -> Rows | None:
    """A reader of the live rows of a snapshot with the times at which they expire. None if the
    snapshot has no records of expiries."""
    return partial(_with_expiries, snapshot) if has_expiries(snapshot) else None


def _with_expiries(snapshot: ShardSnapshot, span: Span, scratch: Path) -> Iterator[pa.RecordBatch]:
    """The live rows in `span` by key, each with its time in a column `expires` and the row with
    which it expires in `expires_with`, null where it has none. The records are sorted in bounded
    memory, on disk if they are many: in `scratch`."""
    records = sorted_batches(_dues(snapshot, AsOf(snapshot.as_of), span), scratch)
    ahead = pa.Table.from_batches([], _DUES)
    for batch in snapshot.read(span):
        if not batch.num_rows:
            continue
        last = batch.column("key")[-1].as_py()
        while not ahead.num_rows or ahead.column("key")[-1].as_py() <= last:
            more = next(records, None)
            if more is None:
                break
            ahead = pa.concat_tables([ahead, pa.Table.from_batches([more.select(_DUES.names)])])
        for name, column in _expires(batch, ahead).items():
            batch = batch.append_column(name, column)
        yield batch
        ahead = ahead.filter(pc.greater(ahead.column("key"), pa.scalar(last, pa.binary())))


_DUES: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("timestamp", pa.int64()),
        ("due", pa.int64()),
        ("row", pa.binary()),
    ]
)
"""The `waiting` records of keys: the key, the time of the record, the due time, and the row with
which an index entry expires."""


def _dues(snapshot: ShardSnapshot, view: View, span: Span) -> Iterator[pa.RecordBatch]:
    for batch in snapshot.view(view, waiting_from(0)):
        put = batch.filter(pc.equal(batch.column("op"), OP_PUT))
        keys, times, values = (
            put.column(name).to_pylist() for name in ("key", "timestamp", "value")
        )
        found = map(decode_waiting, keys, values)
        rows = [
            (row.key, at, row.due.time, row.row)
            for row, at in zip(found, times, strict=True)
            if row.key in span
        ]
        if rows:
            columns = [
                pa.array(column, field.type)
                for column, field in zip(zip(*rows, strict=True), _DUES, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_DUES)


def with_dues(
    snapshot: ShardSnapshot, changes: Iterator[Change], view: View, span: Span
) -> Iterator[Change]:
    """`changes` of keys in `span`, in their order, with the due times that the records of `view`
    have. The records are sorted in bounded memory, on disk if they are many."""
    with TemporaryDirectory(prefix="kvstore-dues-") as scratch:
        sorted_dues = sorted_batches(_dues(snapshot, view, span), Path(scratch))
        records = _by_key(sorted_dues)
        key, dues = next(records, _NO_DUES)
        for change in changes:
            while key is not None and key < change.key:
                key, dues = next(records, _NO_DUES)
            due = dues.get(change.timestamp) if key == change.key and change.op == "put" else None
            yield change if due is None else ExpiringChange.of(change, due)


_NO_DUES: Final[tuple[bytes | None, dict[int, int]]] = (None, {})


def _by_key(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes | None, dict[int, int]]]:
    """Each key of sorted records, with the due times of its versions by their timestamps."""
    rows = (
        row
        for batch in batches
        for row in zip(*(batch.column(name).to_pylist() for name in _DUES.names[:3]), strict=True)
    )
    for key, found in groupby(rows, key=itemgetter(0)):
        yield key, {timestamp: due for _, timestamp, due in found}


def _expires(rows: pa.RecordBatch, records: pa.Table) -> dict[str, pa.Array]:
    """The columns about the expiry of each of `rows`, from the record with its key and its
    timestamp."""
    found = pc.index_in(_versions(rows), value_set=_versions(records))
    return {
        "expires": records.column("due").combine_chunks().take(found),
        "expires_with": records.column("row").combine_chunks().take(found),
    }


def _versions(rows: pa.RecordBatch | pa.Table) -> pa.Array:
    """The keys of rows, each with its timestamp behind it."""
    times = np.asarray(rows.column("timestamp")).astype(">u8")
    data = pa.py_buffer(times.tobytes())
    suffixes = pa.Array.from_buffers(pa.binary(8), len(times), [None, data]).cast(pa.binary())
    keys = rows.column("key")
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    return pc.binary_join_element_wise(keys, suffixes, b"")


def records_of(snapshot: ShardSnapshot, view: View, span: Span) -> Iterator[pa.RecordBatch]:
    """The records of the keys in `span`."""
    yield from snapshot.view(view, carried_of(span))
    for batch in snapshot.view(view, waiting_from(0)):
        keys = batch.column("key").to_pylist()
        wanted = pa.array([decode_waiting(key).key in span for key in keys], pa.bool_())
        yield batch.filter(wanted)


def _any(batches: Iterable[pa.RecordBatch]) -> bool:
    return any(batch.num_rows for batch in batches)
