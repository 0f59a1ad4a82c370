"""The rows of a load: chosen columns as binary; for who cannot sort them himself, range-partitioned
and sorted by key.

Rows are range-partitioned by the key alone: with a second column in the range expression Spark
spreads one key over several partitions. Spark orders binary by unsigned bytes, as we do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, DataType, StringType

from kvstore.errors import UsageError
from kvstore.span import require_key
from spark_connector.keys import require_ordered, tuple_key

Duplicates: TypeAlias = Literal["error", "last"]
Columns: TypeAlias = "Column | str | Sequence[Column | str]"

BYTES_PER_PARTITION: Final = 128 << 20
"""Input that one task sorts and writes when `partitions` is not given. A Python task costs tens
of ms, so files should not be small; and a sort that fits memory does not spill."""

PARTITIONS_MAX: Final = 10_000

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

    For `df.write.format("kvstore")`; `bulk_import` does it itself. Parameters as there. Raises
    `UsageError` on bad columns; a key that comes twice fails the write.
    """
    rows = rows_by_key(
        df,
        key,
        value,
        op=op,
        partitions=partitions,
        splits=splits,
        duplicates=duplicates,
        order_by=order_by,
    )
    return rows if order_by is None else rows.mapInArrow(without_repeats, rows.schema)


def rows_by_key(
    df: DataFrame,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None,
    partitions: int | None,
    splits: Sequence[bytes] | None,
    duplicates: Duplicates,
    order_by: Column | str | None,
) -> DataFrame:
    """As `sorted_rows`, but with all rows of a key, of `duplicates="last"` the last one first."""
    require_order(duplicates, order_by)
    rows = chosen(df, key, value, op=op, order_by=order_by)
    count = wanted_partitions(df, partitions, splits)
    if splits is not None:
        parted = rows.repartitionById(count, _partition_of(splits))
    else:
        # The count is always passed: without one, adaptive execution merges all into one.
        parted = rows.repartitionByRange(count, KEY)
    # Among rows of equal order the value decides: arrival differs from run to run.
    last_first = [F.col(_ORDER).desc(), F.col(VALUE).desc()] if order_by is not None else []
    return parted.sortWithinPartitions(F.col(KEY), *last_first).drop(_ORDER)


def without_repeats(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Of rows with equal keys, which lie together, keep the first."""
    last = None
    for batch in batches:
        keys = batch.column(KEY)
        if not len(keys):
            continue
        before = pa.concat_arrays([pa.array([last], keys.type), keys[:-1]])
        last = keys[-1].as_py()
        yield batch.filter(pc.fill_null(pc.not_equal(keys, before), True))


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


def chosen(
    df: DataFrame,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None,
    order_by: Column | str | None = None,
) -> DataFrame:
    """The columns to load, under the names of this module, as binary."""
    if isinstance(key, (Column, str)):
        one_key = _column(key)
    else:
        require_ordered(df.select(*map(_column, key)).schema)
        one_key = tuple_key(*key)
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
