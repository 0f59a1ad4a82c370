"""The columns that a join adds to the labels.

value binary                 null where the key had no value, or one that is too old
value_timestamp timestamp    the time of the version, cut to Spark's microseconds
value_version bigint         the same in nanoseconds: exact
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, LongType, StructField, StructType, TimestampType

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
    if not isinstance(prefix, str):
        raise UsageError(f"prefix={prefix!r}", "pass text")
    taken = {name.lower() for name in labels.names}
    for name in asked:
        if (prefix + name).lower() in taken:  # Spark's names of columns ignore case
            raise UsageError(
                f"labels have a column {prefix + name!r} already",
                "pass another prefix, or rename the column",
            )
    return [StructField(prefix + name, OFFERED[name].dataType) for name in asked]


def added_columns(values: pa.Array, times: pa.Array, columns: Sequence[str]) -> list[pa.Array]:
    """The columns of `columns`, by values and by nanosecond times of versions."""
    return [_column(values, times.cast(pa.int64()), name) for name in columns]


def _column(values: pa.Array, times: pa.Array, name: str) -> pa.Array:
    if name == VALUE:
        return values
    if name == VERSION:
        return times
    return pc.divide(times, 1000).cast(pa.timestamp("us", tz="UTC"))
