"""Rows of a table at the times of labels, on one time axis or on two, from a store, a snapshot or a
collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import AGE, COLUMN, COLUMNS
from kvstore.base.span import Span, prefix_end
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp, to_timestamp
from kvstore.codec.columns import require_nanoseconds, require_time_type
from kvstore.errors import UsageError
from kvstore.limits import JOIN_VALUE_BYTES_MAX
from kvstore.tables.catalogue import two_named
from kvstore.tables.codec import KeyCodec, TableCodec, key_values
from kvstore.tables.definition import Column
from kvstore.tables.exact import plain
from kvstore.tables.joins import (
    PREFIX,
    ROW_TIMESTAMP,
    TIME_TYPE,
    Asked,
    AskedSpans,
    Numbers,
    Piece,
    Pieces,
    RowAnswers,
    RowsFound,
    Search,
    column_names,
    label_reader,
    rows_at,
    times_of_labels,
)
from kvstore.tables.sources import PastRows, StoreRows

# --------------------------------------------------------------------------------------------------
# Rows of a table at the times of labels, on one time axis or on two.
#
# A table without an event time gives each label the row of its key as it was known at the label's
# time. A table with an event time gives it the newest row whose event time is not above the label's
# time, among the rows that were known at `known_at`.
#
# `RowAnswers` has the rows: of a store, of a snapshot, or of a collection.
#
# Invariants
# 1. Each label comes out once, in its place, with all its columns.
# 2. The source keeps its history from the call until the end of the result.
# 3. Memory is bounded by the limits of a piece. A piece whose rows are too large is halved.

_PER_UNIT: Final = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
_DAY_NS: Final = 86_400 * 10**9


class RowJoin(NamedTuple):
    """The question of a join. `known_at` is a column of the labels, or one time for all. In a table
    without an event time `search` bounds the age of a version, and otherwise `age_max` the age of
    an event."""

    on: list[str]
    at: str | None
    known_at: str | int
    age_max: int | None
    columns: list[str]
    search: Search


def join_rows(
    source: StoreRows | PastRows,
    codec: TableCodec,
    labels: object,
    *,
    on: str | Sequence[str],
    at: str | None,
    known_at: str | TimeLike | None,
    max_age: timedelta | None,
    columns: Sequence[str] | None,
    prefix: str,
    first: int = 0,
    bytes_max: int | None = None,
) -> pa.RecordBatchReader:
    """The labels with columns of the rows that they ask for. See `Table.join`. The first label is
    row `first` in errors. The rows of one answer have `bytes_max` bytes at most, by default
    `JOIN_VALUE_BYTES_MAX`, or it has one row."""
    age = AGE.or_none.check("max_age", max_age)
    reader, names, chosen, schema = asked_rows(codec, labels, on, at, known_at, columns, prefix)
    known = _known(source, reader.schema, known_at)
    age_max = None if age is None else age // timedelta(microseconds=1) * 1000
    version_age_max = TIMESTAMP_MAX  # event times may lie further apart than versions do
    if age_max is not None and not codec.definition.has_event_time:
        version_age_max = min(age_max, TIMESTAMP_MAX)
    search = Search(version_age_max, False, bytes_max or JOIN_VALUE_BYTES_MAX)
    plan = RowJoin(names, at, known, age_max, chosen, search)
    batches = _joined(source, codec, reader, plan, schema, first)
    next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


class AskedRows(NamedTuple):
    """The labels of a join of rows, their columns with the key, the columns of the table that are
    added, and the schema of the result."""

    reader: pa.RecordBatchReader
    on: list[str]
    columns: list[str]
    schema: pa.Schema


def asked_rows(
    codec: TableCodec,
    given: object,
    key: str | Sequence[str],
    at: str | None,
    known_at: str | TimeLike | None,
    columns: Sequence[str] | None,
    prefix: str,
) -> AskedRows:
    """Open the labels of a join. Raises `UsageError` unless they have the columns that the table
    needs, and no column that is added."""
    on = list(column_names("on", key))
    if at is not None:
        COLUMN.check("at", at)
    PREFIX.check("prefix", prefix)
    asked = COLUMNS.check("columns", columns)
    reader = label_reader(given)
    labels = reader.schema
    _require_question(codec, labels, on, at, known_at)
    chosen = _columns_besides(codec, labels, prefix) if asked is None else list(asked)
    fields = [pa.field(prefix + field.name, field.type) for field in codec.schema_of(chosen)]
    if ROW_TIMESTAMP in chosen:
        raise two_named(codec.definition, ROW_TIMESTAMP)
    fields.append(pa.field(prefix + ROW_TIMESTAMP, TIME_TYPE))
    for field in fields:
        if field.name in labels.names:
            raise UsageError(
                f"labels have a column {field.name!r} already", "choose columns=, or a prefix="
            )
    return AskedRows(reader, on, chosen, pa.schema([*labels, *fields]))


def _require_question(
    codec: TableCodec,
    schema: pa.Schema,
    on: list[str],
    at: str | None,
    known_at: str | TimeLike | None,
) -> None:
    """Raise `UsageError` unless the labels have the columns that the table needs."""
    definition = codec.definition
    keys = _keys(codec)
    if len(on) != len(keys):
        raise UsageError(
            f"{definition.where}: on={on!r} for a key of {len(keys)}",
            f"name the labels' columns of {', '.join(column.name for column in keys)}",
        )
    if at is None and definition.has_event_time:
        raise UsageError(f"{definition.where} has an event time", "name the labels' column: at=")
    if known_at is not None and not definition.has_event_time:
        raise UsageError(
            f"{definition.where} has no event time, so known_at means nothing",
            "leave it out: rows are known at the time in the column at=",
        )
    for name in (*on,) if at is None else (*on, at):
        _require_column(schema, name)
    if at is not None:
        _require_time(schema.field(at), definition.key_columns[-1], definition.has_event_time)


def _require_time(at: pa.Field, last: Column, is_event: bool) -> None:
    """Raise `UsageError` unless a column of labels has times that compare with the table's. A time
    without a zone compares with event times that have none, and a date with dates."""
    kind = at.type
    is_naive = pa.types.is_timestamp(kind) and kind.tz is None
    if is_naive and is_event and getattr(last.type, "tz", None) is None:
        return
    if is_event and pa.types.is_date(kind) and pa.types.is_date(last.type):
        return
    require_time_type(at)


def _keys(codec: TableCodec) -> list[Column]:
    """The columns of the key without the event time."""
    definition = codec.definition
    return definition.key_columns[: -1 if definition.has_event_time else None]


def _columns_besides(codec: TableCodec, schema: pa.Schema, prefix: str) -> list[str]:
    """The columns of the table that neither the key has nor the labels."""
    keys = _keys(codec)
    return [
        column.name
        for column in codec.definition.columns
        if column not in keys and prefix + column.name not in schema.names
    ]


def _known(
    source: StoreRows | PastRows, schema: pa.Schema, known_at: str | TimeLike | None
) -> str | int:
    if isinstance(known_at, str) and known_at in schema.names:
        _require_column(schema, known_at)
        require_time_type(schema.field(known_at))
        return known_at
    return source.time(known_at, "known_at")


def _require_column(schema: pa.Schema, name: str) -> None:
    count = schema.names.count(name)
    if count != 1:
        problem = f"{count} columns" if count else "no column"
        raise UsageError(f"labels have {problem} {name!r}", f"they have {', '.join(schema.names)}")


def _joined(
    source: StoreRows | PastRows,
    codec: TableCodec,
    reader: pa.RecordBatchReader,
    plan: RowJoin,
    schema: pa.Schema,
    first: int,
) -> Iterator[pa.RecordBatch]:
    with source.answers() as answers:
        # A batch without columns first: taking it holds the history, within the call.
        yield pa.record_batch([], names=[])
        rows_first, bytes_max = answers.rows_first, plan.search.bytes_max
        if bytes_max < JOIN_VALUE_BYTES_MAX:
            # As many rows of 1 KiB as fit into half: a piece that is halved asks for each label
            # again.
            rows_first = min(max(bytes_max >> 11, 1), rows_first)
        rows_max = answers.spans_max if codec.definition.has_event_time else answers.rows_max
        pieces = Pieces(reader, rows_first, rows_max, first, bytes_max)
        for piece in pieces:
            size = 0
            for batch in _answered(answers, codec, piece, plan, schema):
                size += sum(column.nbytes for column in batch.columns[len(reader.schema) :])
                yield batch
            pieces.learn(piece.rows, size)


def _answered(
    answers: RowAnswers, codec: TableCodec, piece: Piece, plan: RowJoin, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with the added columns."""
    found = _columns(answers, codec, piece, plan)
    if found is None:
        for half in piece.halves():
            yield from _answered(answers, codec, half, plan, schema)
        return
    first = 0
    for batch in piece.batches:
        columns = [column.slice(first, batch.num_rows) for column in found]
        first += batch.num_rows
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)


def _columns(
    answers: RowAnswers, codec: TableCodec, piece: Piece, plan: RowJoin
) -> list[pa.Array] | None:
    """The added columns of a piece of labels. None if the rows of several labels have too many
    bytes together: the caller passes a smaller piece."""
    definition = codec.definition
    columns = {
        column.name: key_values(piece.batches, piece.first, name, column.type)
        for name, column in zip(plan.on, definition.key_columns, strict=False)
    }

    def newest() -> int:
        return answers.newest

    event = definition.key_columns[-1] if definition.has_event_time else None
    at = None
    if plan.at is not None and event is None:
        at = times_of_labels(piece, plan.at, newest)
    known = at
    if isinstance(plan.known_at, str):
        known = times_of_labels(piece, plan.known_at, newest)
    elif event is not None or known is None:
        known = np.full(piece.rows, plan.known_at, np.int64)
    assert known is not None
    if event is None:
        asked = Asked(codec.key.keys(pa.RecordBatch.from_pydict(columns)), known, piece.first)
        found = rows_at(answers, asked, plan.search)
        return None if found is None else _decoded(codec, found, plan)
    assert plan.at is not None, "the caller asked for it"
    asked_at = _events(piece, plan.at, event.type, newest)
    starts = codec.key.keys(
        pa.RecordBatch.from_pydict({**columns, event.name: asked_at.array(event.type)})
    )
    stems = KeyCodec(definition, codec.key.prefix, definition.key[:-1])
    ends = [
        prefix_end(stem) for stem in stems.keys(pa.RecordBatch.from_pydict(columns)).to_pylist()
    ]
    asked_spans = AskedSpans(starts.to_pylist(), ends, known, piece.first)
    found = answers.first_alive(asked_spans, plan.search)
    if found is None:
        return None
    return _decoded(codec, _within(codec, found, asked_at, plan.age_max), plan)


def _decoded(codec: TableCodec, found: RowsFound, plan: RowJoin) -> list[pa.Array]:
    """The columns of rows, and the times of their versions: null where a label has no row."""
    is_alive = found.values.is_valid().to_numpy(zero_copy_only=False)
    alive = np.flatnonzero(is_alive)
    rows = pa.array(alive)
    batch = codec.decode(found.keys.take(rows), found.values.take(rows), plan.columns)
    places = np.full(len(is_alive), -1, np.int64)
    places[alive] = np.arange(len(alive))
    taken = pa.array(places, mask=places < 0)
    times = pa.array(found.times[alive]).cast(TIME_TYPE)
    return [column.take(taken) for column in (*batch.columns, times)]


class _Events(NamedTuple):
    """The times of labels in the unit of an event time, rounded down, and the nanoseconds that
    rounding took. `is_before` tells the labels that lie before each time that the event column
    has, `beyond` has the nanoseconds of those that lie behind, by place."""

    times: npt.NDArray[Any]
    rest: Numbers
    is_before: npt.NDArray[np.bool_]
    beyond: dict[int, int]
    unit: int
    """Nanoseconds of a unit."""

    def array(self, type_: pa.DataType) -> pa.Array:
        """The times as event times."""
        return pa.array(self.times).view(type_)

    def least(self, age: int) -> npt.NDArray[Any]:
        """The first event time that is not older than `age` nanoseconds, for each label."""
        whole, rest = divmod(age, self.unit)
        bounds = np.iinfo(self.times.dtype)
        if whole > int(bounds.max):
            found = np.full_like(self.times, bounds.min)
        else:
            is_low = self.times < int(bounds.min) + whole
            found = np.where(is_low, self.times, self.times - self.times.dtype.type(whole))
            found[is_low] = bounds.min
            found += (self.rest > rest) & ~is_low
        for place, at in self.beyond.items():
            exact = -((age - at) // self.unit)
            found[place] = min(max(exact, int(bounds.min)), int(bounds.max))
        return found


def _events(piece: Piece, name: str, type_: pa.DataType, newest: Callable[[], int]) -> _Events:
    """The column `name` of labels, which compares with an event time of `type_`. Raises
    `UsageError` for a null, and for an integer of another unit than nanoseconds."""
    first, found = piece.first, []
    for batch in piece.batches:
        column = plain(batch.column(name), f"column {name!r}")
        if column.null_count:
            row = first + pc.index(column.is_null(), True).as_py()
            raise UsageError(f"column {name!r} has a null in row {row}", "drop such labels first")
        found.append(_event_times(column, name, first, type_, newest))
        first += batch.num_rows
    beyond, before = {}, 0
    for each in found:
        beyond.update({before + place: at for place, at in each.beyond.items()})
        before += len(each.times)
    times, rest, is_before = (np.concatenate([each[part] for each in found]) for part in range(3))
    return _Events(times, rest, is_before, beyond, found[0].unit)


def _event_times(
    column: pa.Array, name: str, first: int, type_: pa.DataType, newest: Callable[[], int]
) -> _Events:
    is_count = pa.types.is_integer(column.type)
    if is_count:
        given, label_unit = column.to_numpy(), 1
        if not pa.types.is_integer(type_):
            require_nanoseconds(given, name, first, newest)
    elif pa.types.is_date(column.type):
        given, label_unit = column.cast(pa.date32()).view(pa.int32()).to_numpy(), _DAY_NS
    else:
        given, label_unit = column.view(pa.int64()).to_numpy(), _PER_UNIT[column.type.unit]
    stored: np.dtype[Any] = np.dtype(np.int64)
    unit = 1
    if pa.types.is_date(type_):
        stored, unit = np.dtype(np.int32), _DAY_NS
    elif pa.types.is_timestamp(type_):
        unit = _PER_UNIT[type_.unit]
    else:
        stored = np.dtype(type_.to_pandas_dtype())
    bounds = np.iinfo(stored)
    given = given if given.dtype == np.uint64 else given.astype(np.int64)
    rest = np.zeros(len(given), np.int64)
    if label_unit >= unit:
        times, factor = given, label_unit // unit
    else:
        factor = 1
        times = given // (unit // label_unit)
        rest = ((given - times * (unit // label_unit)) * label_unit).astype(np.int64)
    is_before = times < -(-int(bounds.min) // factor)
    is_behind = times > int(bounds.max) // factor
    inside = (np.where(is_before | is_behind, 0, times) * factor).astype(stored)
    inside[is_before], inside[is_behind] = bounds.min, bounds.max
    beyond = {int(at): int(given[at]) * label_unit for at in np.flatnonzero(is_behind)}
    return _Events(inside, rest, is_before, beyond, unit)


def _within(codec: TableCodec, found: RowsFound, asked: _Events, age: int | None) -> RowsFound:
    """The rows whose event time is at most `age` nanoseconds before the label's; of any age
    if it is None."""
    if age is None and not asked.is_before.any():
        return found
    is_there = found.values.is_valid().to_numpy(zero_copy_only=False) & ~asked.is_before
    there = np.flatnonzero(is_there)
    if age is not None and len(there):
        events = codec.key.arrays(found.keys.take(pa.array(there)))[-1]
        numbers = events
        if pa.types.is_temporal(events.type):
            numbers = events.view(pa.int32() if pa.types.is_date(events.type) else pa.int64())
        is_there[there] = numbers.to_numpy() >= asked.least(age)[there]
    values = pc.if_else(pa.array(is_there), found.values, pa.scalar(None, pa.binary()))
    return found._replace(values=values)


def latest_span(codec: TableCodec, key: Sequence[Any], at: Any) -> Span:
    """The span whose first row has the newest event time of `at` at most."""
    definition = codec.definition
    if not definition.has_event_time:
        raise UsageError(f"{definition.where} has no event time", "use get")
    if len(key) != len(definition.key) - 1:
        names = ", ".join(column.name for column in definition.key_columns[:-1])
        raise UsageError(
            f"{definition.where}: {len(key)} values for the key {names}",
            "pass one value for each column of the key",
        )
    stem = codec.key.key(key)
    if None in key:
        raise UsageError(
            f"{definition.where}: a key is never null", "pass a value for each column of the key"
        )
    start = (
        stem if at is None else codec.key.key([*key, _event(at, definition.key_columns[-1].type)])
    )
    return Span(start, prefix_end(stem))


def _event(at: Any, type_: pa.DataType) -> Any:
    """A time as the value of an event time, rounded down."""
    is_time = pa.types.is_timestamp(type_)
    if isinstance(at, str | Timestamp) and not pa.types.is_integer(type_):
        moment = to_timestamp(at, name="at")
        if is_time and type_.unit == "ns":
            return moment
        at = Timestamp(moment - moment % 1000).to_datetime()
    if isinstance(at, datetime) and pa.types.is_date32(type_):
        return (at if at.tzinfo is None else at.astimezone(timezone.utc)).date()
    if isinstance(at, datetime) and is_time and type_.unit != "ns":
        step = _PER_UNIT[type_.unit] // 1000
        at = at.replace(microsecond=at.microsecond - at.microsecond % step)
        if getattr(at, "nanosecond", 0):  # of pandas
            at = at.replace(nanosecond=0)
    return at
