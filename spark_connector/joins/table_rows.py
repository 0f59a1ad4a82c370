"""Labels that ask for rows of a table: their keys, and the typed columns that a join adds.

the columns of the table     null where the label has no row, or one that is too old
row_timestamp timestamp      the time of the row's version in microseconds, rounded up
row_version bigint           the same in nanoseconds: exact
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from kvstore.errors import UsageError
from kvstore.tables.exact import same_values
from kvstore.tables.keys import KeyCodec
from spark_connector.interfaces import arrow_function
from spark_connector.joins.answers import fields_named, time_column
from spark_connector.loading.columns import Columns, column_of, selected
from spark_connector.reading.schema import arrow_schema
from spark_connector.reading.typed import TypedRows

TIMESTAMP: Final = "row_timestamp"
VERSION: Final = "row_version"
TIMES: Final = {
    TIMESTAMP: StructField(TIMESTAMP, TimestampType()),
    VERSION: StructField(VERSION, LongType()),
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
        columns = [*names, TIMESTAMP]
    if isinstance(columns, str):
        raise UsageError(f"columns={columns!r}", "pass a list of names")
    own = [name for name in columns if name in TIMES and name in table.codec.definition.by_name]
    if own:
        raise UsageError(
            f"{table.where} has a column {own[0]!r}, and so has the answer of a join",
            "name other columns in columns",
        )
    typed = table.offered(changes=False, columns=[n for n in columns if n not in TIMES])
    offered = {field.name: StructField(field.name, field.dataType) for field in typed} | TIMES
    return fields_named([offered[name] for name in columns], labels, prefix)


def row_key(df: DataFrame, table: TypedRows, key: Columns, what: str, *, by_event: bool) -> Column:
    """The stored keys of the rows that labels ask for, without an event time if `by_event`.

    Raises `UsageError` unless `key` names a column for each column of that key, in its order. A
    null, or a value that the key cannot hold, fails the query, and names the column.
    """
    parts = [key] if isinstance(key, Column | str) or not isinstance(key, Sequence) else list(key)
    wanted = asked_key(table, by_event=by_event).columns
    if len(parts) != len(wanted):
        names = ", ".join(column.name for column in wanted)
        raise UsageError(f"{table.where}: key={key!r}", f"name the labels' columns of {names}")
    columns = [column_of(df, each, what) for each in parts]
    empty = arrow_schema(selected(df, columns, what).schema)
    _encoded(table, [pa.array([], field.type) for field in empty], by_event)
    encode = arrow_function(
        lambda *arrays: _encoded(table, arrays, by_event), "a join with a table"
    )
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
        time_column(times, is_exact=name == VERSION)
        if name in TIMES
        else rows.column(name).take(taken)
        for name in columns
    ]
