"""Point-in-time joins and look-ups of the rows of a DataFrame.

    labels -> number of the split of their key -> rebalance -> sort -> join (mapInArrow)

Labels alone move. The splits follow the files of the source, so that each task reads a few
stretches of history, in their order. Spark's adaptive execution puts few labels into one task. It
cuts a split with very many labels into several tasks, which all read the history of that split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, StructType

from kvstore.arguments import require_age
from kvstore.clock import Clock
from kvstore.errors import UsageError
from kvstore.joins import OnGone
from kvstore.timestamp import TimeLike, reached, to_timestamp
from spark_connector.access import Access, Address
from spark_connector.joins.answers import added_fields
from spark_connector.joins.table_rows import row_fields, row_key
from spark_connector.joins.tasks import AT, KEY, KNOWN, Plan, Question, joiner, plan
from spark_connector.loading.columns import (
    Columns,
    column_of,
    key_of,
    partition_of,
    require_bytes,
    require_time,
    selected,
)
from spark_connector.options import require_nanoseconds
from spark_connector.reading.typed import TypedRows
from spark_connector.releases import REBALANCE, has

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
    max_age: timedelta | None = None,
    columns: Sequence[str] | None = None,
    prefix: str = "f_",
    on_gone: OnGone = "error",
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

    Raises `UsageError` for columns that are missing, doubled or of a wrong type, and for a table
    that is not there. The query fails, naming the error: `HistoryGoneError` for a label whose
    history is not kept (null with `on_gone="null"`), `NotYetWrittenError` for a label above the
    newest instant of the source, and `UsageError` for a null key or time. Costs a sort of labels.
    """
    _require_places(df, source)
    _require_rules(max_age, on_gone)
    time = column_of(df, at, _WHAT)
    if table is None:
        _require_one_time(None, known_at)
        added_fields(df.schema, columns, prefix)
        _labels(df, key, {AT: (time, str(at))}, None)
    found = plan(df.sparkSession, Access.of(source), None, table)
    known = _known(df, known_at, found, on_gone)
    labels = _labels(df, key, {AT: (time, str(at)), **known}, found.table)
    asked = _Asked(key, str(at), columns, prefix, max_age, on_gone, by_event=bool(known))
    return _joined(df, labels, found, asked)


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
    return _joined(df, labels, found, _Asked(key, "as_of", columns, prefix, None, "error"))


class _Asked(NamedTuple):
    """The arguments on which the answers of a join depend."""

    key: Columns
    at: str
    columns: Sequence[str] | None
    prefix: str
    max_age: timedelta | None
    on_gone: OnGone
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


def _require_rules(max_age: object, on_gone: object) -> None:
    require_age(max_age, name="max_age")
    if on_gone not in ("error", "null"):
        raise UsageError(f"on_gone={on_gone!r}", "pass 'error' or 'null'")


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
    df: DataFrame, key: Columns, times: Mapping[str, tuple[Column, str]], table: TypedRows | None
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
        else row_key(df, table, key, _WHAT, by_event=KNOWN in times)
    )
    labels = selected(df, [F.col("*"), keys, *(column for column, _ in times.values())], _WHAT)
    labels = labels.toDF(*(f"label_{number}" for number in range(len(names))), KEY, *times)
    require_bytes("key", key, labels.schema[KEY].dataType)
    for name, (_, told) in times.items():
        require_time(told, labels.schema[name].dataType)
    return labels.withColumn(KEY, F.col(KEY).cast(BinaryType()))


def _joined(df: DataFrame, labels: DataFrame, found: Plan, asked: _Asked) -> DataFrame:
    if found.table is None:
        added = added_fields(df.schema, asked.columns, asked.prefix)
    else:
        added = row_fields(
            found.table, df.schema, asked.columns, asked.prefix, by_event=asked.by_event
        )
    columns = [field.name.removeprefix(asked.prefix) for field in added]
    schema = StructType([*df.schema.fields, *added])
    question = Question(
        *(found.place, _name(asked.key), asked.at, columns, schema.names),
        *(asked.max_age, asked.on_gone, found.table, asked.by_event),
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
