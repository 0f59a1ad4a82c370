"""Rows out of an origin into Spark: state, changes and images, streams, history, typed rows."""

from __future__ import annotations

import bisect
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from itertools import pairwise
from operator import and_, or_
from typing import Any, Final, NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DayTimeIntervalType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kvstore.backup.rows import row_batches
from kvstore.backup.shard import OP_DELETE, OP_PUT, UNTIL, VERSIONS_SCHEMA, FileBlob, ShardPart
from kvstore.backup.shard.rows.part_reader import touches
from kvstore.base.clock import Clock
from kvstore.base.span import RESERVED, Span
from kvstore.base.timestamp import (
    NS_PER_SECOND,
    TIMESTAMP_MAX,
    TimeLike,
    Timestamp,
    reached,
    to_timestamp,
)
from kvstore.bulk.loading import key_text
from kvstore.bulk.outside import is_binary, outside_type, outside_values
from kvstore.changes import Change
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.limits import ARROW_ROWS_MAX
from kvstore.mvcc import Cover
from kvstore.mvcc.arrow import to_microseconds
from kvstore.mvcc.parallel_scan import split_span
from kvstore.spark.access import Access, Address, asked, freeze_objects, plain_errors
from kvstore.spark.format_options import ReadOptions, require_nanoseconds
from kvstore.spark.interfaces import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    utc_schema,
)
from kvstore.spark.load import quoted
from kvstore.spark.origins import (
    ChangeCount,
    CollectionOrigin,
    Group,
    HistoryEntry,
    Origin,
    OriginFrontiers,
    Place,
    find,
    open_origin,
)
from kvstore.spark.pushdown import (
    Comparison,
    checked,
    common,
    joined,
    key_spans,
    row_spans,
    to_text,
)
from kvstore.spark.releases import SOURCES, has, require
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition, definition_key, name_of
from kvstore.tables.nested import mapped, only_lists
from kvstore.timeline.frontiers import require_readable
from kvstore.timeline.reserved import DEFINITIONS

# --------------------------------------------------------------------------------------------------
# The columns of a read: their schema in Spark, and Arrow batches in this schema.
#
#     state     key binary  value binary
#     changes   key binary               the start of a range delete
#               end_key binary           for range deletes only
#               value binary             for puts only
#               _change_type string      put | delete | delete_range; with images:
#                                        insert | update_preimage | update_postimage | delete
#               _commit_version bigint   the commit's timestamp in nanoseconds: exact
#               _commit_timestamp timestamp    the same in microseconds, rounded up: as a time of a
#                                              read it has the commit
#
# Spark compares the schema of the first batch, nullability included, with the schema that it asked
# for, and trusts all later batches. So every batch is built to the asked schema. Spark prunes no
# columns of a Python source; a narrower schema from the user, or the option `columns`, does.

STATE: Final = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
CHANGES: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("end_key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("_change_type", StringType()),
        StructField("_commit_version", LongType()),
        StructField("_commit_timestamp", TimestampType()),
    ]
)

_CHANGE_TYPES: Final = (
    *("delete", "put", "delete_range"),
    *("insert", "update_preimage", "update_postimage"),
)
"""Names of the codes in the column `op`, of `backup.rows` and of `kvstore.changes.events`."""

_NULLS: Final = ("end_key", "value")
"""Columns of changes that have nulls. No other column has any."""

_SOURCE_OF: Final = {
    "_change_type": "op",
    "_commit_version": "timestamp",
    "_commit_timestamp": "timestamp",
}


def offered(*, changes: bool, columns: Sequence[str] | None) -> StructType:
    """The schema of a read without a schema from the user."""
    whole = CHANGES if changes else STATE
    if columns is None:
        return whole
    unknown = sorted(set(columns) - set(whole.names))
    if unknown or len(set(columns)) != len(columns):
        raise UsageError(
            f"columns={','.join(columns)}", f"pass some of {', '.join(whole.names)}, each once"
        )
    return StructType([whole[name] for name in columns])


def require_known(asked: StructType, *, changes: bool, columns: Sequence[str] | None) -> StructType:
    """Return the schema that Spark asks for.

    Raises `UsageError` if a column of it is unknown, or the option `columns` names other ones.
    """
    whole = CHANGES if changes else STATE
    for field in asked.fields:
        if field.name not in whole.names or whole[field.name].dataType != field.dataType:
            raise UsageError(
                f"a read has no column {field.name} {field.dataType.simpleString()}",
                f"a schema may have some of: {whole.simpleString()}",
            )
        if not field.nullable and changes and field.name in _NULLS:
            # The JVM would take a null for a value, or fail where it uses one.
            raise UsageError(f"column {field.name} has nulls", "leave NOT NULL out of the schema")
    if columns is not None:
        require_same(asked, columns)
    return asked


def require_same(asked: StructType, columns: Sequence[str]) -> None:
    """Raise `UsageError` unless the option `columns` names the columns of the schema."""
    if list(columns) != asked.names:
        raise UsageError(
            f"columns={','.join(columns)} and a schema of {', '.join(asked.names)} are both given",
            "pass one",
        )


def stored_columns(names: Sequence[str]) -> list[str]:
    """The stored columns that make up the asked columns, in the order of backup/rows.py."""
    needed = {_SOURCE_OF.get(name, name) for name in names}
    return [name for name in ("key", "timestamp", "op", "value", "end_key") if name in needed]


def arrow_schema(asked: StructType) -> pa.Schema:
    """The exact Arrow schema that Spark expects for `asked`."""
    return utc_schema(asked)


def shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of stored columns, turned into the asked columns."""
    columns = [column_of_change(batch, field.name) for field in schema]
    if not columns:  # for a count of rows Spark asks for no column
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def column_of_change(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The column `name` of a batch of stored columns."""
    if name == "_change_type":
        return _change_types().take(batch.column("op"))
    if name == "_commit_version":
        return batch.column("timestamp")
    if name == "_commit_timestamp":
        return to_microseconds(batch.column("timestamp"))
    return batch.column(name)


@cache
def _change_types() -> pa.Array:
    """Made at its first use, because the first `pa.array` of a process imports pandas: 0.2 s, for
    which a worker that plans would wait."""
    return pa.array(_CHANGE_TYPES)


# --------------------------------------------------------------------------------------------------
# Changes with images, as Delta has them: the old and the new value of each changed key.
#
#     a put of a live key         update_preimage (the old value), update_postimage (the new value)
#     a put of another key        insert
#     a delete of a live key      delete (the old value)
#     a delete of another key     no row, because nothing changed
#     a range delete              a delete of each key that was alive, at the time of the range
#                                 delete
#
# The changes of a span come by key, and so does the state at the start of the window. Both are read
# side by side, in pieces of about `PIECE_BYTES` that lie between two keys. The events of a piece
# are sorted together by key and time, in columns: then the old value of a change is in the row
# before it. With `revisions=latest` only the last change of each key is kept, with the images of
# the whole window.
#
# Invariants
# 1. A piece has all events of its keys. Only a key whose changes alone are larger than a piece is
#    cut, between two of its changes; the last change before the cut is the state before the next
#    piece.
# 2. Memory holds one piece of changes, as much of the state before them, and their images: it does
#    not grow with the span, nor with the number of changes of one key.
#
# Costs a pass over the state at the start, between the first and the last changed key.

INSERT: Final = 3
PREIMAGE: Final = 4
POSTIMAGE: Final = 5
"""Codes in the column `op`, beside the codes of backup/rows.py."""

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


# --------------------------------------------------------------------------------------------------
# The partitions of a read: one for each task, disjoint and complete.
#
# Invariants
# 1. All tasks read one place at one time, both fixed when the read is planned.
# 2. The spans of the partitions are disjoint and cover the spans of the read: each row is read
#    once. A range delete is cut to each span that the options name, and belongs to the partition
#    that its start then lies in.

BYTES_PER_SPLIT: Final = 128 << 20
"""Bytes that one task reads at most. It is Spark's size for files; a task costs tens of ms."""

BYTES_WORTH_SPLITTING: Final = 4 << 20
"""From this size on all cores get equally many partitions, so no core idles at the end."""

SPLITS_MAX: Final = 10_000


@dataclass(frozen=True)
class ReadPartition(InputPartition):
    """The rows that one task reads: their keys lie in `spans`, parts of `span` in order. They are
    rows of `table` if one is given. `wholes` are the spans that the options name. A state has no
    `since`."""

    place: Place
    span: Span
    spans: Sequence[Span]
    wholes: Sequence[Span]
    since: int | None
    upto: int
    latest: bool
    images: bool = False
    table: TypedRows | None = None


def require_window(since: int, upto: int, *, oldest: int, upper: int, latest: bool) -> None:
    """Raise unless the origin has all changes in `(since, upto]`. The caller has put each time
    through `kvstore.base.timestamp.reached`."""
    if since >= upper:
        raise NotYetWrittenError(as_of=Timestamp(since), upper=upper)
    if since > upto:
        raise UsageError(f"the window ({since}, {upto}] ends before it starts", "swap its ends")
    require_readable(upto, since=oldest, upper=upper)
    if since < oldest and not (latest and since == 0):
        raise HistoryGoneError(
            as_of=since, since=oldest, remedy="read the state, then changes after its time"
        )


def plan_partitions(
    origin: Origin,
    wholes: Sequence[Span],
    wanted: Sequence[Span],
    options: ReadOptions,
    *,
    since: int | None,
    upto: int,
    latest: bool,
    table: TypedRows | None = None,
) -> list[InputPartition]:
    """Cut a read into parts of about equal size. See `whole_spans`.

    The rows of a read lie in `wholes`. Filters leave the keys in `wanted`; a part may read keys
    between two of them. Both are disjoint and in order. A part without a wanted key is left out.
    The history that the parts read is kept for them.
    """
    between = [span for whole in wholes for span in common(wanted, whole)]
    if not between:
        return [InputPartition(None)]
    origin.keep(upto if since is None or (latest and since == 0) else since)
    files = origin.files(upto)
    count = options.partitions or _split_count(sum(file.size_bytes for file in files))
    # The rows of a row group come at once; a store's directory is seeked key by key.
    shared = files if origin.place.is_collection else []
    hull = Span(between[0].start, between[-1].end)
    base = ReadPartition(origin.place, hull, (), (), since, upto, latest, options.images, table)
    planned: list[InputPartition] = []
    for part in split_span(hull, files, count):
        mine = [whole for whole in wholes if whole.intersect(part.start, part.end) is not None]
        spans = [
            span
            for whole in mine
            if (both := whole.intersect(part.start, part.end)) is not None
            for span in joined(common(wanted, both), shared)
        ]
        if spans:
            planned.append(replace(base, span=part, spans=tuple(spans), wholes=tuple(mine)))
    return planned


def table_of(origin: Origin, options: ReadOptions, schema: pa.Schema, at: int) -> TypedRows | None:
    """The table that the options name, as it is at a time; None if they name none. Raises
    `UsageError` if the origin has no such table, or the table lacks a column of the schema."""
    if options.table is None:
        return None
    table = table_at(origin, options.table, at)
    table.require_known(schema, changes=options.changes)
    return table


def whole_spans(origin: Origin, options: ReadOptions, table: TypedRows | None) -> list[Span]:
    """The keys that the options name, as disjoint spans in order: the rows of a table, or keys of
    no table and no expiry."""
    if table is None:
        return [origin.narrow(span) for span in options.spans]
    return [Span.of_prefix(table.codec.key.prefix)]


def cut_state(
    origin: Origin, span: Span, as_of: int, *, rows: int | None, size: int | None
) -> bytes | None:
    """The key before which the state in `span` has a number of rows or bytes. None if it has fewer.

    At least one row lies before the key. Reads the rows before it, in bounded memory.
    """
    limit = rows if size is None else size
    assert limit is not None, "one of the two is given"
    files = origin.files(as_of)
    columns = ["key"] if size is None else ["key", "value"]
    passed, is_first = 0, True
    for part in split_span(span, files, _split_count(sum(file.size_bytes for file in files))):
        for batch in origin.state(part, as_of, columns, ARROW_ROWS_MAX):
            if not batch.num_rows:
                continue
            weights = np.ones(batch.num_rows, np.int64) if size is None else _row_bytes(batch)
            sums = passed + np.cumsum(weights)
            fitting = max(int(np.searchsorted(sums, limit, side="right")), int(is_first))
            if fitting < batch.num_rows:
                key: bytes = batch.column("key")[fitting].as_py()
                return key
            passed, is_first = int(sums[-1]), False
    return None


def _row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    keys, values = (pc.binary_length(batch.column(name)) for name in ("key", "value"))
    found: npt.NDArray[np.int64] = pc.add(keys, values).to_numpy().astype(np.int64)
    return found


def read_partition(
    partition: ReadPartition, options: ReadOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a partition as batches of the asked schema, bounded in rows and bytes."""
    freeze_objects()
    table = partition.table
    changes = partition.since is not None
    if table is None:
        columns = stored_columns(schema.names)
    else:
        columns = table.stored_columns(schema.names, changes=changes)
    with plain_errors(), open_origin(partition.place) as origin:
        for batch in _stored_rows(origin, partition, columns, options.batch_rows):
            for part in _bounded(batch, options.batch_bytes):
                if table is None:
                    yield shaped(part, schema)
                else:
                    yield table.shaped(part, schema, changes=changes)


def _stored_rows(
    origin: Origin, partition: ReadPartition, columns: list[str], rows: int
) -> Iterator[pa.RecordBatch]:
    if partition.since is None:
        for span in partition.spans:
            yield from origin.state(span, partition.upto, columns, rows)
        return
    window: Any = {"since": partition.since, "upto": partition.upto, "latest": partition.latest}
    if partition.images or partition.table is not None:
        for span in partition.spans:
            for batch in image_rows(origin, span, **window, rows=rows):
                is_wanted = pc.not_equal(batch.column("op"), PREIMAGE)
                yield batch if partition.images else batch.filter(is_wanted)
        return
    ours = [
        each
        for whole in partition.wholes
        for each in origin.ranges(whole, **window)
        if each.key in partition.span
    ]
    for batch in row_batches(ours):
        yield batch.select(columns)
    for span in partition.spans:
        yield from origin.points(span, **window, columns=columns, rows=rows)


def _bounded(batch: pa.RecordBatch, size_max: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each half fits, or has one row."""
    if batch.num_rows <= 1 or batch.nbytes <= size_max:
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from _bounded(batch.slice(0, half), size_max)
    yield from _bounded(batch.slice(half), size_max)


def _split_count(size_bytes: int) -> int:
    if size_bytes < BYTES_WORTH_SPLITTING:
        return 1
    cores = os.cpu_count() or 1
    return min(-(-size_bytes // (BYTES_PER_SPLIT * cores)) * cores, SPLITS_MAX)


# --------------------------------------------------------------------------------------------------
# Rows of a table as Spark has them: the columns of a typed read, and batches of these columns.
#
#     state     the columns of the table
#     changes   the columns of the table, and behind them _change_type, _commit_version and
#               _commit_timestamp, as `Table.changes` names them
#
#     durations     interval day to second, unless they have nanoseconds
#     other types   as `kvstore.bulk.outside` has them
#
# Invariants
# 1. No value is changed: Spark's timestamps have microseconds, so nanoseconds come as integers. A
#    column that Spark has no type for is refused by name, unless the read leaves it out.
# 2. Rows are decoded by the definition that the table has at the end of the read, which every task
#    gets with its partition. It lists the layouts of all older rows.

CHANGE_FIELDS: Final = [
    StructField(name, CHANGES[name].dataType, nullable=False)
    for name in ("_change_type", "_commit_version", "_commit_timestamp")
]
_CHANGE_NAMES: Final = frozenset(field.name for field in CHANGE_FIELDS)


def spark_type(kind: pa.DataType) -> DataType | None:
    """The type of Spark for a column of a table. None if Spark has none."""
    if pa.types.is_duration(kind) and kind.unit != "ns":
        return DayTimeIntervalType()
    found = outside_type(kind)
    return None if found is None else from_arrow_type(found, prefer_timestamp_ntz=True)


@dataclass(frozen=True)
class TypedRows:
    """A table as the tasks of a read need it: its name and its stored definition."""

    name: str
    stored: bytes

    def __reduce__(self) -> tuple[type[TypedRows], tuple[str, bytes]]:
        return TypedRows, (self.name, self.stored)  # without the codec

    @cached_property
    def codec(self) -> TableCodec:
        """The definition's codec, made once in each process."""
        return TableCodec(Definition.from_bytes(self.name, self.stored))

    @property
    def where(self) -> str:
        """The table in the words of an error."""
        return self.codec.definition.where

    def offered(self, *, changes: bool, columns: Sequence[str] | None) -> StructType:
        """The schema of a read without a schema from the user.

        Raises `UsageError` for a column that the table lacks, and for one that Spark has no type
        for.
        """
        added = CHANGE_FIELDS if changes else []
        named = {field.name: field for field in added}
        definition = self.codec.definition
        names = [*definition.by_name, *named] if columns is None else columns
        ours = [name for name in named if name in definition.by_name]
        if columns is None and ours:
            raise UsageError(
                f"{self.where} has a column {ours[0]!r}, and so have its changes",
                "name the other columns by the option columns",
            )
        if len(set(names)) != len(names):
            raise UsageError(f"columns={','.join(names)}", "name each column once")
        fields = []
        for name in names:
            if name in named:
                fields.append(named[name])
                continue
            column = definition.column(name)
            found = spark_type(column.type)
            if found is None:
                raise UsageError(
                    f"{self.where}, column {name!r}: Spark has no type for {column.type}",
                    "name the other columns by the option columns",
                )
            fields.append(StructField(name, found, column.is_nullable))
        return StructType(fields)

    def require_known(self, asked: pa.Schema, *, changes: bool) -> None:
        """Raise `UsageError` if the table lacks a column of the asked schema, or has it in another
        type, as after an alteration."""
        offered = arrow_schema(self.offered(changes=changes, columns=asked.names))
        for wanted, found in zip(asked, offered, strict=True):
            if wanted.type != found.type and not _same_but_for_width(wanted.type, found.type):
                raise UsageError(
                    f"{self.where}, column {found.name!r} is {found.type}, not {wanted.type}",
                    "leave the schema out, or begin the stream anew after an alteration",
                )

    def stored_columns(self, names: Sequence[str], *, changes: bool) -> list[str]:
        """The stored columns that the asked columns are made of. The columns of the key need no
        value."""
        definition = self.codec.definition
        keys = {column.name for column in definition.key_columns}
        of_rows = [name for name in names if not changes or name not in _CHANGE_NAMES]
        return ["key"] if keys.issuperset(of_rows) else ["key", "value"]

    def shaped(
        self, batch: pa.RecordBatch, schema: pa.Schema, *, changes: bool = False
    ) -> pa.RecordBatch:
        """A batch of stored columns, turned into the asked columns. A table may have columns that
        are called as those of `changes`."""
        ours = _CHANGE_NAMES if changes else frozenset[str]()
        names = [name for name in schema.names if name not in ours]
        keys = batch.column("key")
        has_values = "value" in batch.schema.names
        values = batch.column("value") if has_values else pa.nulls(len(keys), pa.binary())
        rows = self.codec.decode(keys, values, names)
        columns = [
            column_of_change(batch, field.name)
            if field.name in ours
            else self._cast(rows.column(field.name), field, keys)
            for field in schema
        ]
        if not columns:  # for a count of rows Spark asks for no column
            return rows
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _cast(self, array: pa.Array, field: pa.Field, keys: pa.Array) -> pa.Array:
        def named(row: int) -> str:
            return f"{key_text(self.codec, keys[row].as_py())}, column {field.name!r}"

        return outside_values(array, field.type, named)


def _same_but_for_width(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types differ in the width of Arrow's offsets alone, which a session chooses."""
    narrow = [mapped(only_lists(kind), _narrow) for kind in (one, other)]
    return bool(narrow[0] == narrow[1])


def _narrow(kind: pa.DataType) -> pa.DataType:
    if is_binary(kind):
        return pa.binary()
    return pa.string() if kind == pa.large_string() else kind


# -- in an origin ---------------------------------------------------------------------------


def table_at(origin: Origin, name: str, at: int) -> TypedRows:
    """The table `name` as it is at a time. Raises `UsageError` if the origin has none then."""
    key = definition_key(name)
    for batch in origin.state(Span.of_key(key), at, ["key", "value"], 1):
        if batch.num_rows:
            return TypedRows(name, batch.column("value")[0].as_py())
    found = [
        name_of(each)
        for batch in origin.state(DEFINITIONS, at, ["key"], 100)
        for each in batch.column("key").to_pylist()
    ]
    hint = f"there are {', '.join(found[:20])}" if found else "it has no table at that time"
    raise UsageError(f"there is no table {name!r} in {origin.place.path}", hint)


# --------------------------------------------------------------------------------------------------
# Batch reads of `format("kvstore")`: planning one read, and reading one of its partitions.
#
# Planning fixes the time and the place and cuts the key space, so all tasks read the same history.
#
# Filters narrow a read to the keys that they leave. The caller applies them again to the rows.

_COPY_ENDS: Final = (
    "a checkpoint or collection ends at its last commit or backup: leave the time out to read "
    "up to its end, or make a newer copy"
)


def table_schema(options: ReadOptions) -> StructType:
    """The columns of the table that the options name, at the end of the read. Opens the origin.

    Raises `UsageError` if there is no such table, or Spark has no type for a column.
    """
    assert options.table is not None, "the caller looked"
    end = options.upto if options.changes else options.as_of
    with open_origin(find(options.access), covering=[] if end is None else [end]) as origin:
        oldest, upper, _ = origin.frontiers(reaching=end or 0)
        options.require_nanoseconds(upper)
        at = upper - 1 if end is None else reached(end, upper - 1)
        require_readable(at, since=oldest, upper=upper)
        table = table_at(origin, options.table, at)
    return table.offered(changes=options.changes, columns=options.columns)


class QueryReader(DataSourceReader):
    """One batch read: the state as of a time, or the changes of a window."""

    def __init__(self, options: ReadOptions, schema: StructType, *, changes: bool) -> None:
        if changes and options.since is None:
            raise UsageError(
                "a read of changes needs a start",
                "pass startingTimestamp (changes after it; 0 is the beginning)",
            )
        self._options = options
        self._schema = arrow_schema(schema)
        self._changes = changes

    def partitions(self) -> list[InputPartition]:
        with plain_errors():
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        options = self._options
        with open_origin(find(options.access), covering=self._covering()) as origin:
            since, upto = self._window(origin)
            table = table_of(origin, options, self._schema, upto)
            if since is not None and since >= upto:
                return [InputPartition(None)]
            wholes = whole_spans(origin, options, table)
            wanted = self._wanted(origin, table, upto)
            window: Any = {"since": since, "upto": upto, "latest": options.latest}
            return plan_partitions(origin, wholes, wanted, options, **window, table=table)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadPartition):  # without partitions of ours Spark plans one
            return iter(())
        return read_partition(partition, self._options, self._schema)

    def _wanted(self, origin: Origin, table: TypedRows | None, upto: int) -> list[Span]:
        """The keys that can have rows of the query, by its filters."""
        filters = self._options.filters
        if filters is None:
            return [Span()]
        if table is None:
            return key_spans(filters)
        # The entries as of the end of a window do not name the rows that changed before.
        indexed = None if self._changes else origin
        return row_spans(indexed, table.codec, filters, upto)

    def _covering(self) -> list[int]:
        """The times that choose the chain of a collection. No time chooses the newest chain."""
        options = self._options
        end = options.upto if self._changes else options.as_of
        if end is None:
            return []
        from_start = options.since is None or (options.since == 0 and options.latest)
        return [end] if from_start else [options.since or 0, end]

    def _window(self, origin: Origin) -> tuple[int | None, int]:
        options = self._options
        end = options.upto if self._changes else options.as_of
        oldest, upper, _ = origin.frontiers(reaching=end or 0)
        options.require_nanoseconds(upper)
        end = None if end is None else Timestamp(reached(end, upper - 1))
        if end is not None and end >= upper and not origin.place.is_server:
            raise NotYetWrittenError(as_of=Timestamp(end), upper=upper, remedy=_COPY_ENDS)
        if not self._changes:
            as_of = upper - 1 if end is None else end
            require_readable(as_of, since=oldest, upper=upper)
            return None, as_of
        assert options.since is not None, "__init__ has checked it"
        since, upto = reached(options.since, upper - 1), upper - 1 if end is None else end
        require_window(since, upto, oldest=oldest, upper=upper, latest=options.latest)
        return since, upto


# --------------------------------------------------------------------------------------------------
# Streams of `format("kvstore")`: changes as they reach a collection, a new checkpoint or a server.
#
#     offset := {"timestamp": t, "store": id, "state": false}      all changes up to t are read
#               {"timestamp": t, "store": id, "state": true, "key": hex}
#                                                   the keys of the state at t below `key` are
#                                                   read; without `key`, none is
#
# A micro-batch is the window between two offsets. History never changes, so a micro-batch that is
# read again after a crash has the same rows. With a start given, a stream begins after it. Without
# one it begins with the state (as puts) at one time, and continues with the changes after that
# time.
#
# `maxRowsPerTrigger` cuts windows between commits, so a larger commit comes whole, and cuts the
# first state between keys. The last offset is the end of the origin, so an idle origin gives no
# micro-batches.
#
# The progress of a query names the end of the origin as `latestOffset`, with the lag of the stream
# behind its micro-batch:
#
#     lag_seconds   from the end of the micro-batch to the end of the origin
#     lag_rows      the changes between the two; absent while the first state is read, and where a
#                   token may not know it
#     lag_is_exact  false where `lag_rows` is an estimate, or counts other keys too
#
# Invariants
# 1. The two offsets of a micro-batch alone decide its rows, as long as no history is lost.
# 2. Offsets only grow, and stay below the origin's `upper`.


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of changes. All its state is in the offsets."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._target: int | None = None
        self._newest: dict[str, Any] | None = None
        self._lease = secrets.token_hex(12)
        """One lease for the whole stream: each micro-batch moves it."""

    @plain_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        frontiers = self._frontiers()
        self._options.require_nanoseconds(frontiers.upper)
        since = self._options.since
        if since is not None:  # later commits of the same microsecond are not skipped
            since = Timestamp(reached(since, frontiers.upper - 1))
        return _offset(since or 0, frontiers.store_id, state=since is None)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    @plain_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._frontiers().upper - 1

    @plain_errors()
    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        if start is None:  # a release without bounds of micro-batches asks for the end
            frontiers = self._frontiers()
            return _offset(frontiers.upper - 1, frontiers.store_id)
        with self._open(start) as origin:
            frontiers = origin.frontiers()
            end = self._end(origin, frontiers, start, limit)
            newest = _offset(frontiers.upper - 1, frontiers.store_id)
            self._newest = {**newest, **self._lag(origin, end, int(frontiers.upper) - 1)}
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of the origin at the last look, with the lag of the stream, for the progress of
        the query. It is no offset of a micro-batch."""
        return self._newest

    @plain_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        upto = int(end["timestamp"])
        is_state = start["state"]
        with self._open(start, upto) as origin:
            frontiers = origin.frontiers()
            # The first state is each key's latest change since the beginning of time.
            since = 0 if is_state else self._readable(start, frontiers)
            _require_same_store(end, frontiers, self._options.access.url)
            if is_state:
                upto = self._kept(upto, frontiers)
            whole, table = self._whole(origin, upto)
            span = _left(whole, start, end) if is_state else whole
            if since >= upto or span is None:
                return [InputPartition(None)]
            latest = is_state or self._options.latest
            oldest, upper = frontiers.since, frontiers.upper
            require_window(since, upto, oldest=oldest, upper=upper, latest=latest)
            window: Any = {"since": since, "upto": upto, "latest": latest}
            return plan_partitions(origin, [whole], [span], self._options, **window, table=table)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadPartition):
            return iter(())
        return read_partition(partition, self._options, self._schema)

    def _end(
        self,
        origin: Origin,
        frontiers: OriginFrontiers,
        start: dict[str, Any],
        limit: ReadLimit | None,
    ) -> dict[str, Any]:
        """The end of the micro-batch that begins at `start`."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        is_limited = rows is not None or size is not None
        since = self._readable(start, frontiers)
        target = frontiers.upper - 1
        if self._target is not None:
            target = min(target, self._target)
        if start["state"]:
            at, key = (since if "key" in start else target), None
            span = _left(self._whole(origin, at)[0], start) if is_limited else None
            if span is not None:
                key = cut_state(origin, span, at, rows=rows, size=size)
            return _offset(at, frontiers.store_id, state=key is not None, key=key)
        if since >= target:
            return start
        if is_limited:
            whole, _ = self._whole(origin, target)
            target = origin.cut(whole, since=since, upto=target, rows=rows, size=size)
        return _offset(target, frontiers.store_id)

    def _lag(self, origin: Origin, end: dict[str, Any], newest: int) -> dict[str, Any]:
        """How far a stream that has read up to `end` is behind the time `newest`. The rows that are
        left of a first state are not counted: that costs a pass over them."""
        at = int(end["timestamp"])
        lag: dict[str, Any] = {"lag_seconds": max(newest - at, 0) / NS_PER_SECOND}
        if not end["state"]:
            count: ChangeCount | None = ChangeCount(0, is_exact=True)
            if at < newest:
                count = origin.count(self._whole(origin, at)[0], since=at, upto=newest)
            if count is not None:
                lag |= {"lag_rows": count.rows, "lag_is_exact": count.is_exact}
        return lag

    def _frontiers(self) -> OriginFrontiers:
        with open_origin(find(self._options.access)) as origin:
            return origin.frontiers()

    def _open(self, start: dict[str, Any], *ends: int) -> Origin:
        """Open the origin; of a collection the chain that holds the times of the offsets."""
        began = [] if _is_fresh(start) else [int(start["timestamp"])]
        times = list(ends) if start["state"] and ends else [*began, *ends]
        place = find(self._options.access)._replace(lease=self._lease)
        return open_origin(place, covering=times)

    def _whole(self, origin: Origin, at: int) -> tuple[Span, TypedRows | None]:
        """The keys that the stream reads up to a time, and the table whose rows they are."""
        table = table_of(origin, self._options, self._schema, at)
        [whole] = whole_spans(origin, self._options, table)  # a stream takes no ranges
        return whole, table

    def _readable(self, start: dict[str, Any], frontiers: OriginFrontiers) -> int:
        """The start of the next window: the offset's time, or a later time that `_kept` allows."""
        _require_same_store(start, frontiers, self._options.access.url)
        since = int(start["timestamp"])
        return since if _is_fresh(start) else self._kept(since, frontiers)

    def _kept(self, time: int, frontiers: OriginFrontiers) -> int:
        """The time of an offset. If the history after it is lost: the oldest kept time, or an
        error."""
        if time >= frontiers.since:
            return time
        if self._options.fail_on_data_loss:
            raise HistoryGoneError(
                as_of=Timestamp(time),
                since=frontiers.since,
                remedy="changes are lost: start over from the state with a new checkpoint "
                'location, or set failOnDataLoss to "false" to continue without them',
            )
        return frontiers.since


class RefusedReader(DataSourceStreamReader):
    """A stream that cannot be read: each method raises the error of the failed constructor.

    If making a reader raises, Spark's runner of streams fails with an UnboundLocalError, which then
    is the last line that the user sees.
    """

    def __init__(self, error: UsageError) -> None:
        self._error = error

    @plain_errors()
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._error

    @plain_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def latestOffset(self, *_: Any) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


def _offset(
    timestamp: int, store_id: str, *, state: bool = False, key: bytes | None = None
) -> dict[str, Any]:
    offset = {"timestamp": int(timestamp), "store": store_id, "state": state}
    return offset if key is None else {**offset, "key": key.hex()}


def _left(whole: Span, start: dict[str, Any], end: dict[str, Any] | None = None) -> Span | None:
    """The part of the span of the first state from `start` to `end`. None if it is empty."""
    low = bytes.fromhex(start.get("key", ""))
    high = bytes.fromhex(end["key"]) if end is not None and "key" in end else None
    return whole.intersect(low, high)


def _is_fresh(offset: dict[str, Any]) -> bool:
    """Whether the stream has read nothing yet, so that it may begin with the state of any time."""
    return bool(offset["state"]) and "key" not in offset


def _require_same_store(offset: dict[str, Any], frontiers: OriginFrontiers, path: str) -> None:
    if offset["store"] != frontiers.store_id:
        raise UsageError(
            f"the stream has read store {offset['store']}; {path} holds {frontiers.store_id}",
            "give each store's stream a checkpoint location of its own",
        )


# --------------------------------------------------------------------------------------------------
# A collection's state by Spark's own Parquet scan, if this scan gives the right rows.
#
# A Python data source is slower: turning Arrow batches into rows of the JVM alone costs as much as
# Spark's whole scan of a Parquet file. But a filter over the columns of a part selects the rows
# that are alive at a time (`backup/shard/rows/part_format.py`), and most chains are one large batch
# with a few small batches behind it:
#
#     base     the files of the oldest batch that has rows, and the terms of that filter that are
#              not true of all rows by statistics
#     newer    the newest change of each key in the batches behind the base: read by the driver, and
#              broadcast
#     cover    the range deletes of all batches, as filters on the base
#
#     state = the rows of the base without the keys of newer, and the puts of newer
#
# Invariants
# 1. The rows are the same as with `format("kvstore")` at the same time. If footers and statistics
#    leave a doubt, the read goes to that source; `plan` returns the reason.
# 2. The call fixes files and time. If a file is missing when Spark reads it, because the chain has
#    been compacted meanwhile, the query fails; it never returns fewer rows.

NEWER_SHARE: Final = 32
"""The scan is native if the base has at least this many rows for each change behind it. Reading and
broadcasting a change costs 7 us, and a native scan saves 0.25 us for each row of the base."""

NEWER_ROWS_FEW: Final = 1_000
"""With at most this many changes behind the base a scan is native, however small the base is."""

NEWER_ROWS_MAX: Final = 200_000
NEWER_BYTES_MAX: Final = 64 << 20
"""Bounds of the changes that the driver reads and keeps in the plan."""

COVER_MAX: Final = 32
"""Range deletes that become filters. Each costs two comparisons per row."""

_PART_COLUMNS: Final = "key binary, timestamp long, op short, value binary, until long"
_NEWER_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary()), pa.field("op", pa.int8()), pa.field("value", pa.binary())]
)
_PARQUET: Final = {
    # The session may ignore such files; here this would leave out rows.
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    # The check of checksums costs too little to measure.
    "parquet.page.verify-checksum.enabled": "true",
}
_GLOB_CHARACTERS: Final = str.maketrans({mark: f"\\{mark}" for mark in "\\{}[]*?"})


@dataclass(frozen=True, slots=True)
class Scan:
    """The scan that Spark runs: `paths` as of a time, without the rows that `cover` deletes and the
    keys that `newer` replaces. `groups` are the row groups of the paths."""

    paths: tuple[str, ...]
    groups: Sequence[Group]
    span: Span
    as_of: int
    cover: Cover
    newer: pa.Table


def read_collection(
    spark: SparkSession,
    collection: Address,
    as_of: TimeLike | None = None,
    prefix: bytes | None = None,
    *,
    start: bytes | None = None,
    end: bytes | None = None,
    columns: Sequence[str] | None = None,
    native: bool | None = None,
) -> DataFrame:
    """The keys and values of a collection as of a time, by Spark's Parquet scan if possible.

    Rows and schema are as with `spark.read.format("kvstore")`. The scan is a fifth to a half faster
    if few changes lie behind the base, and no faster if many do. Spark pushes filters and prunes
    columns as with any Parquet file. `as_of` defaults to the newest time of the collection.

    This call fixes the time and the files. If the chain is compacted or expired before a query of
    this frame has ended, the query fails; a new call gives a frame that works. `format("kvstore")`
    looks for the files in each task instead.

    The scan is native for an unencrypted collection on a file system that all of Spark's machines
    see, if its oldest backup has most of the rows (the changes behind it are at most 1,000, or a
    thirty-second part of it; `compact()` merges them into it) and at most 32 range deletes apply.
    All other reads go through `format("kvstore")`. With `native=True` they raise a `UsageError`
    that tells the reason; with `native=False` every read goes there.

    Costs a look at the footers of all parts and a read of the changes behind the oldest backup,
    both in this process. Raises `HistoryGoneError` or `NotYetWrittenError` for a time outside the
    history that is kept.
    """
    access = Access.of(collection)
    span = Span.of(start, end, prefix)
    asked = None if as_of is None else to_timestamp(as_of, name="as_of", now=Clock().wall_ns)
    names = offered(changes=False, columns=columns).names
    place = find(access)
    if not place.is_collection:
        raise UsageError(f"{access.url} is no collection", 'use spark.read.format("kvstore")')
    with CollectionOrigin(place, [] if asked is None else [asked]) as origin:
        oldest, upper, _ = origin.frontiers()
        require_nanoseconds("as_of", as_of, upper)
        at = upper - 1 if asked is None else reached(int(asked), upper - 1)
        require_readable(at, since=oldest, upper=upper)
        span = origin.narrow(span)
        found = "native is False" if native is False else plan(origin, access, span, at)
    if isinstance(found, Scan):
        return _frame(spark, found).select(*names)
    if native:
        raise UsageError(f"{access.url} has no native scan: {found}", "leave native out")
    return _by_the_source(spark, access, span, at, names)


def plan(origin: CollectionOrigin, access: Access, span: Span, as_of: int) -> Scan | str:
    """The scan of a state, or the reason why Spark cannot scan it."""
    blob = access.storage().blob
    if not isinstance(blob, FileBlob):
        return "it is encrypted or in an object store"
    wanted = [
        (batch.upper, parts)
        for batch in origin.batches
        if (parts := [p for p in batch.parts if p.time_min <= as_of and touches(p, span)])
    ]
    if not wanted:
        return Scan((), (), span, as_of, Cover([], []), _NEWER_SCHEMA.empty_table())
    (upper, base), *behind = wanted
    newer = [part for _, parts in behind for part in parts]
    reason = _unfit_base(base, origin) or _unfit_newer(newer, base, origin)
    if reason is not None:
        return reason
    cover = origin.cover(span, as_of)
    if sum(map(bool, cover.newest)) > COVER_MAX:
        return f"more than {COVER_MAX} range deletes"
    paths = tuple(f"file://{blob.path(part.name)}" for part in base)
    groups = [group for part in base for group in origin.groups(part)]
    newest = _newest_of(newer, origin, span, upper - 1, as_of)
    return Scan(paths, groups, span, as_of, cover, newest)


def _unfit_base(parts: Sequence[ShardPart], origin: CollectionOrigin) -> str | None:
    """The reason why the filter would not give the state of these parts, if there is one."""
    bounds: list[tuple[bytes, bytes]] = []
    for part in parts:
        groups = origin.groups(part)
        known = _bounds(groups)
        if known is None:
            return "a part does not tell its least and greatest key"
        bounds.append(known)
    bounds.sort()
    if any(before[1] >= after[0] for before, after in pairwise(bounds)):
        return "the versions of a key are in two parts"
    return None


def _bounds(groups: Sequence[Group]) -> tuple[bytes, bytes] | None:
    """The exact least and greatest key of a part. None if its statistics do not tell them."""
    first, last = groups[0].first, groups[-1].last
    if first is None or last is None:
        return None
    return first, last


def _unfit_newer(
    parts: Sequence[ShardPart], base: Sequence[ShardPart], origin: CollectionOrigin
) -> str | None:
    """The reason why these are too many changes to lay over the base, if they are."""
    rows, below = (sum(part.rows for part in each) for each in (parts, base))
    if rows > min(max(below // NEWER_SHARE, NEWER_ROWS_FEW), NEWER_ROWS_MAX):
        return f"{rows:,} changes behind the oldest backup"
    size = sum(group.size_bytes for part in parts for group in origin.groups(part))
    return f"{size:,} bytes behind the oldest backup" if size > NEWER_BYTES_MAX else None


def _newest_of(
    parts: Sequence[ShardPart], origin: CollectionOrigin, span: Span, since: int, as_of: int
) -> pa.Table:
    """The newest change of each key behind the base."""
    batches: Iterable[pa.RecordBatch] = ()
    if parts:
        names, rows = _NEWER_SCHEMA.names, ARROW_ROWS_MAX
        batches = origin.points(
            span, since=since, upto=as_of, latest=True, columns=names, rows=rows
        )
    return pa.Table.from_batches([b.cast(_NEWER_SCHEMA) for b in batches], _NEWER_SCHEMA)


def _frame(spark: SparkSession, scan: Scan) -> DataFrame:
    if not scan.paths:
        return spark.createDataFrame([], STATE)
    paths = [path.translate(_GLOB_CHARACTERS) for path in scan.paths]
    base = spark.read.schema(_PART_COLUMNS).options(**_PARQUET).parquet(*paths)
    conditions = list(_conditions(scan))
    if conditions:  # one `where`: Spark spends 10 ms on analysing each
        base = base.where(reduce(and_, conditions))
    if not scan.newer.num_rows:
        return base
    newer = spark.createDataFrame(*_rows_of(scan.newer))
    puts = newer.where(F.col("op") == OP_PUT).select(*STATE.names)
    return _without(base, newer.select("key")).select(*STATE.names).unionByName(puts)


def _rows_of(newer: pa.Table) -> tuple[Any, ...]:
    """The arguments by which a release of Spark makes a frame of the table."""
    if has(SOURCES):
        return (newer,)
    columns = [column.to_pylist() for column in newer.columns]
    return list(zip(*columns, strict=True)), "key binary, op byte, value binary"


def _without(base: DataFrame, newer: DataFrame) -> DataFrame:
    """The rows of `base` whose key is not in `newer`, which is broadcast.

    The join is by a hash of the key. Spark looks up a number in a table of longs; for any other
    value it makes a row first. With the hash a read with five increments takes 0.9 times as long.
    Two comparisons stand for the equality of the keys, because Spark would join by an equality too.
    """
    replaced = F.broadcast(newer.withColumnRenamed("key", "newer"))
    same = F.expr("xxhash64(key) = xxhash64(newer) and key >= newer and key <= newer")
    return base.join(replaced, same, "left_anti")


def _conditions(scan: Scan) -> Iterable[Column]:
    """The conditions under which a row of the base is alive, by its own columns and by `cover`.

    A condition that is true of all rows is left out: reading its column costs time.
    """
    key, timestamp, until = F.col("key"), F.col("timestamp"), F.col(UNTIL.name)
    groups, span, as_of = scan.groups, scan.span, scan.as_of
    if any(not group.op_min == group.op_max == OP_PUT for group in groups):
        yield F.col("op") == OP_PUT
    if any(group.newest > as_of for group in groups):
        yield timestamp <= as_of
    if any(group.replaced <= as_of for group in groups):
        yield until.isNull() | (until > as_of)
    if not all(group.lies_in(span) for group in groups):
        yield key >= F.lit(span.start)
        if span.end is not None:
            yield key < F.lit(span.end)
    for (start, end), deleted in zip(pairwise(scan.cover.starts), scan.cover.newest, strict=False):
        if deleted:
            yield (key < F.lit(start)) | (key >= F.lit(end)) | (timestamp >= deleted)


def _by_the_source(
    spark: SparkSession, access: Access, span: Span, as_of: int, names: Sequence[str]
) -> DataFrame:
    require(SOURCES, "a read without a native scan")
    options = access.as_options() | {"versionAsOf": str(as_of), "columns": ",".join(names)}
    if span.start:
        options["startKey"] = span.start.hex()
    if span.end is not None:
        options["endKey"] = span.end.hex()
    if span != Span():
        options["keyEncoding"] = "hex"
    return spark.read.format("kvstore").options(**options).load(access.url)


# --------------------------------------------------------------------------------------------------
# The history of a store as a frame: its commits, imports, reverts and backups.
#
#     version bigint         the time in nanoseconds: `versionAsOf` takes it
#     timestamp timestamp    the same in microseconds, rounded up
#     operation string       commit | import | revert | backup
#     id string              the id of an import
#     rows bigint            the changed keys of a commit, and the rows of an import or a backup
#     bytes bigint           the size of an import or a backup
#
# The version of a backup is the last time that it holds.

_HISTORY_EVENTS: Final = "version long, operation string, id string, rows long, bytes long"


class _Known(NamedTuple):
    """The window of history that is kept, `(since, upto]`, and its events."""

    since: int
    upto: int
    events: list[HistoryEntry]


def history(spark: SparkSession, source: Address) -> DataFrame:
    """The history of a checkpoint, a collection or a server, newest first: see the module's table.

    A checkpoint tells commits, imports and reverts, a collection commits and backups, and a server
    commits. The commits begin with the history that is kept. They hold the rows of tables, with
    their index entries, and the rows of imports that GC has settled.

    The call costs a small task. A query of the frame passes over the changes of the history that is
    kept. Raises `NotAStoreError`, `LockedError` or `UsageError` if nothing readable lies there.
    """
    require(SOURCES, "history")
    access = Access.of(source)
    known = asked(spark, partial(_known, access), f"looking at the history of {access.url}")
    commits = (
        _changes(spark, access, known)
        .unionByName(_changes(spark, access, known, startKey=RESERVED.hex(), keyEncoding="hex"))
        .groupBy(F.col("_commit_version").alias("version"))
        .agg(F.count("*").alias("changed"))
    )
    told = [(int(event.version), *event[1:]) for event in known.events]
    events = spark.createDataFrame(told, _HISTORY_EVENTS)
    backups = events.where("operation = 'backup'")
    of_commits = events.where("operation <> 'backup'")
    joined = commits.join(of_commits, "version", "full_outer").select(
        "version",
        F.coalesce("operation", F.lit("commit")).alias("operation"),
        "id",
        F.coalesce("rows", "changed").alias("rows"),
        "bytes",
    )
    rounded = F.least(F.expr("(version + 999) div 1000"), F.lit(TIMESTAMP_MAX // 1000))
    at = F.timestamp_micros(rounded).alias("timestamp")
    rows = joined.unionByName(backups).select("version", at, "operation", "id", "rows", "bytes")
    return rows.orderBy(F.col("version").desc(), "operation")


def _known(access: Access) -> _Known:
    with open_origin(find(access)) as origin:
        since, upper, _ = origin.frontiers()
        return _Known(since, upper - 1, origin.events())


def _changes(spark: SparkSession, access: Access, known: _Known, **more: str) -> DataFrame:
    window = {"startingTimestamp": str(known.since), "endingTimestamp": str(known.upto)}
    options = {"readChangeFeed": "true", "columns": "_commit_version", **window, **more}
    return spark.read.format("kvstore").options(**access.as_options(), **options).load(access.url)


# --------------------------------------------------------------------------------------------------
# A read of `format("kvstore")` with filters that reach the source: `read_where`.


def read_where(
    spark: SparkSession, source: Address, filters: Iterable[Any], **options: object
) -> DataFrame:
    """The rows of `source` for which the filters hold; tasks read their keys alone.

    `filters` is a list of comparisons `(column, operator, value)` that must all hold, or a list of
    such lists, one of which must hold. The operators are `=`, `<`, `<=`, `>`, `>=`, `in` and
    `startswith`. Values are Python's, at most 10,000 in all filters together.

        read_where(spark, "copy", [("key", "startswith", b"user/")])
        read_where(spark, "copy", [("vendor", "in", ["A", "B"]), ("trip", ">", 40)], table="trips")

    Of a store, comparisons of `key` narrow the read. Of a table, comparisons of the first columns
    of its key do: equalities and `in`, and a range or the beginning of a text in the column behind
    them. Otherwise comparisons of the first columns of an index do: the driver reads the entries
    of at most 10,000 rows. Comparisons of other columns are applied to the rows that are read.

    `options` are the options of the format, under their names: `versionAsOf=stamp`. The frame has
    the same rows as `spark.read.format("kvstore")` with a `where`, and can be filtered further.
    Raises `UsageError` for filters of another form. Costs nothing before the first query.
    """
    require(SOURCES, "read_where")
    access, found = Access.of(source), checked(filters)
    texts = {name: str(value) for name, value in options.items()}
    reader = spark.read.format("kvstore").options(**access.as_options(), **texts)
    rows = reader.option("filters", to_text(found)).load(access.url)
    return rows.where(reduce(or_, (reduce(and_, map(_condition, group)) for group in found)))


def _condition(each: Comparison) -> Column:
    column = F.col(quoted(each.column))
    if each.operator == "in":
        return column.isin(*map(_of_spark, each.value)) if each.value else F.lit(False)
    value = F.lit(_of_spark(each.value))
    if each.operator == "startswith":
        return column.startswith(value)
    compared: dict[str, Any] = {
        "=": Column.__eq__,
        "<": Column.__lt__,
        "<=": Column.__le__,
        ">": Column.__gt__,
        ">=": Column.__ge__,
    }
    condition: Column = compared[each.operator](column, value)
    return condition


def _of_spark(value: Any) -> Any:
    return value.bytes if isinstance(value, UUID) else value
