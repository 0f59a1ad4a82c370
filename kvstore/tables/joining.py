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

from kvstore.base.arguments import COLUMN, COLUMNS, FLAG
from kvstore.base.span import Span, prefix_end
from kvstore.base.timestamp import (
    TIMESTAMP_MAX,
    AgeLike,
    TimeLike,
    Timestamp,
    plain_integer,
    to_timestamp,
)
from kvstore.codec.columns import require_nanoseconds, require_time_type
from kvstore.errors import UsageError
from kvstore.limits import JOIN_VALUE_BYTES_MAX
from kvstore.tables.catalogue import two_named
from kvstore.tables.definition import Column
from kvstore.tables.exact import plain
from kvstore.tables.joins import (
    DIRECTION,
    ON_FUTURE,
    ON_NULL,
    PREFIX,
    ROW_TIMESTAMP,
    TIME_TYPE,
    Asked,
    AskedSpans,
    Direction,
    Numbers,
    OnFuture,
    OnNull,
    Piece,
    Pieces,
    RowAnswers,
    RowsFound,
    Search,
    WholeLabels,
    age_of,
    column_names,
    in_order,
    label_reader,
    rows_at,
    times_of_labels,
    whole_labels,
    with_as_of,
)
from kvstore.tables.row_codec import KeyCodec, TableCodec, key_values
from kvstore.tables.sources import PastRows, StoreRows

# --------------------------------------------------------------------------------------------------
# Rows of a table at the times of labels, on one time axis or on two.
#
# A table without an event time gives each label the row of its key as it was known at the label's
# time. A table with an event time gives it the newest row whose event time is not above the label's
# time, among the rows that were known at `known_at`. Where a column tells until when a row is
# valid, the row is no answer from its end on: it is valid to its end, or to its successor.
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
    without an event time `search` bounds the distance of a version, and otherwise `age_max` the
    distance of an event, in nanoseconds, or in the units of a column of integers."""

    on: list[str]
    at: str | None
    known_at: str | int
    age_max: int | None
    columns: list[str]
    search: Search
    is_null_null: bool

    @property
    def asked(self) -> list[str]:
        """The columns of the labels that ask."""
        every = (*self.on, self.at, self.known_at)
        return list(dict.fromkeys(each for each in every if isinstance(each, str)))


def join_rows(
    source: StoreRows | PastRows,
    codec: TableCodec,
    labels: object,
    *,
    on: str | Sequence[str],
    at: str | None,
    known_at: str | TimeLike | None,
    choice: RowChoice,
    columns: Sequence[str] | None,
    prefix: str,
    first: int = 0,
    bytes_max: int | None = None,
    newest: int | None = None,
) -> pa.RecordBatchReader:
    """The labels with columns of the rows that they ask for. See `Table.join`. The first label is
    row `first` in errors. The rows of one answer have `bytes_max` bytes at most, by default
    `JOIN_VALUE_BYTES_MAX`, or it has one row. What was written above `newest` does not count."""
    choice.check(codec)
    asked = asked_rows(codec, labels, on, at, known_at, columns, prefix, choice)
    reader, names, chosen, schema = asked
    known = _known(source, reader.schema, known_at)
    if known_at is None and newest is not None:
        known = newest
    age_max = choice.age(codec)
    version_age_max = TIMESTAMP_MAX  # event times may lie further apart than versions do
    if age_max is not None and not codec.definition.has_event_time:
        version_age_max = min(age_max, TIMESTAMP_MAX)
    search = Search(
        version_age_max,
        False,
        bytes_max or JOIN_VALUE_BYTES_MAX,
        choice.direction,
        choice.allow_exact,
        newest,
        choice.on_future == "newest",
    )
    plan = RowJoin(names, at, known, age_max, chosen, search, choice.on_null == "null")
    batches = _joined(source, codec, reader, plan, schema, first)
    next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


class RowChoice(NamedTuple):
    """The arguments of `Table.join` by which a label chooses its row."""

    max_age: AgeLike | int | None = None
    direction: Direction = "backward"
    tolerance: AgeLike | int | None = None
    allow_exact: bool = True
    on_future: OnFuture = "error"
    on_null: OnNull = "error"

    def check(self, codec: TableCodec) -> None:
        """Raise `UsageError` for an argument that is wrong, or means nothing for the table."""
        DIRECTION.check("direction", self.direction)
        FLAG.check("allow_exact", self.allow_exact)
        ON_FUTURE.check("on_future", self.on_future)
        ON_NULL.check("on_null", self.on_null)
        self.age(codec)
        definition = codec.definition
        if definition.end_column is not None and self.direction != "backward":
            raise UsageError(
                f"direction={self.direction!r}: rows of {definition.where} are valid until "
                f"{definition.end_column.name!r}",
                "leave direction out: a label gets the row that is valid at its time",
            )

    def age(self, codec: TableCodec) -> int | None:
        """The bound in nanoseconds. For event times that are integers the bound may be an integer,
        which counts their units."""
        definition = codec.definition
        given = self.max_age if self.tolerance is None else self.tolerance
        if definition.has_event_time and pa.types.is_integer(definition.key_columns[-1].type):
            count = plain_integer(given)
            if count is not None and count >= 0 and None in (self.max_age, self.tolerance):
                return count
        age = age_of(self.max_age, self.tolerance)
        return None if age is None else age // timedelta(microseconds=1) * 1000


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
    choice: RowChoice,
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
    schema = pa.schema([*labels, *fields])
    if choice.on_future == "newest":
        schema = with_as_of(schema, labels, prefix)
    return AskedRows(reader, on, chosen, schema)


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
        if not plan.search.is_plain and plan.search.newest is None:
            plan = plan._replace(search=plan.search._replace(newest=answers.newest))
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
            for labels in whole_labels(piece, plan.asked if plan.is_null_null else None):
                for batch in _answered(answers, codec, labels, plan, schema):
                    size += sum(column.nbytes for column in batch.columns[len(reader.schema) :])
                    yield batch
            pieces.learn(piece.rows, size)


def _answered(
    answers: RowAnswers,
    codec: TableCodec,
    labels: WholeLabels,
    plan: RowJoin,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with the added columns."""
    found = None if labels.asked is None else _columns(answers, codec, labels.asked, plan)
    if found is None and labels.asked is not None:
        for half in labels.halves():
            yield from _answered(answers, codec, half, plan, schema)
        return
    yield from labels.beside(found, schema)


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
    search = plan.search
    as_of = []
    if search.is_future_newest:
        assert search.newest is not None, "the join has a newest time"
        as_of = [pa.array(np.minimum(known, search.newest)).cast(TIME_TYPE)]
    if event is None:
        asked = Asked(codec.key.keys(pa.RecordBatch.from_pydict(columns)), known, piece.first)
        found = rows_at(answers, asked, search)
        return None if found is None else [*_decoded(codec, found, plan), *as_of]
    assert plan.at is not None, "the caller asked for it"
    if search.is_future_newest:
        assert search.newest is not None, "the join has a newest time"
        known = np.minimum(known, search.newest)
    labels = EventLabels(
        _events(piece, plan.at, event.type, newest), known, pa.RecordBatch.from_pydict(columns)
    )
    rows = _event_rows(answers, codec, labels, piece.first, plan)
    return None if rows is None else [*_decoded(codec, rows, plan), *as_of]


# --------------------------------------------------------------------------------------------------
# Rows by their event times: the newest one before a label, the oldest one behind it, or the nearer.
#
#     key of a row    columns of the key | event time, greatest first
#
#     behind the label <---- start of the key ... label's time ... end of the key ----> before it
#
# So the row before a label is the first live row from the label's time on, and the row behind it is
# the last live one up to there. Both are as they were known at the label's other time.


class EventLabels(NamedTuple):
    """Labels of a table with an event time: the event times for which they ask, the times at which
    their rows were known, and the columns of their keys."""

    events: _Events
    known: Numbers
    key: pa.RecordBatch


def _event_rows(
    answers: RowAnswers, codec: TableCodec, labels: EventLabels, first: int, plan: RowJoin
) -> RowsFound | None:
    """The row of each label. None where several rows have too many bytes together."""
    found: list[RowsFound] = []
    for is_behind in (False, True):
        if plan.search.direction == ("backward" if is_behind else "forward"):
            continue
        bound = labels.events.bound(is_behind=is_behind, allows_exact=plan.search.allows_exact)
        rows = _rows_beside(answers, codec, labels, bound, first, plan.search)
        if rows is None:
            return None
        found.append(_within(codec, rows, labels.events, plan.age_max, bound))
    if len(found) == 2:
        return _nearer(codec, labels.events, *found)
    return _still_valid(codec, found[0], labels.events)


def _rows_beside(
    answers: RowAnswers,
    codec: TableCodec,
    labels: EventLabels,
    bound: _Bound,
    first: int,
    search: Search,
) -> RowsFound | None:
    definition = codec.definition
    event = definition.key_columns[-1]
    times = pa.array(bound.times).view(event.type)
    names = [*labels.key.schema.names, event.name]
    keys = codec.key.keys(pa.RecordBatch.from_arrays([*labels.key.columns, times], names=names))
    stems = KeyCodec(definition, codec.key.prefix, definition.key[:-1]).keys(labels.key)
    plain = Search(search.age_max, search.is_gone_null, search.bytes_max)
    # A key has the greatest event time first, so this is the order of keys.
    ordered = in_order(stems, _signed(bound.times)).places
    asked = AskedSpans(keys, stems, labels.known, ordered, first, bound.is_behind)
    return answers.first_alive(asked, plain)


def _nearer(codec: TableCodec, events: _Events, before: RowsFound, behind: RowsFound) -> RowsFound:
    """The nearer row of each label, the one before it if both are as near."""
    older, newer = _is_there(before), _is_there(behind)
    is_behind = newer & ~older
    both = np.flatnonzero(older & newer)
    sides = [_event_numbers(codec, rows, both) for rows in (before, behind)]
    for at, old, new in zip(both.tolist(), *(side.tolist() for side in sides), strict=True):
        exact = events.exact(at)
        is_behind[at] = new * events.unit - exact < exact - old * events.unit
    places = np.arange(len(older)) + np.where(is_behind, len(older), 0)
    taken = pa.array(places)
    keys, values = (
        pa.concat_arrays([getattr(before, name), getattr(behind, name)]).take(taken)
        for name in ("keys", "values")
    )
    return RowsFound(keys, values, np.where(is_behind, behind.times, before.times))


def _still_valid(codec: TableCodec, found: RowsFound, events: _Events) -> RowsFound:
    """The rows whose validity has not ended at the times of their labels."""
    end = codec.definition.end_column
    there = np.flatnonzero(_is_there(found))
    if end is None or not len(there):
        return found
    rows = pa.array(there)
    ends = codec.decode(found.keys.take(rows), found.values.take(rows), [end.name]).column(0)
    is_open = ends.is_null().to_numpy(zero_copy_only=False)
    until = _as_numbers(ends).fill_null(0).to_numpy()
    is_past = ~is_open & (events.times[there] >= until)
    for at, place in enumerate(there.tolist()):
        if place in events.outside and not is_open[at]:
            is_past[at] = events.outside[place] >= int(until[at]) * events.unit
    is_kept = np.ones(len(found.times), np.bool_)
    is_kept[there[is_past]] = False
    return _kept(found, is_kept)


def _is_there(found: RowsFound) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = found.values.is_valid().to_numpy(zero_copy_only=False)
    return np.array(valid)


def _kept(found: RowsFound, is_kept: npt.NDArray[np.bool_]) -> RowsFound:
    values = pc.if_else(pa.array(is_kept), found.values, pa.scalar(None, pa.binary()))
    return found._replace(values=values)


def _event_numbers(codec: TableCodec, found: RowsFound, places: Numbers) -> npt.NDArray[Any]:
    """The event times of rows in their unit."""
    if not len(places):
        return np.empty(0, np.int64)
    events = codec.key.arrays(found.keys.take(pa.array(places)))[-1]
    numbers: npt.NDArray[Any] = _as_numbers(events).to_numpy()
    return numbers


def _as_numbers(times: pa.Array) -> pa.Array:
    if not pa.types.is_temporal(times.type):
        return times
    return times.view(pa.int32() if pa.types.is_date(times.type) else pa.int64())


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


class _Bound(NamedTuple):
    """For each label the last event time before it, or the first one behind it, that it may have;
    `is_none` tells the labels that can have none."""

    times: npt.NDArray[Any]
    is_none: npt.NDArray[np.bool_]
    is_behind: bool


class _Events(NamedTuple):
    """The times of labels in the unit of an event time, rounded down, and the nanoseconds that
    rounding took. `is_before` tells the labels that lie before each time that the event column
    has, `is_beyond` those that lie behind; `outside` has the nanoseconds of both, by place."""

    times: npt.NDArray[Any]
    rest: Numbers
    is_before: npt.NDArray[np.bool_]
    is_beyond: npt.NDArray[np.bool_]
    outside: dict[int, int]
    unit: int
    """Nanoseconds of a unit."""

    def exact(self, place: int) -> int:
        """The time of a label in nanoseconds, which may have more than 64 bits."""
        found = self.outside.get(place)
        if found is not None:
            return found
        return int(self.times[place]) * self.unit + int(self.rest[place])

    def bound(self, *, is_behind: bool, allows_exact: bool) -> _Bound:
        """The event times next to the labels, on one side."""
        limits = np.iinfo(self.times.dtype)
        is_whole = (self.rest == 0) & ~self.is_before & ~self.is_beyond
        step = self.times.dtype.type(1)
        if not is_behind:
            moved = is_whole & (not allows_exact)
            is_none = self.is_before | (moved & (self.times == limits.min))
            return _Bound(np.where(moved & ~is_none, self.times - step, self.times), is_none, False)
        moved = ~self.is_before & ~(is_whole & allows_exact)
        is_none = self.is_beyond | (moved & (self.times == limits.max))
        return _Bound(np.where(moved & ~is_none, self.times + step, self.times), is_none, True)

    def near(
        self, places: Numbers, events: npt.NDArray[Any], age: int, *, is_behind: bool
    ) -> npt.NDArray[np.bool_]:
        """Whether the event found for the label at each place is `age` nanoseconds away at most.

        Distances are compared, and no bound is: a bound may lie outside the times that the column
        has. A distance of two times of 64 bits fits into 64 bits without a sign.
        """
        times, taken = self.times[places], self.rest[places]
        apart = _words(events) - _words(times) if is_behind else _words(times) - _words(events)
        whole, rest = divmod(age, self.unit)
        if whole > int(np.iinfo(np.uint64).max):
            found = np.ones(len(places), np.bool_)
        elif is_behind:  # the label lies `taken` above its rounded time, so nearer to the event
            one_more = (apart > 0) & (taken + rest >= self.unit)
            found = apart - one_more.astype(np.uint64) <= np.uint64(whole)
        else:
            found = (apart < np.uint64(whole)) | ((apart == np.uint64(whole)) & (taken <= rest))
        for place, exact in self.outside.items():
            at = int(np.searchsorted(places, place))
            if at < len(places) and places[at] == place:
                found[at] = abs(exact - int(events[at]) * self.unit) <= age
        return found


def _words(times: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Times as words without a sign, whose differences wrap around as those of the times do."""
    return times if times.dtype == np.uint64 else times.astype(np.int64).view(np.uint64)


def _signed(times: npt.NDArray[Any]) -> Numbers:
    """Times as numbers of 64 bits, in the same order."""
    if times.dtype == np.uint64:
        times = (times ^ np.uint64(1 << 63)).view(np.int64)
    return times.astype(np.int64, copy=False)


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
    outside, before = {}, 0
    for each in found:
        outside.update({before + place: at for place, at in each.outside.items()})
        before += len(each.times)
    parts = (np.concatenate([each[part] for each in found]) for part in range(4))
    times, rest, is_before, is_beyond = parts
    return _Events(times, rest, is_before, is_beyond, outside, found[0].unit)


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
    is_beyond = times > int(bounds.max) // factor
    is_outside = is_before | is_beyond
    inside = (np.where(is_outside, 0, times) * factor).astype(stored)
    inside[is_before], inside[is_beyond] = bounds.min, bounds.max
    outside = {int(at): int(given[at]) * label_unit for at in np.flatnonzero(is_outside)}
    return _Events(inside, rest, is_before, is_beyond, outside, unit)


def _within(
    codec: TableCodec, found: RowsFound, asked: _Events, age: int | None, bound: _Bound
) -> RowsFound:
    """The rows of the labels that can have one, whose event time is at most `age` nanoseconds away
    from the label's; any distance if it is None."""
    if age is None and not bound.is_none.any():
        return found
    is_there = _is_there(found) & ~bound.is_none
    there = np.flatnonzero(is_there)
    if age is not None and len(there):
        events = _event_numbers(codec, found, there)
        is_there[there] = asked.near(there, events, age, is_behind=bound.is_behind)
    return _kept(found, is_there)


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


def latest_row(
    codec: TableCodec, key: bytes, value: bytes, columns: tuple[str, ...] | None, at: Any
) -> dict[str, Any] | None:
    """A row that `latest_span` has found, if it is still valid at `at`."""
    end = codec.definition.end_column
    if end is not None and at is not None:
        until = codec.to_dict(key, value, (end.name,))[end.name]
        if until is not None and has_come(codec, until, at):
            return None
    return codec.to_dict(key, value, columns)


def has_come(codec: TableCodec, until: Any, at: Any) -> bool:
    """Whether `at` is `until` or later. Both may be any value that an event time takes, so their
    encodings are compared: as event times of one key, greatest first."""
    definition = codec.definition
    event = KeyCodec(definition, codec.key.prefix, definition.key[-1:])
    asked = _event(at, definition.key_columns[-1].type)
    return event.key([asked]) <= event.key([until])


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
