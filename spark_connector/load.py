"""A DataFrame into a store as one import: columns chosen, rows encoded and sorted by tasks, files
built, one record added.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark import SparkContext, TaskContext
from pyspark.errors import AnalysisException, PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegralType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kvstore import bulk
from kvstore.base.arguments import integer
from kvstore.base.span import Span, require_key
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.bucket import BucketUrl, scratch_directory, send
from kvstore.bulk.ingest import (
    ON_CONFLICT,
    OnConflict,
    added_before,
    as_taken,
    check_for_ingest,
    give_up,
    staging_for,
)
from kvstore.bulk.loading import (
    DELETE,
    PUT,
    deleted_rows,
    key_text,
    require_expiry,
    stored_batches,
    stored_schema,
    with_puts,
)
from kvstore.bulk.manifest import EncodedBy, Manifest
from kvstore.bulk.micro_batches import BatchOrigin
from kvstore.bulk.part import Part, PartWriter
from kvstore.bulk.progress import StageTimes, TimedItems, timed
from kvstore.bulk.pushes.pushes import sharded_batches, sharded_schema
from kvstore.bulk.sort import Duplicates, Run, cuts, merged, sorted_runs
from kvstore.bulk.staging import discard, remove_staging
from kvstore.codec import tuples
from kvstore.codec.columns import due_column
from kvstore.codec.keys import TERMINATOR
from kvstore.errors import (
    ImportRefusedError,
    KeyOrderError,
    LoadRefusedError,
    NotUniqueError,
    TableAlteredError,
    UsageError,
)
from kvstore.remote.control import StoreOrClient
from kvstore.spark.access import (
    Address,
    cores_of,
    freeze_objects,
    is_remote,
    require_seen,
    running_tasks,
    staging_at,
)
from kvstore.spark.interfaces import arrow_function, utc_schema
from kvstore.spark.releases import NUMBERED_PARTITIONS, require
from kvstore.storage.address import public_address
from kvstore.tables import Table, TableCodec
from kvstore.tables.definition import Definition
from kvstore.tables.exact import rebuilt, require_held
from kvstore.tables.nested import fields_of, is_nested, with_fields
from kvstore.tables.row_codec import conform
from kvstore.timeline.import_records import ImportRecord

# --------------------------------------------------------------------------------------------------
# The columns that a caller chooses of a DataFrame: by name, or by an expression.

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


# --------------------------------------------------------------------------------------------------
# Several columns as one key, in Spark: `tuple_key("country", "day")`.
#
# The bytes have the form of `kvstore.codec.tuples`, and are encoded column by column in Arrow.
# `decode_tuple` reads them back, and `encode_tuple` makes bounds and prefixes for scans.


def tuple_key(*columns: Column | str) -> Column:
    """A binary column that sorts as `columns` do, one after the other, nulls first.

    The columns may be booleans, integers, floats, strings, binary, dates and timestamps. Encoding
    runs in Python, and costs some 0.3 us per row and column.
    """
    if not columns:
        raise UsageError("a key of no columns", "name at least one")
    encode = arrow_function(_named, "a key of several columns")
    made: Column = encode(*(F.col(c) if isinstance(c, str) else c for c in columns))
    return made


def _named(*columns: pa.Array) -> pa.Array:
    return encode_columns(columns)


_named.__name__ = "tuple_key"  # Spark calls the column by it: tuple_key(carrier, flight)


def require_ordered(columns: StructType) -> None:
    """Raise `UsageError` unless `tuple_key` takes all these columns, before any task runs."""
    for column in columns:
        if isinstance(column.dataType, TimestampNTZType):
            raise UsageError(
                f"key column {column.name} is a timestamp without a zone",
                "cast it to timestamp",
            )
        if not isinstance(column.dataType, _ORDERED):
            raise UsageError(
                f"key column {column.name} {column.dataType.simpleString()} has no "
                "order-preserving form",
                "cast it to a boolean, integer, float, string, binary, date or timestamp",
            )


def encode_columns(columns: tuple[pa.Array, ...]) -> pa.Array:
    """The rows of these columns as encoded tuples. A type without an order is a `UsageError`."""
    return pc.binary_join_element_wise(*map(_encode, columns), b"")


def _encode(column: pa.Array) -> pa.Array:
    kind = column.type
    encode = next((encode for fits, encode in _ENCODERS if fits(kind)), None)
    if encode is None:
        raise UsageError(f"a key column of {kind} has no order-preserving form", "convert it")
    null = pa.scalar(tuples.NULL, pa.binary())
    return pc.if_else(pc.is_null(column), null, encode(column))


_ORDERED = (
    *(BooleanType, IntegralType, FloatType, DoubleType),
    *(StringType, BinaryType, DateType, TimestampType),
)


def _booleans(column: pa.Array) -> pa.Array:
    true, false = (pa.scalar(tag, pa.binary()) for tag in (tuples.TRUE, tuples.FALSE))
    return pc.if_else(column, true, false)


def _integers(tag: bytes) -> Callable[[pa.Array], pa.Array]:
    def encode(column: pa.Array) -> pa.Array:
        numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return _tagged(tag, numbers.view(np.uint64) ^ np.uint64(tuples.SIGN))

    return encode


def _doubles(column: pa.Array) -> pa.Array:
    numbers = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
    numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)
    bits = numbers.view(np.uint64)
    flips = np.where(bits >> np.uint64(63), np.uint64((1 << 64) - 1), np.uint64(tuples.SIGN))
    return _tagged(tuples.DOUBLE, bits ^ flips)


def _texts(column: pa.Array) -> pa.Array:
    # A key with another text could not be decoded.
    require_held(column, column.type, "a key column", 0)
    return _framed(tuples.TEXT)(column)


def _framed(tag: bytes) -> Callable[[pa.Array], pa.Array]:
    def encode(column: pa.Array) -> pa.Array:
        escaped = pc.replace_substring(column.cast(pa.binary()), b"\x00", b"\x00\xff")
        start, end = (pa.scalar(part, pa.binary()) for part in (tag, TERMINATOR))
        return pc.binary_join_element_wise(start, escaped, end, b"")

    return encode


def _instants(column: pa.Array) -> pa.Array:
    if column.type.tz is None:
        raise UsageError("a key column is a timestamp without a zone", "cast it to timestamp")
    return _integers(tuples.INSTANT)(column.cast(pa.timestamp("us", tz="UTC")))


def _days(column: pa.Array) -> pa.Array:
    return _integers(tuples.DAY)(column.cast(pa.int32()))


def _tagged(tag: bytes, numbers: Any) -> pa.Array:
    """The numbers as binary: a tag and eight big-endian bytes each."""
    rows = np.empty((len(numbers), 9), dtype=np.uint8)
    rows[:, 0] = tag[0]
    rows[:, 1:] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    data = pa.py_buffer(rows.tobytes())
    return pa.Array.from_buffers(pa.binary(9), len(numbers), [None, data]).cast(pa.binary())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


_ENCODERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...] = (
    (pa.types.is_boolean, _booleans),
    (pa.types.is_signed_integer, _integers(tuples.INTEGER)),
    (pa.types.is_floating, _doubles),
    (_is_binary, _framed(tuples.BYTES)),
    (_is_text, _texts),
    (pa.types.is_date32, _days),
    (pa.types.is_timestamp, _instants),
)


# --------------------------------------------------------------------------------------------------
# Results of tasks: pickled objects, one in a row, or the reason why a task refuses its rows.

RESULT: Final = "result binary"
"""The schema of the rows that such a task returns."""


class _Refusal(NamedTuple):
    """An error in the rows of a task. It comes back as a result, because a retry cannot help."""

    what: str
    remedy: str
    twice: bytes | None = None


def spans_of(borders: Sequence[bytes]) -> list[Span]:
    ends: list[bytes | None] = [*borders, None]
    return [Span(start, end) for start, end in zip([b"", *borders], ends, strict=True)]


def results(place: Path | str, tasks: DataFrame, doing: str) -> list[Any]:
    """The results of the tasks, which are `doing` something at a place.

    Raises the error that a task has found in its rows.
    """
    with running_tasks(tasks.sparkSession, f"{doing} {place}"):
        found = [pickle.loads(row[0]) for row in tasks.collect()]
    for result in found:
        if isinstance(result, _Refusal):
            if result.twice is not None:
                raise KeyOrderError(str(place), previous=result.twice, key=result.twice)
            raise UsageError(result.what, result.remedy)
    return found


def as_batches(work: Callable[[], Sequence[Any]], *sees: Path | str) -> Iterator[pa.RecordBatch]:
    """The results of `work`, or its refusal, as the only rows that its task returns.

    The machine of the task must see the directories `sees`.
    """
    freeze_objects()
    found: Sequence[Any]
    try:
        require_seen(sees)
        found = work()
    except KeyOrderError as error:
        found = [_Refusal(error.what, error.remedy, twice=error.key)]
    except UsageError as error:
        found = [_Refusal(error.what, error.remedy)]
    for result in found:
        yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})


# --------------------------------------------------------------------------------------------------
# The progress of a Spark action, for the process that waits for it.

Progress: TypeAlias = "Callable[[int, int], None]"
"""Called with the numbers of tasks done and of tasks known. The second grows as stages are
planned."""

INTERVAL_S: Final = 0.5
_GROUP: Final = "spark.jobGroup.id"


@contextmanager
def watched(spark: SparkSession, progress: Progress | None) -> Iterator[None]:
    """Report on the jobs that the block starts in this thread, from a second thread.

    The last report comes when the block ends. The end of the block also raises the error of
    `progress`, if there is one.
    """
    if progress is None:
        yield
        return
    if is_remote(spark):
        raise UsageError("Spark Connect tells no progress of tasks", "leave progress out")
    context = spark.sparkContext
    before = context.getLocalProperty(_GROUP)
    group = f"kvstore-{secrets.token_hex(8)}"
    context.setLocalProperty(_GROUP, group)
    ended = threading.Event()
    watcher = _Watcher(context, group, progress, ended)
    watcher.start()
    try:
        yield
        watcher.succeeded = True
    finally:
        ended.set()
        watcher.join()
        context.setLocalProperty(_GROUP, before)  # type: ignore[arg-type]  # None removes it
    if watcher.error is not None:
        raise watcher.error


class _Watcher(threading.Thread):
    def __init__(
        self, context: SparkContext, group: str, progress: Progress, ended: threading.Event
    ) -> None:
        super().__init__(name="kvstore-progress", daemon=True)
        self._context = context
        self._group = group
        self._progress = progress
        self._ended = ended
        self.succeeded = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(INTERVAL_S):
                self._progress(*self._tasks())
            done, known = self._tasks()
            # Spark counts the tasks of stages that it skips, because their output exists already.
            self._progress(known if self.succeeded else done, known)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            self.error = error

    def _tasks(self) -> tuple[int, int]:
        tracker = self._context.statusTracker()
        done = known = 0
        for job in tracker.getJobIdsForGroup(self._group):
            found = tracker.getJobInfo(job)
            for stage in found.stageIds if found is not None else ():
                info = tracker.getStageInfo(int(stage))
                if info is not None:
                    done += info.numCompletedTasks
                    known += info.numTasks
        return done, known


# --------------------------------------------------------------------------------------------------
# The rows of a load: the chosen columns as binary, in any order or sorted by key.
#
# Spark partitions the rows by ranges of the key alone: a second column in the range expression
# would spread one key over several partitions. Spark orders binary by unsigned bytes, as the store
# does.

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
        return integer(1, PARTITIONS_MAX).check("partitions", self.partitions)

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


# --------------------------------------------------------------------------------------------------
# A DataFrame as rows of a table: encoded by the tasks that sort them, with their index entries.
#
# Invariants
# 1. Types are checked before any task runs, values by the task that encodes them. A refusal names
#    the column, and the row by its place in its partition.
# 2. A row and its index entries have one due time.

_DUE: Final = "kvstore_due"
"""The column behind those of a DataFrame whose rows expire."""

_DONE: Final = "kvstore_op"
"""The last column of a DataFrame with rows that delete."""


@dataclass(frozen=True)
class RowEncoder:
    """Makes keys and values of the rows of a table, in a task. With `expires` the column behind the
    named ones has the due times; with `op` the last one has `put` or `delete`; errors call them by
    these names. With `shards` each row tells its shard."""

    table: str
    definition: bytes
    names: tuple[str, ...]
    """The names of the columns, without the due times. The batches of a task have numbers in their
    place: Spark reads a dot and a backquote in a name as parts of the name."""
    expires: str | None = None
    shards: int | None = None
    op: str | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches that it makes."""
        column = Definition.from_bytes(self.table, self.definition).expires
        due = self.expires is not None or column is not None
        stored = stored_schema(expires=due, deletes=self.op is not None)
        return stored if self.shards is None else sharded_schema(stored)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        codec = TableCodec(Definition.from_bytes(self.table, self.definition))
        first = 0
        for batch in batches:
            try:
                stored = self._stored(codec, batch, first)
                yield from stored if self.shards is None else sharded_batches(stored, self.shards)
            except UsageError as error:
                raise error.at(after=_place()) from None
            first += batch.num_rows

    def _stored(
        self, codec: TableCodec, batch: pa.RecordBatch, first: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows and entries of a batch, whose first row is row `first` of its partition."""
        given, dues = self._timed(batch, codec.definition, first)
        if self.op is None:
            yield from stored_batches(codec, conform(codec.definition, given, first), dues)
            return
        is_put, schema = self._puts(batch, first), self.schema
        keys = [column.name for column in codec.definition.key_columns]
        conform(codec.definition, given, first, only=keys)  # a refusal names the row
        yield deleted_rows(codec, given.filter(pc.invert(is_put)), schema)
        if pc.any(is_put, min_count=0).as_py():
            rows = self._conformed(codec.definition, given, is_put, first)
            for each in stored_batches(codec, rows, None if dues is None else dues.filter(is_put)):
                yield with_puts(each, schema)

    def _puts(self, batch: pa.RecordBatch, first: int) -> pa.Array:
        """Whether each row is put. Raises `UsageError` for what is neither put nor delete."""
        ops = batch.column(batch.num_columns - 1)
        wrong = pc.index(pc.is_in(ops, pa.array([PUT, DELETE])), False).as_py()
        if wrong >= 0:
            raise UsageError(
                f"column {self.op} has {ops[wrong].as_py()!r} in row {first + wrong}",
                'write "put" or "delete"',
            )
        return pc.equal(ops, PUT)

    def _conformed(
        self, definition: Definition, given: pa.RecordBatch, is_put: pa.Array, first: int
    ) -> pa.RecordBatch:
        """The rows that are put, with the columns of the table."""
        try:
            return conform(definition, given.filter(is_put), first)
        except UsageError:  # it names a row of the rows that are put
            for row in pc.indices_nonzero(is_put).to_pylist():
                conform(definition, given.slice(row, 1), first + row)
            raise

    def _timed(
        self, batch: pa.RecordBatch, definition: Definition, first: int
    ) -> tuple[pa.RecordBatch, pa.Array | None]:
        """The columns of the table, and the due times as nanoseconds: null for rows that stay."""
        named = batch.select(range(len(self.names))).rename_columns(list(self.names))
        given = _with_times(definition, named)
        if self.expires is None:
            return given, None
        return given, due_column(batch.column(len(self.names)), self.expires, first)


def table_rows(
    df: DataFrame,
    codec: TableCodec,
    *,
    expires: Column | str | None = None,
    partitions: int | None = None,
    shards: int | None = None,
    op: Column | str | None = None,
) -> ImportRows:
    """The rows of a load into the table of `codec`, or of a push of `shards`.

    Raises `UsageError` unless the DataFrame has columns of the table alone, in types that hold its
    values, and every column that takes no null; with `op` those of the key. `expires` has the due
    times, and `op` tells which rows are deleted: each an expression, or the name of one more
    column.
    """
    require_expiry(codec, expires)
    definition = codec.definition
    due, done = (None if each is None else str(each) for each in (expires, op))
    rows, names = _numbered(df, definition, expires, op)
    _require_columns(rows, definition, names, deletes=op is not None)
    encoder = RowEncoder(definition.name, codec.stored, names, due, shards, done)
    made = [EncodedBy.of(codec)]
    return ImportRows(rows, "key", "value", partitions=partitions, encoder=encoder, tables=made)


def require_typed(table: Table, duplicates: Duplicates, **given: object) -> None:
    """Raise `UsageError` for the choices of a load of keys and values."""
    found = [name for name, each in given.items() if each is not None]
    found += ["duplicates"] * (duplicates != "error")
    if found:
        raise UsageError(
            f"a load into table {table.name!r} with {', '.join(found)}",
            "leave out what is for keys and values: the table has a key",
        )


@contextmanager
def rows_once(codec: TableCodec | None) -> Iterator[None]:
    """Name a row of a table that came twice by the columns of its key."""
    try:
        yield
    except KeyOrderError as error:
        if codec is None:
            raise
        what = f"the row {key_text(codec, error.key)} came twice"
        raise UsageError(what, "remove duplicates: df.dropDuplicates") from error


def _numbered(
    df: DataFrame,
    definition: Definition,
    expires: Column | str | None,
    op: Column | str | None,
) -> tuple[DataFrame, tuple[str, ...]]:
    """The rows under numbers in the place of names, with their due times and what is done with
    them in the last columns, and the names. A named column that the table lacks has these alone."""
    what, more, names = "the times at which rows expire", [], df.columns
    if expires is not None:
        due = column_of(df, expires, what).alias(_DUE)
        require_time(str(expires), selected(df, [due], what).schema.fields[0].dataType)
        more.append(due)
    if op is not None:
        what = "what is done with rows"
        more.append(column_of(df, op, what).cast(StringType()).alias(_DONE))
    rows = selected(df, [df["*"], *more], what) if more else df
    rows = rows.toDF(*(f"column_{number}" for number in range(len(rows.columns))))
    own = [each for each in (expires, op) if isinstance(each, str) and each in names]
    gone = [each for each in own if each not in definition.by_name]
    rows = rows.drop(*(f"column_{names.index(each)}" for each in gone))
    return rows, tuple(name for name in names if name not in gone)


def _require_columns(
    df: DataFrame, definition: Definition, names: Sequence[str], *, deletes: bool
) -> None:
    arrays = []
    for name, each in zip(names, df.schema.fields, strict=False):  # the due times have no name
        try:
            [found] = utc_schema(StructType([each]))
        except PySparkTypeError as error:
            where = f"{definition.where}, column {definition.column(name).name!r}"
            told = each.dataType.simpleString()
            raise UsageError(
                f"{where}: Arrow has no type for {told}", "convert it first"
            ) from error
        arrays.append(pa.nulls(0, found.type))
    empty = pa.RecordBatch.from_arrays(arrays, list(names))
    known = {*names, *(column.name for column in definition.key_columns)} if deletes else None
    conform(definition, _with_times(definition, empty), only=known)


def _with_times(definition: Definition, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with times of day where it has what Spark reads them as: integers of
    nanoseconds."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        wanted = column.type
        if name in definition.by_name:
            wanted = _type_with_times(column.type, definition.by_name[name].type)
        if wanted == column.type:
            columns.append(column)
        else:
            is_flat = not is_nested(column.type)
            made = _as_times(column, wanted) if is_flat else rebuilt(column, wanted, _as_times)
            columns.append(made)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _type_with_times(given: pa.DataType, column: pa.DataType) -> pa.DataType:
    """The type that Spark gives for a column, with times of day where these are integers there."""
    if pa.types.is_time(column) and pa.types.is_signed_integer(given):
        return pa.time64("ns")
    if not (is_nested(given) and is_nested(column)):
        return given
    fields = fields_of(given)
    if pa.types.is_struct(given):
        types = {field.name: field.type for field in fields_of(column)}
        pairs = [(field, types.get(field.name, field.type)) for field in fields]
    else:
        pairs = [
            (field, other.type) for field, other in zip(fields, fields_of(column), strict=False)
        ]
    if len(pairs) < len(fields):
        return given
    found = [field.with_type(_type_with_times(field.type, other)) for field, other in pairs]
    return with_fields(given, found)


def _as_times(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return array if array.type == wanted else array.cast(pa.int64()).view(wanted)


def _place() -> str:
    task = TaskContext.get()
    return "" if task is None else f" of partition {task.partitionId()} of the DataFrame"


# --------------------------------------------------------------------------------------------------
# Building an import of a DataFrame in Spark's workers.
#
#     sort runs (mapInArrow) -> merge, one SST per span of keys (mapInArrow) -> manifest
#
# The workers build runs and SSTs in the staging directory. Each run comes with samples, from which
# the driver cuts the key space: one span for each SST. So Spark neither shuffles and sorts whole
# rows nor passes over the input to look for borders. Only if an order decides between repeated keys
# does Spark partition and sort, because that order is one of its values.
#
# The driver writes the manifest from the results that the tasks return. Failed and repeated tasks
# leave runs and parts that no result names. Such a file is never read.
#
# Machines that share nothing but a bucket cannot pass runs to each other. There Spark's own shuffle
# partitions and sorts the rows, and each task writes one SST to its local disk and sends it:
#
#     shuffle to ranges of keys -> one SST per range, sent to the bucket (mapInArrow) -> manifest
#
# Spark computes a DataFrame once, and a part of it again if a task is retried; with `order_by`, and
# for a bucket, it computes it twice, because it samples first. If the rows change between two runs
# (`rand()`, `current_timestamp()`), the import has some rows of each run.

_SCRATCH: Final = "sorting-"
"""The folder of the sorted runs in the staging directory, which take as much room as the rows. A
random name follows, so a machine that sees it sees the driver's staging directory."""

Seconds: TypeAlias = "dict[str, float]"
"""The seconds of the stages of one task."""

Made: TypeAlias = "tuple[Part | None, Seconds]"
"""The part that a task has made, None if it had no rows."""

_Task: TypeAlias = "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]"


def build_import(
    rows: ImportRows,
    place: Path | BucketUrl,
    import_id: int | None,
    progress: Progress | None,
    max_bytes: int | None = None,
    times: StageTimes | None = None,
) -> Manifest:
    """Build an import of `rows` at `place`; see `stage_import`. Discards it after a failure.

    `times` takes the seconds of tasks by stage, summed over tasks.
    """
    rows.require_order()
    rows.require_size(max_bytes)
    times = times or StageTimes()
    if isinstance(place, Path):
        manifest = _in_directory(rows, place, import_id, progress, times)
    else:
        manifest = _in_bucket(rows, place, import_id, progress, times)
    return manifest


def _in_bucket(
    rows: ImportRows,
    place: BucketUrl,
    import_id: int | None,
    progress: Progress | None,
    times: StageTimes,
) -> Manifest:
    """Build an import whose tasks share nothing but a bucket."""
    ordered = rows.by_key()
    where = public_address(place.url)
    staged = bulk.Import.create(
        place.url, import_id=import_id, options=place.options, patience=place.patience_s
    )
    try:
        with watched(rows.df.sparkSession, progress):
            build = sender(
                place,
                staged.import_id,
                keeps_first=rows.order_by is not None,
                is_encoded=rows.encoder is not None,
            )
            sent = results(where, ordered.mapInArrow(build, RESULT), "building files in")
        return staged.seal(_parts(sent, times), tables=rows.tables)
    except BaseException:
        staged.discard()
        raise


def _parts(made: Iterable[Made], times: StageTimes) -> list[Part]:
    """The parts that tasks have made. Adds the seconds of the tasks to `times`."""
    parts = []
    for part, seconds in made:
        for stage, spent in seconds.items():
            times.add(stage, spent)
        if part is not None:
            parts.append(part)
    return parts


def _in_directory(
    rows: ImportRows,
    directory: Path,
    import_id: int | None,
    progress: Progress | None,
    times: StageTimes,
) -> Manifest:
    """Build an import in a directory that all tasks see."""
    count = rows.file_count()
    chosen, spark = rows.chosen(), rows.df.sparkSession
    staged = bulk.Import.create(directory, import_id=import_id)
    place = directory.resolve()
    scratch = place / f"{_SCRATCH}{secrets.token_hex(8)}"
    try:
        scratch.mkdir()
        with watched(spark, progress):
            if rows.order_by is None:
                sort = chosen.mapInArrow(sorter(scratch, rows.encoder), RESULT)
                runs = _runs(results(directory, sort, "sorting rows in"), times)
                borders = cuts(runs, count) if rows.splits is None else rows.splits
                build = merger(scratch, staged.import_id, runs, spans_of(borders))
                spans = len(borders) + 1 if runs else 0
                tasks = spark.range(0, spans, 1, max(spans, 1))
            else:
                build = builder(scratch, staged.import_id)
                tasks = rows.by_key()
            made = results(directory, tasks.mapInArrow(build, RESULT), "building files in")
        shutil.rmtree(scratch, ignore_errors=True)
        return staged.seal(_parts(made, times), tables=rows.tables)
    except BaseException:
        discard(directory)
        raise


def _runs(made: Iterable[tuple[list[Run], Seconds]], times: StageTimes) -> list[Run]:
    runs: list[Run] = []
    for found, seconds in made:
        runs += found
        for stage, spent in seconds.items():
            times.add(stage, spent)
    return runs


def sorter(scratch: Path, encoder: Encoder | None = None) -> _Task:
    """The task that sorts the rows of one partition into runs."""

    def sort(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def work() -> list[tuple[list[Run], Seconds]]:
            waiting = TimedItems(batches if encoder is None else encoder(batches))
            runs, took = timed(lambda: sorted_runs(waiting, scratch))
            return [(runs, {"compute": waiting.seconds, "sort": took - waiting.seconds})]

        return as_batches(work, scratch)

    return sort


def merger(scratch: Path, import_id: int, runs: Sequence[Run], spans: Sequence[Span]) -> _Task:
    """The task that merges the rows of all runs in one span into one part.

    Its input is the number of the span.
    """

    def merge(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch.column(0).to_pylist() for batch in numbers):
            rows = merged(runs, spans[number])
            yield from as_batches(
                partial(_written, scratch.parent, import_id, rows, "sort"), scratch
            )

    return merge


def builder(scratch: Path, import_id: int) -> _Task:
    """The task that writes the first row of each key of sorted rows into one part."""

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = without_repeats(batches)
        return as_batches(partial(_written, scratch.parent, import_id, rows, "compute"), scratch)

    return build


def sender(
    place: BucketUrl, import_id: int, *, keeps_first: bool = False, is_encoded: bool = False
) -> _Task:
    """The task that writes sorted rows into one part on its local disk, and sends the part.

    With `keeps_first` it writes the first row of each key. Otherwise a key that comes twice is
    refused. Rows that are `is_encoded` may carry a refusal.
    """

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = without_repeats(batches) if keeps_first else batches
        if is_encoded:
            rows = raise_refusals(rows)
        return as_batches(partial(sent_part, place, import_id, rows))

    return build


def sent_part(
    place: BucketUrl, import_id: int, rows: Iterable[pa.RecordBatch], compression: str = "lz4"
) -> list[Made]:
    """Write sorted rows into one part on the local disk, and send it. The local disk needs room
    for this part, and memory for a few pieces of it."""
    scratch = scratch_directory()
    try:
        [(part, seconds)] = _written(scratch, import_id, rows, "compute", compression)
        if part is None:
            return [(part, seconds)]
        _, took = timed(lambda: send(place.open(), part, scratch))
        return [(part, {**seconds, "upload": took})]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _written(
    staging: Path,
    import_id: int,
    rows: Iterable[pa.RecordBatch],
    waits_for: str,
    compression: str = "lz4",
) -> list[Made]:
    """The part of some rows, and the seconds of the stages: `waits_for` made the rows."""
    waiting = TimedItems(rows)

    def write() -> Part | None:
        with PartWriter(staging, import_id, compression=compression) as writer:
            for batch in waiting:
                writer.write(batch)
            return writer.finish()

    part, took = timed(write)
    return [(part, {waits_for: waiting.seconds, "write": took - waiting.seconds})]


# --------------------------------------------------------------------------------------------------
# A DataFrame into a store as one import: `bulk_import`, or `stage_import` and later `bulk.ingest`.
#
# The process that calls adds the import, or the owner of the store adds it.


class OfBatch(NamedTuple):
    """The micro-batch whose rows a load has: the name of its stream, its number, its origin."""

    name: str
    number: int
    origin: BatchOrigin

    def require_repeated(self, record: ImportRecord) -> None:
        """Raise `UsageError` if a record with the id of this micro-batch is of another one."""
        known = BatchOrigin.of_text(record.origin)
        self.origin.require_repeated(repr(self.name), self.number, known)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of one load: `build_seconds` in Spark, and `add_seconds` for adding the files.

    `stages` has the seconds of compute, sort, write and upload, summed over tasks, of spark, which
    is the rest of `build_seconds`, and of fetch, check and add in this process.
    """

    stamp: Timestamp
    import_id: int
    rows: int
    files: int
    bytes: int
    build_seconds: float
    add_seconds: float
    stages: Mapping[str, float] = field(default_factory=dict, compare=False)


def bulk_import(
    df: DataFrame,
    store: StoreOrClient | Table,
    key: Columns | None = None,
    value: Column | str | None = None,
    staging: Address | None = None,
    partitions: int | None = None,
    on_conflict: OnConflict = "overwrite",
    *,
    op: Column | str | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    expires: Column | str | None = None,
    import_id: int | None = None,
    progress: Progress | None = None,
    max_bytes: int | None = None,
    check: bulk.Gate | Mapping[str, Any] | None = None,
    force: bulk.Force | str | None = None,
) -> Timestamp:
    """Load `df` into `store`. Returns the timestamp at which all its rows became visible.

    `store` is open in this process, or a client: by path of its owner, or of a server by URL.
    `staging` must be an empty or new directory that the workers share with this process, or the
    URL of an object store, such as `s3://bucket/staging/run-42`: then the machines share nothing
    else. A directory on the store's file system has its files moved, not copied. The default is a
    directory beside the store's files. A server takes the import from below the places of
    `kvstore serve --imports-from`, of which the first is the default; it is asked before anything
    is built, and needs the right `admin`. A directory needs room for the rows twice. The staging
    place is removed after the import is added. `max_bytes` bounds the load: Spark's estimate of the
    input is compared before any task runs, the files when they are sealed.

    `on_conflict`, `check` (a gate) and `force` are the parameters of `bulk.ingest`; the staging of
    a load that its gate refuses stays. The others are as in `stage_import`. A job that
    runs again with the same `import_id` adds and computes nothing, and returns the first timestamp;
    after a revert it raises `UsageError`, because corrected rows need another id.
    `run_import` returns a report instead.

    For a table (`store.table("trips")`) `df` has columns of the table, in any order, and neither
    `key`, `value`, `splits` nor `duplicates` is given. The tasks that sort the rows build
    their index entries too, which expire with their row. `expires` names one more column, or is an
    expression; so does `op`, by which rows are put or deleted. A row that deletes needs the columns
    of the key, and its other columns are not looked at: `op=F.lit("delete")` deletes the rows of
    all keys that `df` has, whether or not they exist, and their history stays. A type, a null or a
    value that does not fit is refused by column and row. Raises
    `TableAlteredError` if the table is altered meanwhile, and `NotUniqueError` for a row with the
    values of another one in a unique index.

    Raises `UsageError` on bad columns, duplicates and null keys or values; then no row is added.
    """
    gate = None if check is None else bulk.Gate.of(check)
    return load(
        df,
        store,
        key,
        value,
        staging,
        partitions,
        on_conflict,
        op=op,
        splits=splits,
        duplicates=duplicates,
        order_by=order_by,
        expires=expires,
        import_id=import_id,
        progress=progress,
        max_bytes=max_bytes,
        gate=gate,
        force=bulk.Force.of(force, gate),
    )


def load(
    df: DataFrame,
    store: StoreOrClient | Table,
    key: Columns | None = None,
    value: Column | str | None = None,
    staging: Address | None = None,
    partitions: int | None = None,
    on_conflict: OnConflict = "overwrite",
    *,
    op: Column | str | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    expires: Column | str | None = None,
    **more: Any,
) -> Timestamp:
    """As `bulk_import`; `more` has the parameters of `run_import`."""
    if isinstance(store, Table):
        require_typed(store, duplicates, key=key, value=value, splits=splits, order_by=order_by)
        return _table_import(df, store, staging, partitions, on_conflict, expires, op, **more)
    if key is None or value is None:
        raise UsageError("None is no column of keys or values", "pass both, or load into a table")
    rows = ImportRows(df, key, value, op, partitions, splits, duplicates, order_by, expires)
    return run_import(rows, store, staging, on_conflict, **more).stamp


def _table_import(
    df: DataFrame,
    table: Table,
    staging: Address | None,
    partitions: int | None,
    on_conflict: OnConflict,
    expires: Column | str | None,
    op: Column | str | None,
    **more: Any,
) -> Timestamp:
    store, codec, check = table.import_target()
    rows = table_rows(df, codec, expires=expires, partitions=partitions, op=op)
    with rows_once(codec):
        return run_import(rows, store, staging, on_conflict, check=check, **more).stamp


def run_import(
    rows: ImportRows,
    store: StoreOrClient,
    staging: Address | None = None,
    on_conflict: OnConflict = "overwrite",
    *,
    import_id: int | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] | None = None,
    max_bytes: int | None = None,
    of_batch: OfBatch | None = None,
    gate: bulk.Gate | None = None,
    force: bulk.Force | None = None,
) -> ImportReport:
    """Load `rows` as `bulk_import` does, and return a report.

    The seconds of the report are 0 if the job ran before. `check` is as in `bulk.ingest`.
    `of_batch` is given by `batch_importer`.
    """
    ON_CONFLICT.check("on_conflict", on_conflict)
    known = None if import_id is None else _added_before(store, import_id, of_batch)
    if known is not None:
        return known
    # A server is asked before the build whether it takes the import.
    place = staging_for(store, None if staging is None else staging_at(staging))
    started, times = time.perf_counter(), bulk.StageTimes()
    try:
        manifest = build_import(rows, place, import_id, progress, max_bytes, times)
    except BaseException:
        if staging is None and isinstance(place, Path):
            remove_staging(place)  # it may have been made for the server to look at
        raise
    built = time.perf_counter()
    times.add_rest("spark", built - started)
    try:
        origin = "" if of_batch is None else of_batch.origin.text
        check = check_for_ingest(store, check)
        taken = as_taken(store, place)
        how: dict[str, Any] = {"times": times, "origin": origin, "check": check}
        if gate is not None:  # the owner compares the definitions of tables itself
            how |= {"check": gate, "force": force}
        stamp = bulk.ingest(store, taken, on_conflict, True, **how)
    except LoadRefusedError:  # the rows stay for inspection
        raise
    except (NotUniqueError, TableAlteredError):  # only other rows could continue
        remove_staging(place)
        raise
    except UsageError as error:
        if import_id is not None and isinstance(error, ImportRefusedError):
            try:
                known = _added_before(store, import_id, of_batch)
            except UsageError:
                remove_staging(place)
                raise
            if known is not None:  # another thread ran the same job meanwhile
                remove_staging(place)
                return known
        if staging is None:  # the caller does not know the directory, and cannot add it later
            remove_staging(place)
            give_up(store, manifest.import_id)
        raise
    remove_staging(place)
    return ImportReport(
        stamp,
        manifest.import_id,
        *(manifest.rows, len(manifest.parts), manifest.size_bytes),
        build_seconds=round(built - started, 3),
        add_seconds=round(time.perf_counter() - built, 3),
        stages={stage: round(spent, 3) for stage, spent in times.seconds.items()},
    )


def stage_import(
    df: DataFrame,
    staging: Address,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None = None,
    partitions: int | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    expires: Column | str | None = None,
    import_id: int | None = None,
    progress: Progress | None = None,
    max_bytes: int | None = None,
) -> Manifest:
    """Build an import of `df` in `staging`, which `bulk.ingest` adds now or later. Needs no store.

    `key` and `value` are columns or expressions of binary or string; a string stands for its UTF-8
    bytes. A list of key columns, of more types, is encoded so that the bytes sort as the columns do
    (`tuple_key`). `op` holds `"put"` or `"delete"`; a deletion needs no value. `expires` has the
    times at which keys expire, timestamps or nanoseconds; null keeps a key.

    A key that occurs twice is an error. With `duplicates="last"` the row with the greatest
    `order_by` is kept; among equal ones a put, then the greatest value.

    `partitions` is the number of files; the default is one per `BYTES_PER_PARTITION` of input, and
    at least Spark's parallelism. `splits` are the least keys of the files after the first one, and
    make the files the same in every run. A task holds at most `SORT_BYTES_MAX` of rows in Python,
    and sorts more of them on disk. `import_id` names the import, from 1 to 2**63 - 1; a store adds
    an id once. `progress` is called now and then with the numbers of tasks done and of tasks known.

    `staging` is a directory that Spark's machines share, or a URL, as in `bulk_import`; an
    `Access` gives the endpoint of an object store. `max_bytes` is as in `bulk_import`.

    Raises `UsageError` on bad columns, duplicates and null keys or values; then it removes
    `staging`.
    """
    rows = ImportRows(df, key, value, op, partitions, splits, duplicates, order_by, expires)
    return build_import(rows, staging_at(staging), import_id, progress, max_bytes)


def _added_before(
    store: StoreOrClient, import_id: int, of_batch: OfBatch | None
) -> ImportReport | None:
    """The report of an import that was added before. Undoes one that a crash left half done. Raises
    `UsageError` if the import was reverted, or is of another micro-batch."""
    # Spark repeats the last micro-batch with the same rows, also after the batch was reverted: its
    # rows stay hidden, and the stream goes on.
    known = added_before(store, import_id, may_be_reverted=of_batch is not None)
    if known is None or known.added is None:
        return None
    if of_batch is not None:
        of_batch.require_repeated(known)
    files = len(known.spans)
    return ImportReport(known.added, import_id, known.rows, files, known.size_bytes, 0.0, 0.0)


# --------------------------------------------------------------------------------------------------
# The origin of a micro-batch, as Spark tells it to the function of `foreachBatch`.
#
# Spark gives the function a frame and a number. The id of the stream is a property of the thread in
# which the function runs. The offsets of the micro-batch lie in the checkpoint location: Spark
# writes them once, before it runs the micro-batch, and a repetition runs by them again.

_QUERY: Final = "sql.streaming.queryId"
PLAN_DIGITS: Final = 32
"""Of the SHA-256 in a plan: 128 bits."""


def planned_origin(batch: DataFrame, number: int) -> BatchOrigin:
    """The stream and the offsets of micro-batch `number`, in the function of `foreachBatch`.

    Nothing is known outside of such a function and in a session of Spark Connect, and no offsets
    are known where a release keeps them elsewhere. Reads one small file of the checkpoint location.
    """
    session: Any = batch.sparkSession
    if is_remote(session):
        return BatchOrigin()
    query = session.sparkContext.getLocalProperty(_QUERY)
    if not query:
        return BatchOrigin()
    try:
        offsets = _offsets(session, query, number)
    except Py4JError:  # a release whose streams have no such offsets, or no such file
        return BatchOrigin(query)
    return BatchOrigin(query, f"offsets-{hashlib.sha256(offsets).hexdigest()[:PLAN_DIGITS]}")


def _offsets(session: Any, query: str, number: int) -> bytes:
    """The file of offsets of a micro-batch that runs. `sharedState` knows the streams of all
    sessions; the session of a micro-batch is a copy, and knows none."""
    java = session.sparkContext._jvm
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    stream = running.get(java.java.util.UUID.fromString(query))
    path = java.org.apache.hadoop.fs.Path(stream.resolvedCheckpointRoot(), f"offsets/{number}")
    file = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).open(path)
    try:
        return bytes(file.readAllBytes())
    finally:
        file.close()
