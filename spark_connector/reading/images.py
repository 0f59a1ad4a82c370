"""Changes with images, as Delta has them: the old and the new value of each changed key.

    a put of a live key         update_preimage (the old value), update_postimage (the new value)
    a put of another key        insert
    a delete of a live key      delete (the old value)
    a delete of another key     no row, because nothing changed
    a range delete              a delete of each key that was alive, at the time of the range delete

The changes of a span come by key, and so does the state at the start of the window. Both are read
side by side, in pieces of about `PIECE_BYTES` that lie between two keys. The events of a piece are
sorted together by key and time, in columns: then the old value of a change is in the row before it.
With `revisions=latest` only the last change of each key is kept, with the images of the whole
window.

Invariants
1. A piece has all events of its keys. Only a key whose changes alone are larger than a piece is
   cut, between two of its changes; the last change before the cut is the state before the next
   piece.
2. Memory holds one piece of changes, as much of the state before them, and their images: it does
   not grow with the span, nor with the number of changes of one key.

Costs a pass over the state at the start, between the first and the last changed key.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

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

PIECE_BYTES = 16 << 20
"""Bytes of changes, and of the state before them, that are sorted at once. They are in memory up to
six times: as they came, sorted, and as images with the old values."""

PIECE_EVENTS = 1 << 18
"""Events that are sorted at once: a range delete makes one for each key of a piece."""

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
    found = origin.points(
        span, since=since, upto=upto, latest=latest, columns=_STORED, rows=rows, by_key=True
    )
    ranges = origin.ranges(span, since=since, upto=upto, latest=latest)
    state: _ByKey | None = None
    cut: pa.Table = _EVENTS.empty_table()
    for piece in _pieces(found, max(PIECE_EVENTS // (1 + len(ranges)), 1)):
        if not piece.changes.num_rows and not ranges and not cut.num_rows:
            return
        if state is None:  # the state before the first commit is empty
            start = span.start if ranges else piece.changes["key"][0].as_py()
            wanted = span.intersect(start, None)
            assert wanted is not None, "changes of the span lie in it"
            state = _ByKey(origin.state(wanted, since, ["key", "value"], rows) if since > 0 else ())
        # Without range deletes no key behind the last changed one has an image.
        end = piece.end if ranges or piece.end is not None else _behind_last(piece.changes)
        for before, changes in _with_state(piece.changes, state, end, ranges, since):
            known = pa.concat_tables([cut, before, changes])
            expanded = (_expanded(each, known, piece, cut) for each in ranges)
            events = pa.concat_tables([known, *expanded])
            events = events.take(pc.sort_indices(events, _ORDER)).combine_chunks()
            yield from _with_images(events, latest=latest).to_batches(max_chunksize=rows)
            cut = cut.slice(0, 0)  # its key is below all later ones, or goes on
        cut = _as_before(piece) if piece.goes_on else cut.slice(0, 0)


class _Piece(NamedTuple):
    """Changes by key, oldest first: those below the key `end`. With `goes_on` they are of one key,
    which has more changes behind them, perhaps."""

    changes: pa.Table
    end: bytes | None
    goes_on: bool = False

    @property
    def last(self) -> tuple[bytes, int]:
        """The key and the time of the last change."""
        return self.changes["key"][-1].as_py(), self.changes["timestamp"][-1].as_py()


def _pieces(batches: Iterable[pa.RecordBatch], events_max: int) -> Iterator[_Piece]:
    """Cut changes, which come by key, into pieces. The last one has no end, and may be empty."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for batch in (part for whole in batches for part in _halves(whole)):
        held.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if size < PIECE_BYTES and count < events_max:
            continue
        table = _events(held, _POINT).combine_chunks()
        keys = table["key"]
        last = keys[-1].as_py()
        border = _position(keys, last)
        if border:
            yield _Piece(table.slice(0, border), last)
        else:
            yield _Piece(table, last + b"\0", goes_on=True)
        rest = table.slice(border if border else table.num_rows).drop_columns(["rank"])
        held = [batch for batch in rest.to_batches() if batch.num_rows]
        count, size = rest.num_rows, rest.nbytes
    yield _Piece(_events(held, _POINT).combine_chunks(), None)


def _halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each half is no larger than a piece, or has one row."""
    if batch.num_rows > 1 and batch.nbytes > PIECE_BYTES:
        half = batch.num_rows // 2
        yield from _halves(batch.slice(0, half))
        yield from _halves(batch.slice(half))
    elif batch.num_rows:
        yield batch


class _ByKey:
    """A state, which comes by key, and is taken up to one key after the other."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._rest: pa.RecordBatch | None = None

    def below(self, end: bytes | None) -> Iterator[pa.RecordBatch]:
        """The rows that are left with keys below `end`."""
        while True:
            rest = self._rest if self._rest is not None else next(self._batches, None)
            self._rest = None
            if rest is None:
                return
            count = rest.num_rows if end is None else _position(rest.column("key"), end)
            if count < rest.num_rows:
                self._rest = rest.slice(count)
            yield from _halves(rest.slice(0, count))
            if self._rest is not None:
                return


def _position(keys: pa.Array | pa.ChunkedArray, key: bytes, *, behind: bool = False) -> int:
    """The number of `keys`, which ascend, below `key`; with `behind` also those equal to it."""
    search = bisect.bisect_right if behind else bisect.bisect_left
    return search(range(len(keys)), key, key=lambda place: keys[place].as_py())


def _behind_last(changes: pa.Table) -> bytes:
    return changes["key"][-1].as_py() + b"\0" if changes.num_rows else b""


def _events(batches: Sequence[pa.RecordBatch], rank: int) -> pa.Table:
    table = pa.Table.from_batches([batch.cast(_POINTS) for batch in batches], schema=_POINTS)
    ranks = pa.array(np.full(table.num_rows, rank, np.int8))
    return table.append_column(_EVENTS.field("rank"), ranks)


def _as_before(piece: _Piece) -> pa.Table:
    """The last change of a piece, as the state before the next one."""
    last = piece.changes.slice(piece.changes.num_rows - 1)
    ranks = pa.array([_BEFORE], pa.int8())
    # A copy: the slice would keep the whole piece in memory.
    return last.set_column(4, _EVENTS.field("rank"), ranks).take(pa.array([0]))


def _with_state(
    changes: pa.Table, state: _ByKey, end: bytes | None, ranges: Sequence[Change], since: int
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The changes of a piece, each part of them with the rows that its keys had at `since`."""
    keys, passed = changes["key"], 0
    kept: list[pa.RecordBatch] = []
    count = size = 0
    for batch in state.below(end):
        found = batch.column("key")
        low = _position(keys, found[0].as_py())
        high = _position(keys, found[-1].as_py(), behind=True)
        touched = pc.is_in(found, value_set=keys.slice(low, high - low).combine_chunks())
        for each in ranges:
            touched = pc.or_(touched, _covers(each, found))
        batch = _stored(batch.filter(touched), since)
        if not batch.num_rows:
            continue
        kept.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if size >= PIECE_BYTES or count >= max(PIECE_EVENTS // (1 + len(ranges)), 1):
            yield _events(kept, _BEFORE), changes.slice(passed, high - passed)
            passed, kept, count, size = high, [], 0, 0
    yield _events(kept, _BEFORE), changes.slice(passed)


def _stored(state: pa.RecordBatch, since: int) -> pa.RecordBatch:
    """The rows of a state as puts at its time."""
    count = state.num_rows
    columns = [
        state.column("key"),
        pa.array(np.full(count, since)),
        pa.array(np.full(count, OP_PUT, np.uint8)),
        state.column("value"),
    ]
    return pa.RecordBatch.from_arrays(columns, names=_STORED)


def _expanded(change: Change, known: pa.Table, piece: _Piece, cut: pa.Table) -> pa.Table:
    """A delete of each known key in the span of a range delete, at its time. For a key that is cut
    the range delete belongs to the piece whose changes it lies between."""
    keys = pc.unique(known.filter(_covers(change, known["key"]))["key"])
    if cut.num_rows and change.timestamp <= cut["timestamp"][0].as_py():
        keys = keys.filter(pc.not_equal(keys, cut["key"][0]))
    if piece.goes_on and change.timestamp > piece.last[1]:
        keys = keys.filter(pc.not_equal(keys, pa.scalar(piece.last[0], pa.binary())))
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
