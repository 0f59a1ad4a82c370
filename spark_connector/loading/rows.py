"""The rows of a load: the chosen columns as binary, in any order or sorted by key.

Spark partitions the rows by ranges of the key alone: a second column in the range expression would
spread one key over several partitions. Spark orders binary by unsigned bytes, as the store does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, NullType, StringType

from bulk.definitions import EncodedBy
from bulk.sort import Duplicates
from kvstore.arguments import require_count
from kvstore.errors import UsageError
from kvstore.span import require_key
from spark_connector.executors import cores_of, is_remote
from spark_connector.loading.columns import (
    Columns,
    column_of,
    key_of,
    partition_of,
    require_bytes,
    require_time,
    selected,
)
from spark_connector.releases import NUMBERED_PARTITIONS, require

BYTES_PER_PARTITION: Final = 128 << 20
"""Input that one task sorts and writes if `partitions` is not given. A task costs tens of ms, so
files should be large; a sort that fits into memory does not spill, so they should not be larger."""

PARTITIONS_MAX: Final = 10_000

INPUT_TASKS: Final = 100
"""At most this many tasks read the input, or four for each core if that is more. A task costs 20
ms, so one task reads many small partitions of the input. If a task fails, at most a hundredth
of the work is done again."""

_TASKS_PER_CORE: Final = 4

_UNKNOWN_SIZE: Final = 1 << 60
"""Spark estimates the size of an unknown plan as the largest long, or nearly so."""

KEY: Final = "key"
VALUE: Final = "value"
OP: Final = "op"
EXPIRES: Final = "expires"
REFUSED_KEY: Final = b""

_ORDER: Final = "kvstore_order"
_WHAT: Final = "the columns to load"


class Encoder(Protocol):
    """Makes batches of keys and values of the batches of a task. It is picklable."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches that it makes."""
        ...

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ImportRows:
    """A DataFrame to load and the choices of the load: the parameters of `stage_import`."""

    df: DataFrame
    key: Columns
    value: Column | str
    op: Column | str | None = None
    partitions: int | None = None
    splits: Sequence[bytes] | None = None
    duplicates: Duplicates = "error"
    order_by: Column | str | None = None
    expires: Column | str | None = None
    """When each key expires; null for keys that stay."""
    encoder: Encoder | None = None
    """Makes the rows to load of all columns, in place of `key` and `value`."""
    tables: Sequence[EncodedBy] = ()
    """The definitions by which `encoder` makes them."""

    def require_order(self) -> None:
        """Raise `UsageError` unless `order_by` is given if, and only if, the last row counts."""
        is_known = self.duplicates in ("error", "last")
        if not is_known or (self.duplicates == "last") != (self.order_by is not None):
            raise UsageError(
                f"duplicates={self.duplicates!r} with order_by={self.order_by!r}",
                'pass duplicates="last" and order_by together: Spark keeps no order of arrival',
            )

    def file_count(self) -> int:
        """The number of files to write. Raises `UsageError` on bad `partitions` or `splits`."""
        if self.splits is not None:
            if self.partitions is not None:
                raise UsageError("partitions and splits are both given", "pass one")
            require(NUMBERED_PARTITIONS)
            return len(_checked(self.splits)) + 1
        if self.partitions is None:
            return estimated_count(self.df)
        return require_count(self.partitions, name="partitions", most=PARTITIONS_MAX)

    def require_size(self, max_bytes: int | None) -> None:
        """Raise `UsageError` if Spark expects more than `max_bytes` of input, before any task runs.

        The bound holds for the files too, when they are sealed.
        """
        if max_bytes is None or is_remote(self.df.sparkSession):
            return
        size = estimated_size(self.df)
        if size is not None and size > max_bytes:
            raise UsageError(
                f"Spark expects {size:,} bytes of input, and max_bytes={max_bytes:,}",
                "load less at once, or raise max_bytes",
            )

    def chosen(self) -> DataFrame:
        """The columns to load as binary, under the names of this module, and the order."""
        if self.encoder is not None:
            return _coalesced(self.df)
        key = key_of(self.df, self.key, _WHAT)
        columns = [key.alias(KEY), self._column(self.value).alias(VALUE)]
        if self.op is not None:
            columns.append(self._column(self.op).cast(StringType()).alias(OP))
        if self.expires is not None:
            columns.append(self._column(self.expires).alias(EXPIRES))
        if self.order_by is not None:
            columns.append(self._column(self.order_by).alias(_ORDER))
        rows = selected(_coalesced(self.df), columns, _WHAT)
        for name, given in ((KEY, self.key), (VALUE, self.value)):
            found = rows.schema[name].dataType
            # A load with deletions may have `lit(None)` as its value.
            if name == KEY or self.op is None or not isinstance(found, NullType):
                require_bytes(name, given, found)
            rows = rows.withColumn(name, F.col(name).cast(BinaryType()))
        if self.expires is not None:
            require_time(str(self.expires), rows.schema[EXPIRES].dataType)
        return rows

    def encoded(self) -> DataFrame:
        """The columns to load, and for a table the rows that the encoder makes of them."""
        if self.encoder is None:
            return self.chosen()
        columns = from_arrow_schema(self.encoder.schema)
        return self.chosen().mapInArrow(_told_refusals(self.encoder), columns)

    def _column(self, given: Column | str) -> Column:
        return column_of(self.df, given, _WHAT)

    def by_key(self) -> DataFrame:
        """The rows, partitioned and sorted by key. Of rows with one key the first is to be kept."""
        self.require_order()
        rows, count = self.encoded(), self.file_count()
        if self.splits is not None:
            parted = rows.repartitionById(count, partition_of(F.col(KEY), self.splits))
        else:
            # Without a count, adaptive execution would merge all partitions into one.
            parted = rows.repartitionByRange(count, KEY)
        return parted.sortWithinPartitions(F.col(KEY), *self.last_first()).drop(
            *self.order_columns()
        )

    def last_first(self) -> list[Column]:
        """The order of the rows of one key, of which the first is kept. Empty without an order."""
        if self.order_by is None:
            return []
        # Their contents decide between rows of equal order, because arrival differs between runs.
        names = [_ORDER, VALUE] if self.op is None else [_ORDER, OP, VALUE]
        return [F.col(name).desc() for name in names]

    def order_columns(self) -> list[str]:
        """The columns that only decide the order."""
        return [] if self.order_by is None else [_ORDER]


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
    expires: Column | str | None = None,
) -> DataFrame:
    """`df` as sorted rows to import: columns `key`, `value` and, if given, `op` and `expires`.

    `df.write.format("kvstore")` needs these rows; `bulk_import` makes them by itself. The
    parameters are as in `bulk_import`. Raises `UsageError` on bad columns. A key that occurs twice
    fails the write.
    """
    given = ImportRows(df, key, value, op, partitions, splits, duplicates, order_by, expires)
    rows = given.by_key()
    return rows if order_by is None else rows.mapInArrow(without_repeats, rows.schema)


def without_repeats(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keep the first row of each key. Rows with equal keys must lie together."""
    last = None
    for batch in batches:
        keys = batch.column(KEY)
        if not len(keys):
            continue
        before = pa.concat_arrays([pa.array([last], keys.type), keys[:-1]])
        last = keys[-1].as_py()
        yield batch.filter(pc.fill_null(pc.not_equal(keys, before), True))


def _coalesced(df: DataFrame) -> DataFrame:
    """The rows in a bounded number of partitions, of neighbours. Moves no row."""
    return df.coalesce(max(INPUT_TASKS, _TASKS_PER_CORE * (cores_of(df.sparkSession) or 1)))


def _told_refusals(
    encoder: Encoder,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """`encoder`, which passes a refusal on as a row with the empty key, which no table has. Spark
    would try a task that fails again."""

    def encode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from encoder(batches)
        except UsageError as error:
            told = {KEY: REFUSED_KEY, VALUE: pickle.dumps(error)}
            yield pa.RecordBatch.from_pylist([told], encoder.schema)

    return encode


def raise_refusals(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sorted rows of an encoder. Raises the refusal that the encoder has passed on."""
    for batch in batches:
        if batch.num_rows and batch.column(KEY)[0].as_py() == REFUSED_KEY:
            raise pickle.loads(batch.column(VALUE)[0].as_py())
        yield batch


def _checked(splits: Sequence[bytes]) -> Sequence[bytes]:
    for split in splits:
        require_key(split, name="split")
    if any(before >= after for before, after in pairwise([b"", *splits])):
        raise UsageError("splits do not ascend from above the empty key", "sort them, each once")
    if len(splits) >= PARTITIONS_MAX:
        raise UsageError(f"{len(splits)} splits", f"pass fewer than {PARTITIONS_MAX}")
    return splits


def estimated_count(df: DataFrame) -> int:
    """The number of files by Spark's estimate of the input, at least one per core.

    Raises `UsageError` in a session of Spark Connect, which estimates nothing.
    """
    cores = cores_of(df.sparkSession)
    if cores is None:
        raise UsageError("Spark Connect does not tell the size of a DataFrame", "pass partitions")
    wanted = (estimated_size(df) or 0) // BYTES_PER_PARTITION
    return min(max(wanted, cores), PARTITIONS_MAX)


def estimated_size(df: DataFrame) -> int | None:
    """Spark's estimate of the bytes of the input; None where it has none."""
    size = int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
    return None if size > _UNKNOWN_SIZE or size < 0 else size
