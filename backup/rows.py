"""Rows of versions: from a store, by window, in the order of a shard, and back into entries of the
`data` family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.backup.shard import OP_DELETE, OP_DELETE_RANGE, OP_PUT, VERSIONS_SCHEMA
from kvstore.backup.shard.rows.rules import Longs, Sorted
from kvstore.backup.shard.shard_snapshot import ShardSnapshot
from kvstore.base.span import Span
from kvstore.bulk.manifest import EncodedBy
from kvstore.bulk.part import kinds_of, suffixes_of
from kvstore.changes import Change
from kvstore.changes.events import Operation
from kvstore.feeds.replica import SmallExport
from kvstore.limits import ARROW_BYTES_MAX, ARROW_ROWS_MAX
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.arrow import binary_arrays, key_words
from kvstore.mvcc.passes import VersionColumns
from kvstore.store import Store
from kvstore.tables.definition import name_of
from kvstore.timeline.reserved import DEFINITIONS, FIRST_ROW

# --------------------------------------------------------------------------------------------------
# Rows of versions: made from changes, and turned into entries of the `data` family.
#
# The columns are `backup.shard.VERSIONS_SCHEMA`. Rows are sorted by key, then newest first; at one
# key and time the range tombstone comes first. Imports and reverts are expanded to the versions
# that they made.

_OP_CODE = {"delete": OP_DELETE, "put": OP_PUT, "delete_range": OP_DELETE_RANGE}


def row_batches(changes: Iterable[Change]) -> Iterator[pa.RecordBatch]:
    """Turn changes, which come by key, into record batches bounded in rows and bytes."""
    return batches_in_order(_newest_first(changes))


def batches_in_order(changes: Iterable[Change]) -> Iterator[pa.RecordBatch]:
    """As `row_batches`, in the order in which the changes come. Holds one batch."""
    rows: list[Change] = []
    size = 0
    for change in changes:
        rows.append(change)
        size += len(change.key) + len(change.value or b"")
        if len(rows) >= ARROW_ROWS_MAX or size >= ARROW_BYTES_MAX:
            yield _batch(rows)
            rows, size = [], 0
    if rows:
        yield _batch(rows)


class Points(NamedTuple):
    """Puts and deletes, as `SstFile.add_rows` takes them."""

    keys: pa.Array
    values: pa.Array
    suffixes: bytes
    kinds: bytes


def points_of(batch: pa.RecordBatch) -> Points:
    """The puts and deletes of a batch, in their order."""
    are_ranges = pc.equal(batch.column("op"), OP_DELETE_RANGE)
    if are_ranges.true_count:
        batch = batch.filter(pc.invert(are_ranges))
    suffixes = suffixes_of(batch.column("timestamp").to_numpy())
    kinds = kinds_of(pc.equal(batch.column("op"), OP_PUT))
    return Points(batch.column("key"), batch.column("value"), suffixes, kinds)


def range_rows(batch: pa.RecordBatch) -> list[tuple[bytes, bytes, int]]:
    """Start, end and timestamp of the range tombstones in a batch."""
    ranges = batch.filter(pc.equal(batch.column("op"), OP_DELETE_RANGE))
    columns = (ranges.column(name).to_pylist() for name in ("key", "end_key", "timestamp"))
    return list(zip(*columns, strict=True))


def _newest_first(changes: Iterable[Change]) -> Iterator[Change]:
    """Reverse the changes of each key, which come oldest first."""
    group: list[Change] = []
    for change in changes:
        if group and group[0].key != change.key:
            yield from sorted(group, key=_row_order)
            group = []
        group.append(change)
    yield from sorted(group, key=_row_order)


def _row_order(change: Change) -> tuple[int, bool]:
    return -change.timestamp, change.op != "delete_range"


def _batch(rows: list[Change]) -> pa.RecordBatch:
    timestamps, ops, keys, ends, values = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(keys, pa.binary()),
            pa.array(timestamps, pa.int64()),
            pa.array([_OP_CODE[op] for op in ops], pa.uint8()),
            pa.array(values, pa.binary()),
            pa.array(ends, pa.binary()),
        ],
        schema=VERSIONS_SCHEMA,
    )


# --------------------------------------------------------------------------------------------------
# From a store to rows: the versions of a window as record batches, in the order of a shard.
#
# The rows of a small window come from the change index and are sorted. A large window, such as the
# window of a full backup, is one pass over the store, column by column.

_OP_CODES = np.zeros(256, np.uint8)
_OP_CODES[[Operation.PUT, Operation.DELETE, Operation.DELETE_RANGE]] = [
    OP_PUT,
    OP_DELETE,
    OP_DELETE_RANGE,
]

_ORDER = [("key", "ascending"), ("timestamp", "descending"), ("op", "descending")]


class RowPosition(NamedTuple):
    """A row's place in the order of rows."""

    key: bytes
    timestamp: int
    op: int


class Exported(NamedTuple):
    """The sorted rows of a window. They are whole from `whole_since` on.

    `is_small`: the change index found them, so there is no work to share with other processes.
    """

    whole_since: int
    rows: Iterator[pa.RecordBatch]
    is_small: bool = False


def exported(
    store: Store,
    *,
    since: int | None,
    upto: int,
    after: RowPosition | None = None,
    span: Span | None = None,
) -> Exported:
    """Export every version in `(since, upto]`; with `since=None` every version that is kept.

    `after` leaves out the rows up to that position. `span` leaves out the keys outside it, and the
    range tombstones that start outside it; a range tombstone that starts inside comes whole. So
    spans that cover the key space give each row once.

    Raises `HistoryGoneError` if the store no longer has the window.
    """
    wanted = span or Span()
    if after is not None:
        wanted = Span(max(wanted.start, after.key), wanted.end)
    found = store.replication.export(since=since, upto=upto, span=wanted)
    if isinstance(found, SmallExport):
        rows = _few(found.changes)
    else:
        rows = _with_ranges(_point_batches(found.columns), found.tombstones)
    if after is not None:
        rows = _behind(rows, after)
    return Exported(found.whole_since, rows, is_small=isinstance(found, SmallExport))


def _few(changes: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The changes of a small window as sorted rows. The sort is the only copy."""
    if not changes:
        return
    together = changes[0] if len(changes) == 1 else pa.concat_batches(changes)
    columns = {name: together.column(name) for name in VERSIONS_SCHEMA.names}
    columns["op"] = pa.array(_OP_CODES[columns["op"].to_numpy()])
    rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=VERSIONS_SCHEMA)
    rows = Sorted(rows, _order(rows)).whole()
    for start in range(0, rows.num_rows, ARROW_ROWS_MAX):
        yield rows.slice(start, ARROW_ROWS_MAX)


def _order(rows: pa.RecordBatch) -> Longs:
    """The sorted order, as row numbers.

    Keys that differ in their first bytes are sorted as numbers: 10,000 keys take 0.4 ms, not 1.2.
    """
    prefixes = key_words(rows.column("key"), skip=0)
    order = np.argsort(prefixes)
    ascending = prefixes[order]
    if (ascending[1:] != ascending[:-1]).all():
        return order
    places: Longs = pc.sort_indices(rows, _ORDER).to_numpy()
    return places


def _behind(rows: Iterator[pa.RecordBatch], after: RowPosition) -> Iterator[pa.RecordBatch]:
    """The rows that follow `after` in the order of rows."""
    for batch in rows:
        key, timestamp, op = (batch.column(name) for name in ("key", "timestamp", "op"))
        same_time = pc.and_(pc.equal(timestamp, after.timestamp), pc.less(op, after.op))
        behind = pc.or_(pc.less(timestamp, after.timestamp), same_time)
        later_key = pc.greater(key, pa.scalar(after.key, pa.binary()))
        same_key = pc.equal(key, pa.scalar(after.key, pa.binary()))
        yield batch.filter(pc.or_(later_key, pc.and_(same_key, behind)))


def _point_batches(columns: Iterator[VersionColumns]) -> Iterator[pa.RecordBatch]:
    for found in columns:
        first = 0
        for values in binary_arrays(found.values):
            step = -(-len(values) // (values.nbytes // ARROW_BYTES_MAX + 1))
            for start in range(0, len(values), step):
                yield _points(found, first + start, values.slice(start, step))
            first += len(values)


def _points(found: VersionColumns, start: int, values: pa.Array) -> pa.RecordBatch:
    count = len(values)
    is_value = found.is_value[start : start + count]
    if not is_value.all():
        values = pc.if_else(pa.array(is_value), values, pa.scalar(None, pa.binary()))
    return pa.RecordBatch.from_arrays(
        [
            found.keys.slice(start, count),
            pa.array(found.timestamps[start : start + count]),
            pa.array(np.where(is_value, OP_PUT, OP_DELETE).astype(np.uint8)),
            values,
            pa.nulls(count, pa.binary()),
        ],
        schema=VERSIONS_SCHEMA,
    )


def _with_ranges(
    points: Iterator[pa.RecordBatch], tombstones: list[RangeTombstone]
) -> Iterator[pa.RecordBatch]:
    """Put each range tombstone into its place in the order of rows.

    A batch may end within the versions of one key. So a tombstone is due once a row at or behind
    its own position has come; its start key alone does not tell.
    """
    waiting = 0
    tombstones = sorted(tombstones, key=_place)
    for batch in points:
        last = (batch.column("key")[-1].as_py(), -batch.column("timestamp")[-1].as_py())
        due = waiting
        while due < len(tombstones) and _place(tombstones[due]) <= last:
            due += 1
        if due > waiting:
            batch = _merged(batch, tombstones[waiting:due])
            waiting = due
        yield batch
    for start in range(waiting, len(tombstones), ARROW_ROWS_MAX):
        yield _merged(None, tombstones[start : start + ARROW_ROWS_MAX])


def _place(tombstone: RangeTombstone) -> tuple[bytes, int]:
    """The position of a range tombstone: it stands before a point of the same key and time."""
    return tombstone.start, -tombstone.timestamp


def _merged(points: pa.RecordBatch | None, tombstones: list[RangeTombstone]) -> pa.RecordBatch:
    starts, ends, timestamps = zip(*tombstones, strict=True)
    count = len(tombstones)
    ranges = pa.RecordBatch.from_arrays(
        [
            pa.array(starts, pa.binary()),
            pa.array(timestamps, pa.int64()),
            pa.array([OP_DELETE_RANGE] * count, pa.uint8()),
            pa.nulls(count, pa.binary()),
            pa.array(ends, pa.binary()),
        ],
        schema=VERSIONS_SCHEMA,
    )
    together = ranges if points is None else pa.concat_batches([ranges, points])
    return together.take(pc.sort_indices(together, _ORDER))


def tables_in(snapshot: ShardSnapshot, span: Span) -> list[EncodedBy]:
    """The tables of a snapshot, if `span` may have rows of them."""
    if span.intersect(FIRST_ROW, None) is None:
        return []
    return [
        EncodedBy.of_stored(name_of(key), value)
        for batch in snapshot.read(DEFINITIONS)
        for key, value in zip(*(batch.column(n).to_pylist() for n in ("key", "value")), strict=True)
    ]
