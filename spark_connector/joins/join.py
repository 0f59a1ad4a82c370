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
from typing import Final

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

    The result has the columns of `df`, and of `columns`, under names that begin with `prefix`:
    `value`, `value_timestamp` (in microseconds) and `value_version` (the same in nanoseconds). They
    are null where the key had no value then, and where the version is older than `max_age`. The
    default is the first two. The rows come in no order.

    Raises `UsageError` for columns that are missing, doubled or of a wrong type. The query fails,
    naming the error: `HistoryGoneError` for a label whose history is not kept (null with
    `on_gone="null"`), `NotYetWrittenError` for a label above the newest instant of the source, and
    `UsageError` for a null key or time.

    The call costs one small task, which looks at the source; the query moves and sorts the labels,
    and no history. Each task seeks, or passes over the part of the history that its labels span.
    """
    _require_bytes_of(source, table, known_at)
    if on_gone not in ("error", "null"):
        raise UsageError(f"on_gone={on_gone!r}", "pass 'error' or 'null'")
    require_age(max_age, name="max_age")
    added = added_fields(df.schema, columns, prefix)
    labels = _labels(df, key, column_of(df, at, _WHAT), str(at))
    found = plan(df.sparkSession, Access.of(source), None)
    asked = [field.name.removeprefix(prefix) for field in added]
    schema = StructType([*df.schema.fields, *added])
    question = Question(found.place, _name(key), str(at), asked, schema.names, max_age, on_gone)
    return _joined(labels, found, question, schema)


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
    _require_bytes_of(source, table, None)
    added = added_fields(df.schema, columns, prefix)
    time = None
    if as_of is not None:
        time = int(to_timestamp(as_of, name="as_of", now=Clock().wall_ns))
    labels = _labels(df, key, F.lit(0), "as_of")
    found = plan(df.sparkSession, Access.of(source), time)
    labels = labels.withColumn(AT, F.lit(found.newest if time is None else time).cast("long"))
    asked = [field.name.removeprefix(prefix) for field in added]
    schema = StructType([*df.schema.fields, *added])
    question = Question(found.place, _name(key), "as_of", asked, schema.names, None, "error")
    return _joined(labels, found, question, schema)


def _require_bytes_of(source: object, table: str | None, known_at: object) -> None:
    """Raise `UsageError` unless the source is a place of keys and values."""
    if not isinstance(source, (str, os.PathLike, Access)):
        raise UsageError(
            f"the source is a {type(source).__name__}",
            "pass a path, a URL or an Access: Spark's workers open it themselves",
        )
    for name, given in (("table", table), ("known_at", known_at)):
        if given is not None:
            raise UsageError(
                f"{name}={given!r}: Spark joins keys and values, which have no tables",
                f"leave {name} out",
            )


def _labels(df: DataFrame, key: Columns, at: Column, at_name: str) -> DataFrame:
    """The labels with two more columns, their keys and times. Raises `UsageError` for bad ones.

    The labels' columns are numbered: Spark's `mapInArrow` reads a dot in a name as a structure.
    """
    names = df.columns
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"labels have several columns {doubled[0]!r}", "rename all but one")
    labels = selected(df, [F.col("*"), key_of(df, key, _WHAT), at], _WHAT)
    labels = labels.toDF(*(f"label_{number}" for number in range(len(names))), KEY, AT)
    require_bytes("key", key, labels.schema[KEY].dataType)
    require_time(at_name, labels.schema[AT].dataType)
    return labels.withColumn(KEY, F.col(KEY).cast(BinaryType()))


def _joined(labels: DataFrame, found: Plan, question: Question, schema: StructType) -> DataFrame:
    split = partition_of(F.col(KEY), found.splits)
    together = labels.withColumn(_SPLIT, split).hint("rebalance", _SPLIT).drop(_SPLIT)
    # The whole task is then one pass in the order of the history, whatever the number of labels.
    return together.sortWithinPartitions(KEY, AT).mapInArrow(joiner(question), schema)


def _name(key: Columns) -> str:
    if isinstance(key, str) or not isinstance(key, Sequence):
        return str(key)
    return ", ".join(map(str, key))
