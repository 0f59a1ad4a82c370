"""Joins of a DataFrame with the history of a store: labels move, history does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import (
    BinaryType,
    DateType,
    LongType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kvstore.base.arguments import FLAG
from kvstore.base.clock import Clock
from kvstore.base.span import Span
from kvstore.base.timestamp import AgeLike, TimeLike, reached, to_timestamp
from kvstore.bulk.outside import outside_values
from kvstore.errors import Argument, UsageError
from kvstore.mvcc.arrow import to_microseconds
from kvstore.mvcc.parallel_scan import split_span
from kvstore.spark.access import Access, Address, asked, freeze_objects, plain_errors
from kvstore.spark.format_options import require_nanoseconds
from kvstore.spark.interfaces import arrow_function
from kvstore.spark.load import (
    Columns,
    column_of,
    key_of,
    partition_of,
    require_bytes,
    require_time,
    selected,
)
from kvstore.spark.origins import JoinChoice, Origin, Place, find, open_origin
from kvstore.spark.read import TypedRows, arrow_schema, table_at
from kvstore.spark.releases import REBALANCE, has
from kvstore.tables.exact import same_values
from kvstore.tables.joining import RowChoice
from kvstore.tables.joins import (
    AS_OF,
    DIRECTION,
    ON_FUTURE,
    ON_GONE,
    ON_NULL,
    PREFIX,
    ROW_TIMESTAMP,
    Direction,
    OnFuture,
    OnGone,
    OnNull,
    age_of,
)
from kvstore.tables.row_codec import KeyCodec
from kvstore.timeline.frontiers import require_readable

# --------------------------------------------------------------------------------------------------
# The columns that a join adds to the labels.
#
#     value binary                 null where the key had no value, or one that is too old
#     value_timestamp timestamp    the time of the version in microseconds, rounded up
#     value_version bigint         the same in nanoseconds: exact

VALUE: Final = "value"
TIMESTAMP: Final = "value_timestamp"
VERSION: Final = "value_version"

OFFERED: Final = StructType(
    [
        StructField(VALUE, BinaryType()),
        StructField(TIMESTAMP, TimestampType()),
        StructField(VERSION, LongType()),
    ]
)
DEFAULT: Final = (VALUE, TIMESTAMP)


def added_fields(
    labels: StructType, columns: Sequence[str] | None, prefix: str
) -> list[StructField]:
    """The fields that `columns` name, under their names in the result.

    Raises `UsageError` for an unknown or doubled column, and for a name that the labels have.
    """
    asked = DEFAULT if columns is None else columns
    names = OFFERED.names
    is_sound = not isinstance(asked, str) and len(set(asked)) == len(asked)
    if not is_sound or not set(asked).issubset(names):
        raise UsageError(
            Argument.of("columns", columns), f"pass some of {', '.join(names)}, each once"
        )
    return fields_named([OFFERED[name] for name in asked], labels, prefix)


def fields_named(
    fields: Sequence[StructField], labels: StructType, prefix: str
) -> list[StructField]:
    """The fields under names that begin with `prefix`. Raises `UsageError` for a name that the
    labels have."""
    PREFIX.check("prefix", prefix)
    taken = {name.lower() for name in labels.names}
    for field in fields:
        if (prefix + field.name).lower() in taken:  # Spark's names of columns ignore case
            raise UsageError(
                f"labels have a column {prefix + field.name!r} already",
                "pass another prefix, or rename the column",
            )
    return [StructField(prefix + field.name, field.dataType) for field in fields]


def added_columns(values: pa.Array, times: pa.Array, columns: Sequence[str]) -> list[pa.Array]:
    """The columns of `columns`, by values and by nanosecond times of versions."""
    return [
        values if name == VALUE else time_column(times, is_exact=name == VERSION)
        for name in columns
    ]


def time_column(times: pa.Array, *, is_exact: bool) -> pa.Array:
    """Times of versions: exact as integers of nanoseconds, otherwise as Spark's timestamps."""
    found = times.cast(pa.int64())
    return found if is_exact else to_microseconds(found)


# --------------------------------------------------------------------------------------------------
# Labels that ask a table with an event time: each gets the newest row whose event time is not
# above the label's time, among the rows that were known at another time.
#
# A label moves with the bytes of its key, without the event time. Its task reads the columns of the
# key back from these bytes, and joins them to the table of the origin.

_PART: Final = "kvstore_part_"
_ROW: Final = "kvstore_row_"


def latest_rows(
    origin: Origin,
    table: TypedRows,
    labels: Iterable[pa.RecordBatch],
    columns: Sequence[str],
    names: Sequence[str],
    choice: JoinChoice,
    *,
    key: str,
    at: str,
    known_at: str,
) -> Iterator[pa.RecordBatch]:
    """The labels with `columns` of the rows that they ask for, all under `names`, and without their
    columns `key`, `at` and `known_at`. There is at least one batch of labels."""
    is_future_newest = choice.on_future == "newest"
    if is_future_newest:
        labels = (_up_to(batch, known_at, choice.newest) for batch in labels)
    typed = [name for name in columns if name not in TIMES]
    schema = arrow_schema(table.offered(changes=False, columns=typed))
    parts = [f"{_PART}{number}" for number in range(len(asked_key(table, by_event=True).columns))]
    asked = (_with_parts(batch, table, key, parts) for batch in labels)
    first = next(asked)
    kept = [name for name in first.schema.names if name not in (key, at, known_at, *parts)]
    reader = pa.RecordBatchReader.from_batches(first.schema, chain([first], asked))
    with origin.rows_of(table.name) as rows:
        how: dict[str, Any] = {
            "direction": choice.direction,
            "allow_exact": choice.allow_exact,
            "on_null": choice.on_null,
        }
        joined = rows.join(reader, parts, at, known_at, choice.max_age, typed, prefix=_ROW, **how)
        for batch in joined:
            times = batch.column(_ROW + ROW_TIMESTAMP)
            added = [
                time_column(times, is_exact=name == VERSION_COLUMN)
                if name in TIMES
                else _cast(table, batch.column(_ROW + name), schema.field(name))
                for name in columns
            ]
            if is_future_newest:
                columns_asked = [batch.column(name) for name in (key, at, known_at)]
                is_whole = reduce(pc.and_, (column.is_valid() for column in columns_asked))
                as_of = pc.if_else(is_whole, columns_asked[2], pa.scalar(None, pa.int64()))
                added.append(time_column(as_of, is_exact=False))
            yield pa.RecordBatch.from_arrays([*batch.select(kept).columns, *added], names=names)


def _up_to(batch: pa.RecordBatch, name: str, newest: int) -> pa.RecordBatch:
    """The labels, whose times in a column are nanoseconds, the newest time at most."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns", "UTC"))
    exact = column.cast(pa.int64())
    times = pc.if_else(pc.greater(exact, newest), pa.scalar(newest, pa.int64()), exact)
    return batch.set_column(batch.schema.get_field_index(name), name, times)


def _with_parts(
    batch: pa.RecordBatch, table: TypedRows, key: str, parts: Sequence[str]
) -> pa.RecordBatch:
    """The labels with the columns of their keys."""
    keys = batch.column(key).cast(pa.binary())
    is_whole = keys.is_valid()
    found = list(asked_key(table, by_event=True).arrays(keys.drop_null()))
    if keys.null_count:
        places = pc.subtract(pc.cumulative_sum(is_whole.cast(pa.int64())), 1)
        taken = pc.if_else(is_whole, places, pa.scalar(None, pa.int64()))
        found = [column.take(taken) for column in found]
    return pa.RecordBatch.from_arrays([*batch.columns, *found], names=[*batch.schema.names, *parts])


def _cast(table: TypedRows, array: pa.Array, field: pa.Field) -> pa.Array:
    def named(_: int) -> str:
        return f"{table.where}, column {field.name!r}"

    return outside_values(array, field.type, named)


# --------------------------------------------------------------------------------------------------
# Labels that ask for rows of a table: their keys, and the typed columns that a join adds.
#
#     the columns of the table     null where the label has no row, or one that is too old
#     row_timestamp timestamp      the time of the row's version in microseconds, rounded up
#     row_version bigint           the same in nanoseconds: exact

TIMESTAMP_COLUMN: Final = "row_timestamp"
VERSION_COLUMN: Final = "row_version"
TIMES: Final = {
    TIMESTAMP_COLUMN: StructField(TIMESTAMP_COLUMN, TimestampType()),
    VERSION_COLUMN: StructField(VERSION_COLUMN, LongType()),
}


def asked_key(table: TypedRows, *, by_event: bool) -> KeyCodec:
    """The columns of the key that a label names: all, or all but the event time."""
    codec = table.codec
    if not by_event:
        return codec.key
    return KeyCodec(codec.definition, codec.key.prefix, codec.definition.key[:-1])


def row_fields(
    table: TypedRows,
    labels: StructType,
    columns: Sequence[str] | None,
    prefix: str,
    *,
    by_event: bool,
) -> list[StructField]:
    """The fields that `columns` name, under their names in the result. The default is the columns
    that a label does not name as its key, and `row_timestamp`. Raises `UsageError` as
    `added_fields`."""
    if columns is None:
        asked = asked_key(table, by_event=by_event).columns
        names = [c.name for c in table.codec.definition.columns if c not in asked]
        columns = [*names, TIMESTAMP_COLUMN]
    if isinstance(columns, str):
        raise UsageError(Argument.of("columns", columns), "pass a list of names")
    own = [name for name in columns if name in TIMES and name in table.codec.definition.by_name]
    if own:
        raise UsageError(
            f"{table.where} has a column {own[0]!r}, and so has the answer of a join",
            "name other columns in columns",
        )
    typed = table.offered(changes=False, columns=[n for n in columns if n not in TIMES])
    offered = {field.name: StructField(field.name, field.dataType) for field in typed} | TIMES
    return fields_named([offered[name] for name in columns], labels, prefix)


def row_key(
    df: DataFrame,
    table: TypedRows,
    key: Columns,
    what: str,
    *,
    by_event: bool,
    is_null_null: bool = False,
) -> Column:
    """The stored keys of the rows that labels ask for, without an event time if `by_event`.

    Raises `UsageError` unless `key` names a column for each column of that key, in its order. A
    null, unless `is_null_null`, or a value that the key cannot hold, fails the query, and names the
    column.
    """
    parts = [key] if isinstance(key, Column | str) or not isinstance(key, Sequence) else list(key)
    wanted = asked_key(table, by_event=by_event).columns
    if len(parts) != len(wanted):
        names = ", ".join(column.name for column in wanted)
        raise UsageError(f"{table.where}: key={key!r}", f"name the labels' columns of {names}")
    columns = [column_of(df, each, what) for each in parts]
    empty = arrow_schema(selected(df, columns, what).schema)
    encoded = _encoded if not is_null_null else _encoded_or_null
    encoded(table, [pa.array([], field.type) for field in empty], by_event)
    encode = arrow_function(lambda *arrays: encoded(table, arrays, by_event), "a join with a table")
    made: Column = encode(*columns)
    return made


def _encoded(table: TypedRows, arrays: Sequence[pa.Array], by_event: bool) -> pa.Array:
    columns, codec = {}, asked_key(table, by_event=by_event)
    for column, array in zip(codec.columns, arrays, strict=True):
        where = f"{table.where}, column {column.name!r} of the key of a label"
        if array.null_count:
            raise UsageError(f"{where} is null", "drop such labels first")
        columns[column.name] = same_values(array, column.type, where, 0)
    return codec.keys(pa.RecordBatch.from_pydict(columns))


def _encoded_or_null(table: TypedRows, arrays: Sequence[pa.Array], by_event: bool) -> pa.Array:
    """The keys, null where a column is."""
    is_whole = reduce(pc.and_, (array.is_valid() for array in arrays))
    keys = _encoded(table, [array.filter(is_whole) for array in arrays], by_event)
    places = pc.subtract(pc.cumulative_sum(is_whole.cast(pa.int64())), 1)
    return keys.take(pc.if_else(is_whole, places, pa.scalar(None, pa.int64())))


def row_columns(
    table: TypedRows,
    keys: pa.Array,
    values: pa.Array,
    times: pa.Array,
    columns: Sequence[str],
) -> list[pa.Array]:
    """The columns of `columns`, by stored keys and values and by nanosecond times of versions."""
    alive = values.is_valid()
    places = np.cumsum(alive.to_numpy(zero_copy_only=False)) - 1
    taken = pa.array(places, pa.int64(), mask=~alive.to_numpy(zero_copy_only=False))
    stored = pa.RecordBatch.from_arrays(
        [keys.filter(alive), values.filter(alive)], names=["key", "value"]
    )
    names = [name for name in columns if name not in TIMES]
    schema = arrow_schema(table.offered(changes=False, columns=names))
    rows = table.shaped(stored, schema)
    return [
        time_column(times, is_exact=name == VERSION_COLUMN)
        if name in TIMES
        else rows.column(name).take(taken)
        for name in columns
    ]


# --------------------------------------------------------------------------------------------------
# Planning a join, and the work of its tasks.
#
# A worker plans the join, because the driver may have the store open: looking whether a store is
# open would take the driver's own lock away. So a path that the workers cannot see fails when the
# join is planned.
#
# Invariants
# 1. All tasks of a join read one place.
# 2. Each label comes out of its task once. A task that runs again gives the same rows.

KEY: Final = "kvstore_key"
AT: Final = "kvstore_at"
KNOWN: Final = "kvstore_known"
"""The columns of keys and of times that tasks get beside the labels' own columns. Labels of a table
with an event time have `KNOWN`, the time at which its rows were known."""

ANSWER: Final = ("kvstore_value", "kvstore_timestamp")
"""The columns that a task adds. They get their names in the result afterwards."""

BYTES_PER_SPLIT: Final = 4 << 20
"""Files of one split. The labels of a split stay together, and several splits make a task."""

SPLITS_MAX: Final = 1_000
"""A label finds its split by ten comparisons at most."""

_Batches: TypeAlias = "Iterable[pa.RecordBatch]"


class Plan(NamedTuple):
    """The place of a join, the least keys of all splits but the first, and the newest instant. If
    labels ask for rows, also the table of the rows."""

    place: Place
    splits: Sequence[bytes]
    newest: int
    table: TypedRows | None


def plan(spark: SparkSession, access: Access, as_of: int | None, table: str | None) -> Plan:
    """Plan a join. With `as_of` all its labels ask for that time. Costs one task.

    Raises `UsageError` if there is no such table, `NotAStoreError` or `LockedError` if the place
    cannot be read, and `HistoryGoneError` or `NotYetWrittenError` if `as_of` cannot.
    """
    work = partial(_planned, access, as_of, table, BYTES_PER_SPLIT)
    return asked(spark, work, f"planning a join with {access.url}")


def _planned(access: Access, as_of: int | None, table: str | None, split_bytes: int) -> Plan:
    with open_origin(find(access), covering=[] if as_of is None else [as_of]) as origin:
        since, upper, _ = origin.frontiers(reaching=as_of or 0)
        if as_of is not None:
            as_of = reached(as_of, upper - 1)
            require_readable(as_of, since=since, upper=upper)
        origin.keep(since if as_of is None else as_of)
        files = origin.files(upper - 1)
        count = sum(file.size_bytes for file in files) // split_bytes
        at = upper - 1 if as_of is None else as_of
        rows = None if table is None else table_at(origin, table, at)
        whole = Span() if rows is None else Span.of_prefix(rows.codec.key.prefix)
        spans = split_span(whole, files, min(max(count, 1), SPLITS_MAX))
        # The tasks choose their chain by the times of their labels.
        place = origin.place._replace(chain=None)
    return Plan(place, [span.start for span in spans[1:]], upper - 1, rows)


class Question(NamedTuple):
    """The question of a join to the labels of a task. `key` and `at` name their columns in errors.
    `columns` are the columns of the answer. `names` are the names in the result: of the labels'
    columns, and of these. With `by_event` labels ask for the newest row by its event time."""

    place: Place
    key: str
    at: str
    columns: Sequence[str]
    names: Sequence[str]
    choice: JoinChoice
    table: TypedRows | None = None
    by_event: bool = False


def joiner(question: Question) -> Callable[[_Batches], Iterator[pa.RecordBatch]]:
    """The task that adds the columns of the answer to its labels."""

    def join(batches: _Batches) -> Iterator[pa.RecordBatch]:
        freeze_objects()
        with plain_errors(), _named(question):
            labels = (_whole(batch, question) for batch in batches if batch.num_rows)
            first = next(labels, None)
            if first is None:  # opening the place would cost more than the task
                return
            with open_origin(question.place) as origin:
                yield from _joined(origin, first.schema, chain([first], labels), question)

    return join


@contextmanager
def _named(question: Question) -> Iterator[None]:
    """A `UsageError` of the block names the labels' own columns of keys and of times."""
    try:
        yield
    except UsageError as error:
        what = error.what
        for ours, theirs in ((KEY, question.key), (AT, question.at), (KNOWN, "known_at")):
            what = what.replace(repr(ours), repr(theirs))
        if what == error.what:
            raise
        raise UsageError(what, error.remedy) from None


def _joined(
    origin: Origin, schema: pa.Schema, labels: _Batches, question: Question
) -> Iterator[pa.RecordBatch]:
    table = question.table
    if table is not None and question.by_event:
        asked = (question.columns, question.names, question.choice)
        yield from latest_rows(origin, table, labels, *asked, key=KEY, at=AT, known_at=KNOWN)
        return
    joined = origin.join(
        pa.RecordBatchReader.from_batches(schema, labels),
        key=KEY,
        at=AT,
        columns=ANSWER,
        choice=question.choice,
    )
    for batch in joined:
        yield _answered(batch, question)


def _whole(batch: pa.RecordBatch, question: Question) -> pa.RecordBatch:
    """The batch. Raises `UsageError` if a label has no key or no time, unless it has null then."""
    if question.choice.on_null == "null":
        return batch
    named = {KEY: question.key, AT: question.at, KNOWN: "known_at"}
    for column, name in named.items():
        if column in batch.schema.names and batch.column(column).null_count:
            raise UsageError(f"a label has no {name}: it is null", "drop such labels first")
    return batch


def _answered(batch: pa.RecordBatch, question: Question) -> pa.RecordBatch:
    values, times = (batch.column(name) for name in ANSWER)
    if question.table is None:
        added = added_columns(values, times, question.columns)
    else:
        keys = batch.column(KEY)
        added = row_columns(question.table, keys, values, times, question.columns)
    if question.choice.on_future == "newest":
        added.append(time_column(batch.column(AS_OF), is_exact=False))
        batch = batch.drop_columns([AS_OF])
    kept = batch.drop_columns([KEY, AT, *ANSWER]).columns
    # Spark reads the batch by its names: no two columns may share one.
    return pa.RecordBatch.from_arrays([*kept, *added], names=question.names)


# --------------------------------------------------------------------------------------------------
# Point-in-time joins and look-ups of the rows of a DataFrame.
#
#     labels -> number of the split of their key -> rebalance -> sort -> join (mapInArrow)
#
# Labels alone move. The splits follow the files of the source, so that each task reads a few
# stretches of history, in their order. Spark's adaptive execution puts few labels into one task. It
# cuts a split with very many labels into several tasks, which all read the history of that split.

_SPLIT: Final = "kvstore_split"
_WHAT: Final = "the columns of a label"


def point_in_time_join(
    df: DataFrame,
    source: Address,
    key: Columns,
    at: Column | str = "ts",
    table: str | None = None,
    *,
    known_at: Column | str | TimeLike | None = None,
    max_age: AgeLike | int | None = None,
    columns: Sequence[str] | None = None,
    prefix: str = "f_",
    on_gone: OnGone = "error",
    direction: Direction = "backward",
    tolerance: AgeLike | int | None = None,
    allow_exact: bool = True,
    on_future: OnFuture = "error",
    on_null: OnNull = "error",
) -> DataFrame:
    """The rows of `df`, each with the value that its key had at its time.

    `source` is the path of a checkpoint, of a directory of checkpoints or of a store that no
    process has open, the path, URL or `Access` of a collection, or the URL or `Access` of a server
    (`kvstore serve`). All of Spark's machines must reach it. `key` is a binary or string column, or
    a list of columns, encoded as in `bulk_import`. `at` is a timestamp, or an integer of
    nanoseconds. A version counts from its own time on.

    With `table` the labels get typed columns of the row that they ask for: `columns` are some of
    the table's columns, `row_timestamp` and `row_version`, and by default the columns beside the
    key and `row_timestamp`. `key` names a column of the labels for each column of the table's key,
    without an event time. In a table with an event time a label gets the newest row with an event
    time of `at` at most, among the rows that were known at `known_at`: a column of the labels or a
    time, by default the newest instant of the source. `max_age` counts from `at` to the event.

    Without a table, `columns` are some of `value`, `value_timestamp` (in microseconds) and
    `value_version` (the same in nanoseconds), by default the first two. The result has the columns
    of `df`, and `columns` under names that begin with `prefix`. They are null where the key had no
    value then, and where the version is older than `max_age`. The rows come in no order.
    `direction`, `tolerance`, `allow_exact`, `on_future` and `on_null` are as in `Store.join` and
    `Table.join`; the newest time is that of the source at this call, and `as_of` begins with
    `prefix` too, in microseconds, rounded up. Labels of event times that are dates, integers or
    times without a zone have such times.

    Raises `UsageError` for columns that are missing, doubled or of a wrong type, and for a table
    that is not there. The query fails, naming the error: `HistoryGoneError` for a label whose
    history is not kept (null with `on_gone="null"`), `NotYetWrittenError` for a label above the
    newest instant of the source, and `UsageError` for a null key or time. Costs a sort of labels.
    """
    _require_places(df, source)
    rows = RowChoice(max_age, direction, tolerance, allow_exact, on_future, on_null)
    if table is None:
        age_of(max_age, tolerance)
    DIRECTION.check("direction", direction)
    FLAG.check("allow_exact", allow_exact)
    ON_GONE.check("on_gone", on_gone)
    ON_FUTURE.check("on_future", on_future)
    ON_NULL.check("on_null", on_null)
    time = column_of(df, at, _WHAT)
    is_null_null = on_null == "null"
    if table is None:
        _require_one_time(None, known_at)
        added_fields(df.schema, columns, prefix)
        _labels(df, key, {AT: (time, str(at))}, None)
    found = plan(df.sparkSession, Access.of(source), None, table)
    if found.table is not None:
        rows.check(found.table.codec)
    known = _known(df, known_at, found, on_gone)
    times = {AT: (time, str(at)), **known}
    labels = _labels(df, key, times, found.table, is_null_null=is_null_null)
    age = max_age if tolerance is None else tolerance
    if isinstance(age, str):
        age = age_of(age, None)
    choice = JoinChoice(age, direction, allow_exact, on_gone, on_future, on_null, found.newest)
    asked = _Asked(key, str(at), columns, prefix, choice, by_event=bool(known))
    return _joined_labels(df, labels, found, asked)


def lookup_join(
    df: DataFrame,
    source: Address,
    key: Columns,
    as_of: TimeLike | None = None,
    columns: Sequence[str] | None = None,
    *,
    table: str | None = None,
    prefix: str = "f_",
) -> DataFrame:
    """The rows of `df`, each with the value that its key has at `as_of`: keys are looked up.

    `as_of` defaults to the newest instant of the source at this call. The other parameters, the
    result and its cost are as in `point_in_time_join`. A row whose key is null is an error.

    Raises `HistoryGoneError` or `NotYetWrittenError` for a time that the source does not keep.
    """
    _require_places(df, source)
    time = None
    if as_of is not None:
        time = int(to_timestamp(as_of, name="as_of", now=Clock().wall_ns))
    if table is None:
        added_fields(df.schema, columns, prefix)
        _labels(df, key, {AT: (F.lit(0), "as_of")}, None)
    found = plan(df.sparkSession, Access.of(source), time, table)
    require_nanoseconds("as_of", as_of, found.newest + 1)
    at = F.lit(found.newest if time is None else reached(time, found.newest)).cast("long")
    labels = _labels(df, key, {AT: (at, "as_of")}, found.table)
    choice = JoinChoice(None, "backward", True, "error", "error", "error", found.newest)
    return _joined_labels(df, labels, found, _Asked(key, "as_of", columns, prefix, choice))


class _Asked(NamedTuple):
    """The arguments on which the answers of a join depend."""

    key: Columns
    at: str
    columns: Sequence[str] | None
    prefix: str
    choice: JoinChoice
    by_event: bool = False


def _require_places(df: object, source: object) -> None:
    """Raise `UsageError` unless the labels are a DataFrame, and workers can open the source."""
    if not isinstance(df, DataFrame):
        raise UsageError(
            f"labels are a {type(df).__name__}, and no DataFrame",
            "pass a DataFrame; Store.join takes Arrow data",
        )
    if not isinstance(source, (str, os.PathLike, Access)):
        raise UsageError(
            f"the source is a {type(source).__name__}",
            "pass a path, a URL or an Access: Spark's workers open it themselves",
        )


def _require_one_time(table: TypedRows | None, known_at: object) -> None:
    if known_at is not None:
        what = "values" if table is None else f"rows of {table.where}"
        raise UsageError(
            f"known_at={known_at!r}: {what} are known at the label's time",
            "leave known_at out; it is for a table with an event time",
        )


def _known(
    df: DataFrame, known_at: Column | str | TimeLike | None, found: Plan, on_gone: OnGone
) -> dict[str, tuple[Column, str]]:
    """The column of the times at which rows were known, which labels of a table with an event time
    have."""
    table = found.table
    if table is None or not table.codec.definition.has_event_time:
        _require_one_time(table, known_at)
        return {}
    if on_gone != "error":
        raise UsageError(
            f"on_gone={on_gone!r}: {table.where} has an event time",
            "leave on_gone out, and ask for a known_at that is kept",
        )
    if isinstance(known_at, Column) or (isinstance(known_at, str) and known_at in df.columns):
        return {KNOWN: (column_of(df, known_at, _WHAT), "known_at")}
    at = found.newest
    if known_at is not None:
        time = int(to_timestamp(known_at, name="known_at", now=Clock().wall_ns))
        at = reached(time, found.newest)
    require_nanoseconds("known_at", known_at, found.newest + 1)
    return {KNOWN: (F.lit(at).cast("long"), "known_at")}


def _labels(
    df: DataFrame,
    key: Columns,
    times: Mapping[str, tuple[Column, str]],
    table: TypedRows | None,
    *,
    is_null_null: bool = False,
) -> DataFrame:
    """The labels with columns added: their keys, and `times`, each a column and its name in errors.
    Raises `UsageError` for a column of a wrong type.

    The labels' columns are numbered: Spark's `mapInArrow` reads a dot in a name as a structure.
    """
    names = df.columns
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"labels have several columns {doubled[0]!r}", "rename all but one")
    keys = (
        key_of(df, key, _WHAT)
        if table is None
        else row_key(df, table, key, _WHAT, by_event=KNOWN in times, is_null_null=is_null_null)
    )
    labels = selected(df, [F.col("*"), keys, *(column for column, _ in times.values())], _WHAT)
    labels = labels.toDF(*(f"label_{number}" for number in range(len(names))), KEY, *times)
    require_bytes("key", key, labels.schema[KEY].dataType)
    for name, (_, told) in times.items():
        found = labels.schema[name].dataType
        is_local = isinstance(found, (DateType, TimestampNTZType))
        # An event time may be such a time; `kvstore.tables.joining` compares the two.
        if not (name == AT and KNOWN in times and is_local):
            require_time(told, found)
    return labels.withColumn(KEY, F.col(KEY).cast(BinaryType()))


def _joined_labels(df: DataFrame, labels: DataFrame, found: Plan, asked: _Asked) -> DataFrame:
    if found.table is None:
        added = added_fields(df.schema, asked.columns, asked.prefix)
    else:
        added = row_fields(
            found.table, df.schema, asked.columns, asked.prefix, by_event=asked.by_event
        )
    columns = [field.name.removeprefix(asked.prefix) for field in added]
    if asked.choice.on_future == "newest":
        taken = StructType([*df.schema.fields, *added])
        added += fields_named([StructField(AS_OF, TimestampType())], taken, asked.prefix)
    schema = StructType([*df.schema.fields, *added])
    question = Question(
        *(found.place, _name(asked.key), asked.at, columns, schema.names),
        *(asked.choice, found.table, asked.by_event),
    )
    split = partition_of(F.col(KEY), found.splits)
    parted = labels.withColumn(_SPLIT, split)
    # A rebalance also cuts a split with most of the labels in two.
    together = parted.hint("rebalance", _SPLIT) if has(REBALANCE) else parted.repartition(_SPLIT)
    together = together.drop(_SPLIT)
    # The whole task is then one pass in the order of the history, whatever the number of labels.
    return together.sortWithinPartitions(KEY, AT).mapInArrow(joiner(question), schema)


def _name(key: Columns) -> str:
    if isinstance(key, str) or not isinstance(key, Sequence):
        return str(key)
    return ", ".join(map(str, key))
