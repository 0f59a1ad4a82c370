"""The rows of a load: chosen columns as binary, range-partitioned by key, and sorted if need be.

Rows are range-partitioned by the key alone: with a second column in the range expression Spark
spreads one key over several partitions. Spark orders binary by unsigned bytes, as we do.

Spark finds the borders of its range partitions in a sample of whole rows, which reads all columns
once more. A load samples keys alone, and leaves the sort to whoever writes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, DataType, StringType

from kvstore.errors import UsageError
from kvstore.span import require_key
from spark_connector.keys import tuple_key

Duplicates: TypeAlias = Literal["error", "last"]
Columns: TypeAlias = "Column | str | Sequence[Column | str]"

BYTES_PER_PARTITION: Final = 128 << 20
"""Input that one task sorts and writes when `partitions` is not given. A Python task costs some
70 ms, so files should not be small; and a sort that fits memory does not spill."""

PARTITIONS_MAX: Final = 10_000

SAMPLED_PARTITIONS_MAX: Final = 64
"""Up to here the borders are sampled here: every task of the sample may send as many keys as all
together keep. Beyond, Spark samples."""

SAMPLES_PER_PARTITION: Final = 400
"""Keys sampled for each partition to be: nine of ten are within a tenth of their share."""

SAMPLED_KEY_BYTES: Final = 1024
"""Of a sampled key. A border need not be a key: longer ones that agree so far stay together."""

_UNKNOWN_SIZE: Final = 1 << 60
"""Spark's estimate of a plan it knows nothing about is about the largest long."""

KEY: Final = "key"
VALUE: Final = "value"
OP: Final = "op"
_ORDER: Final = "kvstore_order"


def sorted_rows(
    df: DataFrame,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None = None,
    partitions: int | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
) -> DataFrame:
    """`df` as rows to import: columns `key`, `value` and, if given, `op`; sorted for staging.

    For `df.write.format("kvstore")`; `bulk_import` does it itself. Parameters as there. With
    `duplicates="last"` the rows of one key lie together, the one to take first.

    Raises `UsageError` on bad columns.
    """
    require_order(duplicates, order_by)
    rows = chosen(df, key, value, op=op, order_by=order_by)
    return in_order(parted(rows, wanted_partitions(df, partitions, splits), splits))


def require_order(duplicates: Duplicates, order_by: Column | str | None) -> None:
    """Raise `UsageError` unless an order is given where, and only where, it decides."""
    if duplicates not in ("error", "last") or (duplicates == "last") != (order_by is not None):
        raise UsageError(
            f"duplicates={duplicates!r} with order_by={order_by!r}",
            'pass duplicates="last" and order_by together: arrival order means nothing in Spark',
        )


def wanted_partitions(df: DataFrame, partitions: int | None, splits: Sequence[bytes] | None) -> int:
    """How many files to write. Raises `UsageError` on bad `partitions` and `splits`."""
    if splits is not None:
        if partitions is not None:
            raise UsageError("partitions and splits are both given", "pass one")
        return len(_checked(splits)) + 1
    if partitions is None:
        return _partition_count(df)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise UsageError(f"partitions={partitions}", f"pass a number from 1 to {PARTITIONS_MAX}")
    return partitions


def parted(rows: DataFrame, partitions: int, splits: Sequence[bytes] | None) -> DataFrame:
    """`rows` range-partitioned by key: at `splits`, or where Spark's sample says."""
    if splits is None:
        # The count is always passed: without one, adaptive execution merges all into one.
        return rows.repartitionByRange(partitions, KEY)
    return rows.repartitionById(len(splits) + 1, _partition_of(splits))


def in_order(parted_rows: DataFrame) -> DataFrame:
    """Each partition sorted by key, the row to take first, and without the order."""
    # Among rows of equal order the value decides: arrival differs from run to run.
    last_first = (
        [F.col(_ORDER).desc(), F.col(VALUE).desc()] if _ORDER in parted_rows.columns else []
    )
    return parted_rows.sortWithinPartitions(F.col(KEY), *last_first).drop(_ORDER)


def sampled_splits(rows: DataFrame, partitions: int) -> list[bytes] | None:
    """Keys that cut `rows` into about even partitions; fewer where keys repeat. None if there
    would be too many to sample for. Computes the keys of all rows, and no other column."""
    if partitions > SAMPLED_PARTITIONS_MAX:
        return None
    if partitions == 1:
        return []
    keys = rows.select(F.substring(KEY, 1, SAMPLED_KEY_BYTES).alias(KEY)).where(
        f"{KEY} is not null"
    )
    picked = keys.orderBy(F.rand(0)).limit(partitions * SAMPLES_PER_PARTITION).collect()
    sample = sorted(bytes(row[0]) for row in picked)
    cuts = {sample[len(sample) * part // partitions] for part in range(1, partitions) if sample}
    return sorted(cuts - {b""})


def chosen(
    df: DataFrame,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None,
    order_by: Column | str | None,
) -> DataFrame:
    """The columns to load, under the names of this module, as binary."""
    several = not isinstance(key, (Column, str))
    one_key = tuple_key(*key) if several else _column(key)  # type: ignore[arg-type,misc]
    columns = [one_key.alias(KEY), _column(value).alias(VALUE)]
    if op is not None:
        columns.append(_column(op).cast(StringType()).alias(OP))
    if order_by is not None:
        columns.append(_column(order_by).alias(_ORDER))
    rows = df.select(*columns)
    for name, given in ((KEY, key), (VALUE, value)):
        _require_bytes(name, given, rows.schema[name].dataType)
        rows = rows.withColumn(name, F.col(name).cast(BinaryType()))
    return rows


def _column(given: Column | str) -> Column:
    return F.col(given) if isinstance(given, str) else given


def _require_bytes(name: str, given: object, found: DataType) -> None:
    if not isinstance(found, (BinaryType, StringType)):
        raise UsageError(
            f"{name} {given} is {found.simpleString()}, not binary or string",
            "encode it so that its bytes sort as you want to scan; a list of columns is encoded"
            if name == KEY
            else "encode it",
        )


def _checked(splits: Sequence[bytes]) -> Sequence[bytes]:
    for split in splits:
        require_key(split, name="split")
    if any(before >= after for before, after in pairwise([b"", *splits])):
        raise UsageError("splits do not ascend from above the empty key", "sort them, each once")
    if len(splits) >= PARTITIONS_MAX:
        raise UsageError(f"{len(splits)} splits", f"pass fewer than {PARTITIONS_MAX}")
    return splits


def _partition_of(splits: Sequence[bytes], first: int = 0) -> Column:
    """How many splits lie at or below the key: a binary search as nested conditions."""
    if not splits:
        return F.lit(first)
    middle = len(splits) // 2
    below = _partition_of(splits[:middle], first)
    above = _partition_of(splits[middle + 1 :], first + middle + 1)
    return F.when(F.col(KEY) < F.lit(splits[middle]), below).otherwise(above)


def _partition_count(df: DataFrame) -> int:
    """Files to write: by Spark's own estimate of the input, at least one per core."""
    context = df.sparkSession.sparkContext
    size = int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
    wanted = 0 if size > _UNKNOWN_SIZE or size < 0 else size // BYTES_PER_PARTITION
    return min(max(wanted, context.defaultParallelism), PARTITIONS_MAX)
