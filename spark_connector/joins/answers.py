"""The columns that a join adds to the labels.

value binary                 null where the key had no value, or one that is too old
value_timestamp timestamp    the time of the version in microseconds, rounded up
value_version bigint         the same in nanoseconds: exact
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StructField, StructType, TimestampType

from kvstore.arrow import to_microseconds
from kvstore.errors import UsageError

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
        raise UsageError(f"columns={columns!r}", f"pass some of {', '.join(names)}, each once")
    return fields_named([OFFERED[name] for name in asked], labels, prefix)


def fields_named(
    fields: Sequence[StructField], labels: StructType, prefix: str
) -> list[StructField]:
    """The fields under names that begin with `prefix`. Raises `UsageError` for a name that the
    labels have."""
    if not isinstance(prefix, str):
        raise UsageError(f"prefix={prefix!r}", "pass text")
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
