"""New stores and collections whose versions carry the times of a DataFrame's rows."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, NullType, StringType

from kvstore.backup.shard import (
    OP_DELETE,
    OP_PUT,
    VERSIONS_SCHEMA,
    BatchDesc,
    ShardBatch,
    part_names,
    write_batch,
)
from kvstore.base.arguments import integer
from kvstore.base.clock import Clock
from kvstore.base.paths import require_path
from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.bulk.seed import CheckedRows, SeedColumns, SeedRows, appearing, seed_files
from kvstore.bulk.sort import Run, cuts, merged, sorted_runs
from kvstore.errors import KeyOrderError, UsageError, printable, storage_errors
from kvstore.opening import building
from kvstore.spark.access import Access, Address
from kvstore.spark.load import (
    PARTITIONS_MAX,
    RESULT,
    Columns,
    as_batches,
    column_of,
    estimated_count,
    key_of,
    require_bytes,
    require_time,
    results,
    selected,
    spans_of,
)

# --------------------------------------------------------------------------------------------------
# The rows of a seed: `key`, `value`, `at` and `op`.
#
# Names, nulls and times of rows are checked in the tasks, by the code of `bulk.seed`.

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


# --------------------------------------------------------------------------------------------------
# A new collection, seeded by tasks: Spark sorts the rows, and tasks write the parts.
#
# No machine shares a file system with another one: rows go through Spark's shuffle, and parts go to
# the collection. Its first batch is appended by one step. Before it the collection has no history.

_Task: TypeAlias = "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]"


def seed_collection(rows: DataFrame, access: Access, times: SeedTimes, count: int) -> int:
    """Seed a collection by `count` tasks. Returns its newest time."""
    parted = rows.repartitionByRange(count, COLUMNS.key)
    # One key and time twice is found where the two rows are neighbours.
    ordered = parted.sortWithinPartitions(parted[COLUMNS.key], parted[COLUMNS.at].desc())

    def write(chain: str) -> ShardBatch:
        task = writer(access, chain, times)
        found: list[ShardBatch] = results(access.url, ordered.mapInArrow(task, RESULT), "seeding")
        parts = tuple(part for batch in found for part in batch.parts)
        newest = max((part.time_max for part in parts), default=times.since)
        return ShardBatch(0, newest + 1, parts=parts)

    return int(access.open().seed(write, since=times.since))


def writer(access: Access, chain: str, times: SeedTimes) -> _Task:
    """The task that writes sorted rows as the parts of a chain."""

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def work() -> list[ShardBatch]:
            rows = SeedRows(COLUMNS, since=times.since, upto=times.upto)
            versions = map(_versions, rows.checked(batches))
            blob = access.storage().blob  # a retry writes under new names
            desc = BatchDesc(0, times.upto + 1)
            names = part_names(chain)
            try:
                return [write_batch(blob, desc, versions, names=names, beside=False)]
            except KeyOrderError as error:
                raise UsageError(
                    f"key {printable(error.key)} has two versions at one time",
                    "drop one: df.dropDuplicates",
                ) from error

        return as_batches(work, *access.directories())

    return write


def _versions(rows: CheckedRows) -> pa.RecordBatch:
    """Rows in the columns of a collection."""
    ops = pc.if_else(rows.values.is_valid(), OP_PUT, OP_DELETE).cast(pa.uint8())
    times, ends = pa.array(rows.times), pa.nulls(len(rows.keys), pa.binary())
    columns = [rows.keys, times, ops, rows.values, ends]
    return pa.RecordBatch.from_arrays(columns, schema=VERSIONS_SCHEMA)


# --------------------------------------------------------------------------------------------------
# A new store, seeded by tasks.
#
#     sort runs (mapInArrow) -> merge, files for each span (mapInArrow) -> the driver takes them
#
# Invariants
# 1. The store appears by a rename, whole: see `kvstore.bulk.seed`.
# 2. No two attempts write under one name. Files that no result names are removed with the
#    directory.


class SeedTimes(NamedTuple):
    """The times that rows may have, `[since, upto]`."""

    since: int
    upto: int


class SortedRuns(NamedTuple):
    """The runs of one task, and the newest time in them."""

    runs: Sequence[Run]
    newest: int


def seed_store(rows: DataFrame, path: Path, times: SeedTimes, count: int) -> int:
    """Build a store at `path` by up to `count` tasks. Returns its newest time."""
    spark = rows.sparkSession
    with appearing(path, task="seed") as directory:
        found: list[SortedRuns] = results(
            directory, rows.mapInArrow(sorter(directory, times), RESULT), "sorting rows in"
        )
        runs = [run for each in found for run in each.runs]
        newest = max((each.newest for each in found), default=times.since)
        spans = spans_of(cuts(runs, count)) if runs else []
        numbers = spark.range(0, len(spans), 1, max(len(spans), 1))
        built = numbers.mapInArrow(merger(directory, runs, spans), RESULT)
        files = results(directory, built, "building files in")
        with building(directory / "store", since=times.since, newest=newest) as builder:
            for file in files:
                builder.add([file], [])
    return newest


def sorter(directory: Path, times: SeedTimes) -> _Task:
    """The task that sorts the rows of one partition into runs."""

    def sort(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def work() -> list[SortedRuns]:
            rows = SeedRows(COLUMNS, since=times.since, upto=times.upto)
            runs = sorted_runs(rows.entries(batches), directory / "runs")
            return [SortedRuns(runs, rows.newest)]

        return as_batches(work, directory)

    return sort


def merger(directory: Path, runs: Sequence[Run], spans: Sequence[Span]) -> _Task:
    """The task that writes the rows of all runs in one span as sorted files.

    Its input is the number of the span.
    """

    def written(span: Span) -> list[Path]:
        place = directory / f"files-{secrets.token_hex(8)}"
        with storage_errors(str(place)):
            place.mkdir()
        return list(seed_files(place, merged(runs, span), "drop one: df.dropDuplicates"))

    def merge(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch.column(0).to_pylist() for batch in numbers):
            yield from as_batches(partial(written, spans[number]), directory)

    return merge


# --------------------------------------------------------------------------------------------------
# A new store or collection of a DataFrame whose rows carry their times.


def seed(
    df: DataFrame,
    url_or_path: Address,
    key: Columns,
    value: Column | str,
    at: Column | str = "ts",
    op: Column | str | None = None,
    *,
    since: TimeLike = 0,
    partitions: int | None = None,
) -> Timestamp:
    """Make a new store or collection whose versions have the times of the rows.

    A path names a store, on a file system that Spark's machines share. A URL (`file://` too) or an
    `Access` names a collection: the rows go through Spark's shuffle, and no disk is shared. `key`
    and `value` are as in `bulk_import`; `at` is a timestamp, or an integer of nanoseconds. `op`
    holds `"put"` or `"delete"`; a deletion needs no value. The history can be read from `since` on:
    pass the time from which the rows are complete. `partitions` is the number of tasks that write.
    Returns the newest time.

    Raises `UsageError` if a store or a collection is there, because history is never rewritten; for
    bad columns, nulls, and times below `since` or in the future; and for two rows of one key and
    time. After an error or a crash there is no history, and the call can be repeated.

    A collection that was seeded takes no backup of a store. Costs a sort of all rows on disk, by
    the tasks. A collection costs two computations of `df`, because Spark samples it first.
    """
    rows = seed_rows(df, key, value, at, op)
    now = Clock().wall_ns()
    times = SeedTimes(int(to_timestamp(since, name="since", now=lambda: now)), now)
    count = estimated_count(df) if partitions is None else partitions
    integer(1, PARTITIONS_MAX).check("partitions", count)
    if isinstance(url_or_path, Access) or "://" in os.fspath(url_or_path):
        return Timestamp(seed_collection(rows, Access.of(url_or_path), times, count))
    require_path(url_or_path)
    return Timestamp(seed_store(rows, Path(os.path.abspath(url_or_path)), times, count))
