"""The columns that a caller chooses of a DataFrame: by name, or by an expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from kvstore.errors import UsageError
from spark_connector.loading.keys import require_ordered, tuple_key

Columns: TypeAlias = "Column | str | Sequence[Column | str]"


def column_of(df: DataFrame, given: Column | str, what: str) -> Column:
    """A column by its name, or as it is given. A name with a dot is a column of that name first,
    and a field of a structure where no column has the name.

    Raises `UsageError`, with `what` in it, if the DataFrame has none of the name.
    """
    if not isinstance(given, (Column, str)):
        raise UsageError(f"{given!r} is no column", "pass a column's name, or an expression")
    if isinstance(given, Column):
        return given
    try:
        # Where no such column is, `F.col("user")` would be the name of the user.
        return df[quoted(given) if given in df.columns else given]
    except AnalysisException as error:
        raise _refused(df, error, what) from error


def quoted(name: str) -> str:
    """The name of a column as Spark reads it, also with dots and backquotes in it."""
    return "`" + name.replace("`", "``") + "`"


def key_of(df: DataFrame, key: Columns, what: str) -> Column:
    """The column of keys: a list of columns is encoded as `tuple_key` does."""
    if isinstance(key, str) or not isinstance(key, Sequence):
        return column_of(df, key, what)
    columns = [column_of(df, each, what) for each in key]
    require_ordered(selected(df, columns, what).schema)
    return tuple_key(*columns)


def selected(df: DataFrame, columns: Sequence[Column], what: str) -> DataFrame:
    """These columns. Raises `UsageError`, with `what` in it, if the DataFrame lacks one."""
    try:
        found = df.select(*columns)
        _ = found.schema  # a session by Spark Connect looks at the columns only now
    except AnalysisException as error:
        raise _refused(df, error, what) from error
    return found


def _refused(df: DataFrame, error: AnalysisException, what: str) -> UsageError:
    # The first line of Spark's text names the column.
    first = str(error).partition(chr(10))[0]
    return UsageError(f"{what}: {first}", f"the DataFrame has {', '.join(df.columns)}")


def require_bytes(name: str, given: object, found: DataType) -> None:
    """Raise `UsageError` unless the column is binary or a string."""
    if not isinstance(found, (BinaryType, StringType)):
        raise UsageError(
            f"{name} {given} is {found.simpleString()}, not binary or string",
            "encode it so that its bytes sort as scans should; a list of columns is encoded"
            if name == "key"
            else "encode it",
        )


def require_time(name: str, found: DataType) -> None:
    """Raise `UsageError` unless the column has instants, or integers of nanoseconds."""
    if isinstance(found, TimestampNTZType):
        raise UsageError(f"column {name} has times without a time zone", "cast it to timestamp")
    if not isinstance(found, (TimestampType, IntegralType)):
        raise UsageError(
            f"column {name} is {found.simpleString()}, and no time",
            "pass a timestamp, or an integer of nanoseconds",
        )


def partition_of(key: Column, splits: Sequence[bytes], first: int = 0) -> Column:
    """The number of splits at or below the key, by a binary search of nested conditions."""
    if not splits:
        return F.lit(first)
    middle = len(splits) // 2
    below = partition_of(key, splits[:middle], first)
    above = partition_of(key, splits[middle + 1 :], first + middle + 1)
    return F.when(key < F.lit(splits[middle]), below).otherwise(above)
