"""Point-in-time joins and look-ups of the rows of a DataFrame.

    labels -> number of the split of their key -> rebalance -> sort -> join (mapInArrow)

Labels alone move. The splits follow the files of the source, so that each task reads a few
stretches of history, in their order. Spark's adaptive execution puts few labels into one task. It
cuts a split with very many labels into several tasks, which all read the history of that split.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, StructType

from kvstore.arguments import require_age
from kvstore.clock import Clock
from kvstore.errors import UsageError
from kvstore.joins import OnGone
from kvstore.timestamp import TimeLike, to_timestamp
from spark_connector.access import Access, Address
from spark_connector.joins.answers import added_fields
from spark_connector.joins.table_rows import row_fields, row_key
from spark_connector.joins.tasks import AT, KEY, Plan, Question, joiner, plan
from spark_connector.loading.columns import (
    Columns,
    column_of,
    key_of,
    partition_of,
    require_bytes,
    require_time,
    selected,
)
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
    a list of columns that is encoded as `bulk_import` encodes it. `at` is a timestamp, or an
    integer of nanoseconds. A version counts from its own time on.

    With `table` the labels get typed columns of the row that they ask for: `columns` are some of
    the table's columns, `row_timestamp` and `row_version`, and by default the columns beside the
    key and `row_timestamp`. `key` names a column of the labels for each column of the table's key.
    A table with an event time is refused: join it by `Table.join`.

    The result has the columns of `df`, and of `columns`, under names that begin with `prefix`:
    `value`, `value_timestamp` (in microseconds) and `value_version` (the same in nanoseconds). They
    are null where the key had no value then, and where the version is older than `max_age`. The
    default is the first two. The rows come in no order.

    Raises `UsageError` for columns that are missing, doubled or of a wrong type, and for a table
    that is not there. The query fails, naming the error: `HistoryGoneError` for a label whose
    history is not kept (null with `on_gone="null"`), `NotYetWrittenError` for a label above the
    newest instant of the source, and `UsageError` for a null key or time.

    The call costs one small task; the query moves and sorts the labels, and no history. Each task
    seeks, or passes over the part of the history that its labels span.
    """
    _require_place(source)
    _require_rules(known_at, on_gone)
    require_age(max_age, name="max_age")
    time = column_of(df, at, _WHAT)
    if table is None:
        added_fields(df.schema, columns, prefix)
        _labels(df, key, time, str(at), None)
    found = plan(df.sparkSession, Access.of(source), None, table)
    _require_one_time(found.table)
    labels = _labels(df, key, time, str(at), found.table)
    return _joined(df, labels, found, _Asked(key, str(at), columns, prefix, max_age, on_gone))


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
    _require_place(source)
    time = None
    if as_of is not None:
        time = int(to_timestamp(as_of, name="as_of", now=Clock().wall_ns))
    if table is None:
        added_fields(df.schema, columns, prefix)
        _labels(df, key, F.lit(0), "as_of", None)
    found = plan(df.sparkSession, Access.of(source), time, table)
    at = F.lit(found.newest if time is None else time).cast("long")
    labels = _labels(df, key, at, "as_of", found.table)
    return _joined(df, labels, found, _Asked(key, "as_of", columns, prefix, None, "error"))


class _Asked(NamedTuple):
    """The arguments on which the answers of a join depend."""

    key: Columns
    at: str
    columns: Sequence[str] | None
    prefix: str
    max_age: timedelta | None
    on_gone: OnGone


def _require_place(source: object) -> None:
    """Raise `UsageError` unless the source is a place that workers can open."""
    if not isinstance(source, (str, os.PathLike, Access)):
        raise UsageError(
            f"the source is a {type(source).__name__}",
            "pass a path, a URL or an Access: Spark's workers open it themselves",
        )


def _require_rules(known_at: object, on_gone: object) -> None:
    if known_at is not None:
        raise UsageError(
            f"known_at={known_at!r}: Spark joins values and rows as they were known at `at`",
            "leave known_at out; Table.join takes it for a table with an event time",
        )
    if on_gone not in ("error", "null"):
        raise UsageError(f"on_gone={on_gone!r}", "pass 'error' or 'null'")


def _require_one_time(table: TypedRows | None) -> None:
    if table is not None and table.codec.definition.has_event_time:
        raise UsageError(
            f"{table.where} has an event time, which a join at one time does not look at",
            "use Table.join, or lookup_join with the whole key",
        )


def _labels(
    df: DataFrame, key: Columns, at: Column, at_name: str, table: TypedRows | None
) -> DataFrame:
    """The labels with two more columns, their keys and times. Raises `UsageError` for bad ones.

    The labels' columns are numbered: Spark's `mapInArrow` reads a dot in a name as a structure.
    """
    names = df.columns
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"labels have several columns {doubled[0]!r}", "rename all but one")
    keys = key_of(df, key, _WHAT) if table is None else row_key(df, table, key, _WHAT)
    labels = selected(df, [F.col("*"), keys, at], _WHAT)
    labels = labels.toDF(*(f"label_{number}" for number in range(len(names))), KEY, AT)
    require_bytes("key", key, labels.schema[KEY].dataType)
    require_time(at_name, labels.schema[AT].dataType)
    return labels.withColumn(KEY, F.col(KEY).cast(BinaryType()))


def _joined(df: DataFrame, labels: DataFrame, found: Plan, asked: _Asked) -> DataFrame:
    if found.table is None:
        added = added_fields(df.schema, asked.columns, asked.prefix)
    else:
        added = row_fields(found.table, df.schema, asked.columns, asked.prefix)
    columns = [field.name.removeprefix(asked.prefix) for field in added]
    schema = StructType([*df.schema.fields, *added])
    question = Question(
        *(found.place, _name(asked.key), asked.at, columns, schema.names),
        *(asked.max_age, asked.on_gone, found.table),
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
