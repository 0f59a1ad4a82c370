"""The interfaces of PySpark that not every release has.

Our classes are derived from them when the package is imported. A release that lacks an interface
gets an empty class in its place: Spark never asks such a class for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructType

from kvstore.spark.releases import ARROW_FUNCTIONS, LIMITS, SOURCES, has, require

if TYPE_CHECKING or has(SOURCES):
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        InputPartition,
        WriterCommitMessage,
    )
else:
    DataSource = type("DataSource", (), {})
    DataSourceArrowWriter = type("DataSourceArrowWriter", (), {})
    DataSourceReader = type("DataSourceReader", (), {})
    DataSourceStreamReader = type("DataSourceStreamReader", (), {})
    DataSourceStreamWriter = type("DataSourceStreamWriter", (), {})
    DataSourceWriter = type("DataSourceWriter", (), {})
    InputPartition = type("InputPartition", (), {})
    WriterCommitMessage = type("WriterCommitMessage", (), {})

if TYPE_CHECKING or has(LIMITS):
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:
    ReadLimit = type("ReadLimit", (), {})
    ReadAllAvailable = type("ReadAllAvailable", (ReadLimit,), {})
    ReadMaxBytes = type("ReadMaxBytes", (ReadLimit,), {})
    ReadMaxRows = type("ReadMaxRows", (ReadLimit,), {})
    SupportsTriggerAvailableNow = type("SupportsTriggerAvailableNow", (), {})

__all__ = [
    "DataSource",
    "DataSourceArrowWriter",
    "DataSourceReader",
    "DataSourceStreamReader",
    "DataSourceStreamWriter",
    "DataSourceWriter",
    "InputPartition",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
    "arrow_function",
    "utc_schema",
]


def arrow_function(make: Callable[..., pa.Array], what: str) -> Any:
    """A function over columns that returns a binary column, and gets Arrow arrays in its tasks.

    Raises `UsageError`, with `what` in it, if the release has no such functions.
    """
    require(ARROW_FUNCTIONS, what)
    from pyspark.sql.pandas.functions import arrow_udf

    declare: Any = arrow_udf  # its overloads end at ten columns
    return declare(make, BinaryType())


def utc_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects for `schema`. Its timestamps are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Releases before 4.2 take no zone: their timestamps are in UTC always.
    return to_arrow_schema(schema, timezone="UTC") if has(LIMITS) else to_arrow_schema(schema)
