"""Rows of a snapshot in the forms that a store gives: live rows, versions of a key, changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backup.expiring import has_expiries, with_dues
from backup.restore import tables_in
from backup.shard import OP_DELETE_RANGE, OP_PUT, AsOf, Shard, ShardPart, ShardSnapshot, Window
from backup.shard.rows.part_reader import OpenedPart
from kvstore.arrow import rows_schema
from kvstore.changes import Change
from kvstore.limits import ROW_GROUP_ROWS_MAX
from kvstore.mvcc import Fragments, RangeTombstone, Version
from kvstore.span import Span
from kvstore.timestamp import Timestamp

_KEY = itemgetter(0)


def rows_of(
    snapshot: ShardSnapshot, span: Span, at: int, *, reverse: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of `span` that are alive at `at`. In reverse, the span is read piece by piece."""
    if not reverse:
        for batch in snapshot.view(AsOf(at), span):
            yield _pairs(batch)
        return
    rows = sum(batch.rows for batch in snapshot.batches)
    for split in reversed(snapshot.splits(rows // ROW_GROUP_ROWS_MAX + 1, span)):
        for batch in reversed(list(snapshot.view(AsOf(at), split.span))):
            yield _pairs(batch).take(pa.array(range(batch.num_rows - 1, -1, -1)))


def plain_span(snapshot: ShardSnapshot, span: Span) -> Span:
    """`span` without the keys of tables and expiries, unless it begins among them."""
    if span.plain() == span or tables_in(snapshot, span) or has_expiries(snapshot, span):
        return span.plain()
    return span


def state_of(
    held: AbstractContextManager[tuple[Shard, ShardSnapshot]], span: Span
) -> pa.RecordBatchReader:
    """The rows that are alive at the time of a snapshot, which is taken by this call and held until
    they are read to their end or dropped."""

    def rows() -> Iterator[pa.RecordBatch]:
        with held as (_, snapshot):
            # An empty batch first: taking it begins the snapshot, within the call.
            yield pa.RecordBatch.from_pylist([], schema=rows_schema())
            span_read = plain_span(snapshot, span)
            yield from rows_of(snapshot, span_read, snapshot.as_of, reverse=False)

    batches = rows()
    next(batches)
    return pa.RecordBatchReader.from_batches(rows_schema(), batches)


def versions_of(snapshot: ShardSnapshot, key: Span, at: int) -> list[Version]:
    """The versions of the one key in a span, newest first, up to `at`."""
    found: dict[int, bytes | None] = {}
    deleted: list[int] = []
    for batch in snapshot.view(Window(-1, at), key):
        columns = (batch.column(name).to_pylist() for name in ("timestamp", "op", "value"))
        for timestamp, op, value in zip(*columns, strict=True):
            if op == OP_DELETE_RANGE:
                deleted.append(timestamp)
            else:
                found[timestamp] = value
    for timestamp in deleted:
        found.setdefault(timestamp, None)  # of one commit, a write counts more than a range delete
    return [Version(key.start, Timestamp(t), found[t]) for t in sorted(found, reverse=True)]


def changes_of(
    snapshot: ShardSnapshot,
    span: Span,
    *,
    since: int,
    upto: int,
    latest: bool,
    opened: Callable[[ShardPart], OpenedPart],
) -> Iterator[Change]:
    """The changes of `(since, upto]` by key, as `kvstore.mvcc.diff` defines them, with the times at
    which their values expire."""
    if since >= upto:
        return iter(())
    # A window from 0 begins before all time: a store may have been given commits at 0 and below 1.
    window = Window(since or -1, upto)
    found = _changes_of(snapshot, span, window, latest=latest, opened=opened)
    if not has_expiries(snapshot):
        return found
    return with_dues(snapshot, found, AsOf(upto) if latest else window, span)


def _changes_of(
    snapshot: ShardSnapshot,
    span: Span,
    window: Window,
    *,
    latest: bool,
    opened: Callable[[ShardPart], OpenedPart],
) -> Iterator[Change]:
    since, upto = max(window.since, 0), window.upto
    fragments = Fragments.of(
        (start, end, time)
        for start, end, time in snapshot.range_tombstones(window, span, opened=opened)
    )
    is_state = latest and since == 0
    ranges: list[RangeTombstone] = []
    if not is_state:
        ranges = fragments.tombstones(span, since=since, upto=upto, latest=latest)
    waiting = iter(ranges)
    tombstone = next(waiting, None)
    for key, rows in groupby(_points(snapshot, window, span), key=_KEY):
        while tombstone is not None and tombstone.start <= key:
            yield _range_change(tombstone)
            tombstone = next(waiting, None)
        if not latest:
            for row in reversed(list(rows)):
                yield _point_change(row)
            continue
        newest = next(rows)
        hidden = fragments and fragments.newest(key, upto) > newest[1]
        if not hidden and (newest[2] == OP_PUT or not is_state):
            yield _point_change(newest)
    while tombstone is not None:
        yield _range_change(tombstone)
        tombstone = next(waiting, None)


def _points(snapshot: ShardSnapshot, window: Window, span: Span) -> Iterator[Any]:
    """Key, time, operation and value of the puts and deletes of a window, newest first."""
    return chain.from_iterable(
        zip(*(points.column(name).to_pylist() for name in _POINT), strict=True)
        for batch in snapshot.view(window, span)
        if (points := batch.filter(pc.not_equal(batch.column("op"), OP_DELETE_RANGE))).num_rows
    )


_POINT = ("key", "timestamp", "op", "value")


def _point_change(row: Any) -> Change:
    key, timestamp, op, value = row
    return Change(Timestamp(timestamp), "put" if op == OP_PUT else "delete", key, None, value)


def _range_change(found: RangeTombstone) -> Change:
    return Change(Timestamp(found.timestamp), "delete_range", found.start, found.end, None)


def _pairs(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [batch.column("key"), batch.column("value")]
    return pa.RecordBatch.from_arrays(columns, schema=rows_schema())
