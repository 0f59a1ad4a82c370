"""DataFrames of keys and values for tests of loads, and options of a JVM for tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


ROWS = "key binary, value binary"
FAST_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM that starts fast at the cost of speed in the long run, with one GC thread."""


def frame(spark: SparkSession, rows: dict[bytes, bytes], *, partitions: int = 3) -> DataFrame:
    table = pa.table(
        {
            "key": pa.array(list(rows), pa.binary()),
            "value": pa.array(list(rows.values()), pa.binary()),
        }
    )
    return spark.createDataFrame(table).repartition(partitions)


def random_rows(seed: int, count: int) -> dict[bytes, bytes]:
    """Keys over few bytes (so that many are prefixes of others) and over all bytes."""
    pick = random.Random(seed)
    few = [b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff"]
    rows = {b"": b"the empty key", b"\x00": b"", b"\x00\x00": b"\x00\xff"}
    while len(rows) < count:
        if pick.random() < 0.5:
            key = b"".join(pick.choices(few, k=pick.randrange(7)))
        else:
            key = pick.randbytes(pick.randrange(1, 40))
        rows[key] = pick.randbytes(pick.randrange(60))
    return rows
