"""Changes with images, as Delta has them: the old and the new value of each changed key.

    a put of a live key         update_preimage (the old value), update_postimage (the new value)
    a put of another key        insert
    a delete of a live key      delete (the old value)
    a delete of another key     no row, because nothing changed
    a range delete              a delete of each key that was alive, at the time of the range delete

The state at the start of the window and the changes of a partition are sorted together by key and
time, in columns. Then the old value of a change is in the row before it. With `revisions=latest`
only the last change of each key is kept, with the images of the whole window.

Costs a pass over the state at the start, between the first and the last changed key, and memory for
the changes of the partition and for the values that they replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backup.shard import OP_DELETE, OP_PUT, VERSIONS_SCHEMA
from kvstore.changes import Change
from kvstore.span import Span
from spark_connector.origins.origin import Origin

INSERT: Final = 3
PREIMAGE: Final = 4
POSTIMAGE: Final = 5
"""Codes in the column `op`, beside the codes of backup/version_rows.py."""

_EVENTS: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("timestamp", pa.int64()),
        ("op", pa.uint8()),
        ("value", pa.binary()),
        ("rank", pa.int8()),
    ]
)
_BEFORE, _RANGE, _POINT = 0, 1, 2
"""Ranks: at one time a range delete precedes the puts of the same commit."""

_ORDER: Final = [("key", "ascending"), ("timestamp", "ascending"), ("rank", "ascending")]
_STORED: Final = ["key", "timestamp", "op", "value"]
_POINTS: Final = pa.schema([_EVENTS.field(name) for name in _STORED])


def image_rows(
    origin: Origin, span: Span, *, since: int, upto: int, latest: bool, rows: int
) -> Iterator[pa.RecordBatch]:
    """The changes of `span` in `(since, upto]` with images, by key, as stored columns."""
    found = list(
        origin.points(span, since=since, upto=upto, latest=latest, columns=_STORED, rows=rows)
    )
    ranges = origin.ranges(span, since=since, upto=upto, latest=latest)
    changed = _events(found, _POINT)
    if not changed.num_rows and not ranges:
        return
    before = _state_before(origin, span, changed, ranges, since, rows)
    known = pa.concat_tables([before, changed])
    events = pa.concat_tables([known, *(_expanded(each, known) for each in ranges)])
    events = events.take(pc.sort_indices(events, _ORDER)).combine_chunks()
    yield from _with_images(events, latest=latest).to_batches(max_chunksize=rows)


def _events(batches: Sequence[pa.RecordBatch], rank: int) -> pa.Table:
    table = pa.Table.from_batches([batch.cast(_POINTS) for batch in batches], schema=_POINTS)
    ranks = pa.array(np.full(table.num_rows, rank, np.int8))
    return table.append_column(_EVENTS.field("rank"), ranks)


def _state_before(
    origin: Origin,
    span: Span,
    changed: pa.Table,
    ranges: Sequence[Change],
    since: int,
    rows: int,
) -> pa.Table:
    """The rows of the changed keys at `since`. The state before the first commit is empty."""
    kept = []
    keys = pc.unique(changed["key"])
    if not ranges:
        bounds = pc.min_max(keys)
        span = Span(bounds["min"].as_py(), bounds["max"].as_py() + b"\0")
    for batch in origin.state(span, since, ["key", "value"], rows) if since > 0 else ():
        touched = pc.is_in(batch.column("key"), value_set=keys)
        for each in ranges:
            touched = pc.or_(touched, _covers(each, batch.column("key")))
        batch = batch.filter(touched)
        count = batch.num_rows
        columns = [
            batch.column("key"),
            pa.array(np.full(count, since)),
            pa.array(np.full(count, OP_PUT, np.uint8)),
            batch.column("value"),
        ]
        kept.append(pa.RecordBatch.from_arrays(columns, names=_STORED))
    return _events(kept, _BEFORE)


def _expanded(change: Change, known: pa.Table) -> pa.Table:
    """A delete of each known key in the span of a range delete, at its time."""
    keys = pc.unique(known.filter(_covers(change, known["key"]))["key"])
    count = len(keys)
    columns = [
        keys,
        pa.array(np.full(count, int(change.timestamp))),
        pa.array(np.full(count, OP_DELETE, np.uint8)),
        pa.nulls(count, pa.binary()),
        pa.array(np.full(count, _RANGE, np.int8)),
    ]
    return pa.Table.from_arrays(columns, schema=_EVENTS)


def _covers(change: Change, keys: pa.Array) -> pa.Array:
    assert change.end_key is not None, "a range delete has an end"
    above = pc.greater_equal(keys, pa.scalar(change.key, pa.binary()))
    return pc.and_(above, pc.less(keys, pa.scalar(change.end_key, pa.binary())))


def _with_images(events: pa.Table, *, latest: bool) -> pa.Table:
    """Rows with images, from events that are sorted by key and time."""
    if latest and events.num_rows:
        is_last = np.append(~_follows(events), True)
        events = events.filter(pa.array(is_last | (events["rank"].to_numpy() == _BEFORE)))
    count = events.num_rows
    puts = events["op"].to_numpy() == OP_PUT
    alive = np.zeros(count, np.bool_)
    if count:
        alive[1:] = _follows(events) & puts[:-1]
    is_change = events["rank"].to_numpy() != _BEFORE
    # Two rows for an update, one for an insert, one for a delete of a live key, otherwise none.
    repeats = np.where(is_change, puts.astype(np.int64) + alive, 0)
    places = np.repeat(np.arange(count), repeats)
    second = np.zeros(len(places), np.bool_)
    second[1:] = places[1:] == places[:-1]
    is_put, was_alive = puts[places], alive[places]
    ops = np.where(is_put, np.where(was_alive, np.where(second, POSTIMAGE, PREIMAGE), INSERT), 0)
    old = (was_alive & ~second).astype(np.int64)
    return pa.Table.from_arrays(
        [
            events["key"].take(pa.array(places)),
            events["timestamp"].take(pa.array(places)),
            pa.array(ops.astype(np.uint8)),
            events["value"].take(pa.array(places - old)),
            pa.nulls(len(places), pa.binary()),
        ],
        names=VERSIONS_SCHEMA.names,
    )


def _follows(events: pa.Table) -> npt.NDArray[np.bool_]:
    """For each event but the first, whether it has the key of the event before it."""
    keys = pa.concat_arrays(events["key"].chunks)
    same: npt.NDArray[np.bool_] = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return same
