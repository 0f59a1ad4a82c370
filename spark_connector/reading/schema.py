"""The columns of a read: their schema in Spark, and Arrow batches in this schema.

    state     key binary  value binary
    changes   key binary               the start of a range delete
              end_key binary           for range deletes only
              value binary             for puts only
              _change_type string      put | delete | delete_range; with images:
                                       insert | update_preimage | update_postimage | delete
              _commit_version bigint   the commit's timestamp in nanoseconds: exact
              _commit_timestamp timestamp    the same in microseconds, rounded up: as a time of a
                                             read it has the commit

Spark compares the schema of the first batch, nullability included, with the schema that it asked
for, and trusts all later batches. So every batch is built to the asked schema. Spark prunes no
columns of a Python source; a narrower schema from the user, or the option `columns`, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kvstore.arrow import to_microseconds
from kvstore.errors import UsageError
from spark_connector.interfaces import utc_schema

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
"""Names of the codes in the column `op`, of backup/version_rows.py and of images.py."""

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
    """The stored columns that make up the asked columns, in the order of backup/version_rows.py."""
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
