"""The rows of a seed: `key`, `value`, `at` and `op`.

Names, nulls and times of rows are checked in the tasks, by the code of `bulk.seed`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, NullType, StringType

from bulk.seed import SeedColumns
from spark_connector.loading.columns import (
    Columns,
    column_of,
    key_of,
    require_bytes,
    require_time,
    selected,
)

COLUMNS: Final = SeedColumns("key", "value", "at", "op")

_WHAT: Final = "the columns to seed"


def seed_rows(
    df: DataFrame, key: Columns, value: Column | str, at: Column | str, op: Column | str | None
) -> DataFrame:
    """The rows under the names of `COLUMNS`. Raises `UsageError` for missing or wrong columns."""
    given = [key_of(df, key, _WHAT), *(column_of(df, each, _WHAT) for each in (value, at))]
    given.append(F.lit("put") if op is None else column_of(df, op, _WHAT))
    names = COLUMNS._asdict().values()
    rows = selected(df, [c.alias(n) for c, n in zip(given, names, strict=True)], _WHAT)
    types = {field.name: field.dataType for field in rows.schema.fields}
    require_bytes("key", key, types["key"])
    if op is None or not isinstance(types["value"], NullType):
        require_bytes("value", value, types["value"])
    require_time(str(at), types["at"])
    return rows.select(
        F.col("key").cast(BinaryType()),
        F.col("value").cast(BinaryType()),
        F.col("at"),
        F.col("op").cast(StringType()),
    )
