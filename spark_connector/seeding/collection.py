"""A new collection, seeded by tasks: Spark sorts the rows, and tasks write the parts.

No machine shares a file system with another one: rows go through Spark's shuffle, and parts go to
the collection. Its first batch is appended by one step. Before it the collection has no history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from backup.shard import (
    OP_DELETE,
    OP_PUT,
    VERSIONS,
    VERSIONS_SCHEMA,
    BatchDesc,
    ShardBatch,
    part_names,
    write_batch,
)
from bulk.seed import CheckedRows, SeedRows
from kvstore.errors import KeyOrderError, UsageError, printable
from spark_connector.access import Access
from spark_connector.loading.results import RESULT, as_batches, results
from spark_connector.seeding.rows import COLUMNS
from spark_connector.seeding.store import SeedTimes

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
                return [write_batch(blob, desc, versions, rule=VERSIONS, names=names, beside=False)]
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
