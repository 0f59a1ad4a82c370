"""A DataFrame into a store, by Spark, as one import: `bulk_import`, or `stage_import` and later
`bulk.ingest`.

    range-partition by key -> sort -> one SST per task (mapInArrow) -> manifest -> add

The SSTs are built in Spark's workers; the manifest is written and the import added in the process
that called, for only that one has the store. What tasks return is their only result: a part
that no result names was left by a failed or superseded attempt, and is never added.

Rows are range-partitioned by the key alone: with a second column in the range expression Spark
spreads one key over several partitions. Spark orders binary by unsigned bytes, as we do.

A DataFrame is computed twice (once to sample its keys), and again where a task is retried: one
whose rows change between runs (`rand()`, `current_timestamp()`) gives an import of some of them.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import BinaryType, DataType, StringType

import bulk
from bulk.ingest import INGEST_DIRECTORY, OnConflict
from bulk.part import Part, PartWriter
from bulk.staging import Manifest
from kvstore.errors import KeyOrderError, UsageError
from kvstore.store import Store
from kvstore.timestamp import Timestamp

Duplicates: TypeAlias = Literal["error", "last"]

BYTES_PER_PARTITION: Final = 128 << 20
"""Input that one task sorts and writes when `partitions` is not given. A Python task costs some
70 ms, so files should not be small; and a sort that fits memory does not spill."""

PARTITIONS_MAX: Final = 10_000
_UNKNOWN_SIZE: Final = 1 << 60
"""Spark's estimate of a plan it knows nothing about is about the largest long."""

_RESULT_SCHEMA: Final = "result binary"
_KEY, _VALUE, _ORDER = "key", "value", "kvstore_order"


class _Refusal(NamedTuple):
    """What a task found wrong with its rows: sent back as a result, for a retry cannot help."""

    what: str
    remedy: str
    twice: bytes | None = None


def bulk_import(
    df: DataFrame,
    store: Store,
    key: Column | str,
    value: Column | str,
    staging: str | Path | None = None,
    partitions: int | None = None,
    on_conflict: OnConflict = "overwrite",
    *,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
) -> Timestamp:
    """Load `df` into `store`; returns the timestamp at which all its rows became visible.

    `staging` must be an empty or new directory that the workers share with this process, on the
    store's file system so that files are moved rather than copied; by default one beside the
    store's files. It is removed once the import was added. The rest is as in `stage_import`, and
    `on_conflict` as in `bulk.ingest`.

    Raises `UsageError` on bad columns, duplicates and null keys or values; then nothing was added.
    """
    directory = _staging_directory(store, staging)
    stage_import(
        df, directory, key, value, partitions=partitions, duplicates=duplicates, order_by=order_by
    )
    try:
        stamp = bulk.ingest(store, directory, on_conflict=on_conflict, move=True)
    except UsageError:
        if staging is None:  # nobody knows of it, so nobody would add it later
            shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    return stamp


def stage_import(
    df: DataFrame,
    staging: str | Path,
    key: Column | str,
    value: Column | str,
    *,
    partitions: int | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
) -> Manifest:
    """Build an import of `df` in `staging`, to be added by `bulk.ingest`, now or later.

    `key` and `value` are columns or expressions; strings are taken as their UTF-8 bytes, other
    types are refused. A key that occurs twice is an error, or with `duplicates="last"` the row
    with the greatest `order_by` is taken, among equals the greatest value. `partitions` is the
    number of files; by default one per `BYTES_PER_PARTITION` of input, at least Spark's
    parallelism. Needs no store.

    Raises `UsageError` on bad columns, duplicates and null keys or values; `staging` is gone then.
    """
    if duplicates not in ("error", "last") or (duplicates == "last") != (order_by is not None):
        raise UsageError(
            f"duplicates={duplicates!r} with order_by={order_by!r}",
            'pass duplicates="last" and order_by together: arrival order means nothing in Spark',
        )
    rows = _rows(df, key, value, order_by)
    directory = Path(staging)
    staged = bulk.Import.create(directory)
    build = _builder(directory.resolve(), staged.import_id, drop_repeats=duplicates == "last")
    # Among rows of equal order the value decides: arrival differs from run to run.
    last_first = [F.col(_ORDER).desc(), F.col(_VALUE).desc()] if order_by is not None else []
    order = [F.col(_KEY), *last_first]
    # The count is always passed: without one, adaptive execution merges all into one partition.
    parted = rows.repartitionByRange(partitions or _partition_count(df), _KEY)
    try:
        collected = parted.sortWithinPartitions(*order).mapInArrow(build, _RESULT_SCHEMA).collect()
        return staged.seal(_parts(directory, [pickle.loads(row[0]) for row in collected]))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _staging_directory(store: Store, staging: str | Path | None) -> Path:
    if staging is not None:
        return Path(staging)
    if store.path is None:
        raise UsageError("the store has no directory to stage in", "pass staging=")
    return store.path / INGEST_DIRECTORY / f"staging-{secrets.token_hex(8)}"


def _rows(
    df: DataFrame, key: Column | str, value: Column | str, order_by: Column | str | None
) -> DataFrame:
    """The columns to load, under the names of this module, as binary."""
    columns = [_column(key).alias(_KEY), _column(value).alias(_VALUE)]
    if order_by is not None:
        columns.append(_column(order_by).alias(_ORDER))
    chosen = df.select(*columns)
    for name, given in ((_KEY, key), (_VALUE, value)):
        _require_bytes(name, given, chosen.schema[name].dataType)
        chosen = chosen.withColumn(name, F.col(name).cast(BinaryType()))
    return chosen


def _column(given: Column | str) -> Column:
    return F.col(given) if isinstance(given, str) else given


def _require_bytes(name: str, given: Column | str, found: DataType) -> None:
    if not isinstance(found, (BinaryType, StringType)):
        raise UsageError(
            f"{name} {given} is {found.simpleString()}, not binary or string",
            "encode it so that its bytes sort as you want to scan",
        )


def _partition_count(df: DataFrame) -> int:
    """Files to write: by Spark's own estimate of the input, at least one per core."""
    context = df.sparkSession.sparkContext
    size = int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
    wanted = 0 if size > _UNKNOWN_SIZE or size < 0 else size // BYTES_PER_PARTITION
    return min(max(wanted, context.defaultParallelism), PARTITIONS_MAX)


def _parts(directory: Path, results: Iterable[Part | _Refusal]) -> list[Part]:
    parts = []
    for result in results:
        if isinstance(result, Part):
            parts.append(result)
        elif result.twice is not None:
            raise KeyOrderError(str(directory), previous=result.twice, key=result.twice)
        else:
            raise UsageError(result.what, result.remedy)
    return parts


# -- in Spark's workers ---------------------------------------------------------------------


def _builder(
    staging: Path, import_id: int, *, drop_repeats: bool
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The task: batches of sorted rows in, one part out, named in the task's only result."""

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result: Part | _Refusal | None
        try:
            with PartWriter(staging, import_id) as writer:
                for batch in _without_repeats(batches) if drop_repeats else batches:
                    writer.write(batch.select([_KEY, _VALUE]))
                result = writer.finish()
        except KeyOrderError as error:
            result = _Refusal(error.what, error.remedy, twice=error.key)
        except UsageError as error:
            result = _Refusal(error.what, error.remedy)
        if result is not None:
            yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})

    return build


def _without_repeats(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Of rows with equal keys, which lie together, keep the first."""
    last = pa.scalar(None, pa.binary())
    for batch in batches:
        keys = batch.column(_KEY)
        if not len(keys):
            continue
        before = pa.concat_arrays([pa.array([last.as_py()], pa.binary()), keys[:-1]])
        last = keys[-1]
        yield batch.filter(pc.fill_null(pc.not_equal(keys, before), True))
