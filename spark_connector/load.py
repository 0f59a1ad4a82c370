"""A DataFrame into a store, by Spark, as one import: `bulk_import`, or `stage_import` and later
`bulk.ingest`.

    sample keys -> range-partition -> sort, one SST per task (mapInArrow) -> manifest -> add

The SSTs are sorted and built in Spark's workers: Spark's own sort of whole rows takes longer than
ours of numbers made of keys. Only where an order decides among repeated keys does Spark sort, for
that order is one of its values. The manifest is written and the import added in the process that
called, for only that one has the store. What tasks return is their only result: a part that
no result names was left by a failed or superseded attempt, and is never added.

A DataFrame is computed twice (once to sample its keys), and again where a task is retried: one
whose rows change between runs (`rand()`, `current_timestamp()`) gives an import of some of them.
With `splits` nothing is sampled.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame

import bulk
from bulk.ingest import INGEST_DIRECTORY, OnConflict
from bulk.part import Part, PartWriter
from bulk.sort import sorted_batches
from bulk.staging import Manifest
from kvstore.errors import KeyOrderError, UsageError
from kvstore.store import Store
from kvstore.timestamp import Timestamp
from spark_connector.progress import Progress, watched
from spark_connector.rows import (
    KEY,
    Columns,
    Duplicates,
    chosen,
    in_order,
    parted,
    require_order,
    sampled_splits,
    wanted_partitions,
)
from spark_connector.worker import spare_the_collector

_RESULT_SCHEMA: Final = "result binary"
_SCRATCH: Final = "sorting"
"""In the staging directory: where tasks sort what does not fit their memory."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What one load did. Seconds of Spark (read, sort, write the files), and of adding them."""

    stamp: Timestamp
    import_id: int
    rows: int
    files: int
    bytes: int
    build_seconds: float
    add_seconds: float


class _Refusal(NamedTuple):
    """What a task found wrong with its rows: sent back as a result, for a retry cannot help."""

    what: str
    remedy: str
    twice: bytes | None = None


def bulk_import(
    df: DataFrame,
    store: Store,
    key: Columns,
    value: Column | str,
    staging: str | Path | None = None,
    partitions: int | None = None,
    on_conflict: OnConflict = "overwrite",
    *,
    op: Column | str | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    import_id: int | None = None,
    progress: Progress | None = None,
) -> Timestamp:
    """Load `df` into `store`; returns the timestamp at which all its rows became visible.

    `staging` must be an empty or new directory that the workers share with this process, on the
    store's file system so that files are moved rather than copied; by default one beside the
    store's files. It is removed once the import was added. `on_conflict` is as in `bulk.ingest`,
    the rest as in `stage_import`. `run_import` does the same and tells more.

    Raises `UsageError` on bad columns, duplicates and null keys or values; then nothing was added.
    """
    return run_import(
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
        import_id=import_id,
        progress=progress,
    ).stamp


def run_import(
    df: DataFrame,
    store: Store,
    key: Columns,
    value: Column | str,
    staging: str | Path | None = None,
    partitions: int | None = None,
    on_conflict: OnConflict = "overwrite",
    *,
    op: Column | str | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    import_id: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """As `bulk_import`; returns a report."""
    directory = _staging_directory(store, staging)
    started = time.perf_counter()
    manifest = stage_import(
        df,
        directory,
        key,
        value,
        op=op,
        partitions=partitions,
        splits=splits,
        duplicates=duplicates,
        order_by=order_by,
        import_id=import_id,
        progress=progress,
    )
    built = time.perf_counter()
    try:
        stamp = bulk.ingest(store, directory, on_conflict=on_conflict, move=True)
    except UsageError:
        if staging is None:  # nobody knows of it, so nobody would add it later
            shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    return ImportReport(
        stamp=stamp,
        import_id=manifest.import_id,
        rows=manifest.rows,
        files=len(manifest.parts),
        bytes=manifest.size_bytes,
        build_seconds=round(built - started, 3),
        add_seconds=round(time.perf_counter() - built, 3),
    )


def stage_import(
    df: DataFrame,
    staging: str | Path,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None = None,
    partitions: int | None = None,
    splits: Sequence[bytes] | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    import_id: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Build an import of `df` in `staging`, to be added by `bulk.ingest`, now or later.

    `key` and `value` are columns or expressions; strings are taken as their UTF-8 bytes, other
    types are refused. Several key columns (a list) are encoded so that their bytes sort as they
    do (`tuple_key`). `op` holds `"put"` or `"delete"`; a deletion needs no value.

    A key that occurs twice is an error, or with `duplicates="last"` the row with the greatest
    `order_by` is taken, among equals the greatest value. `partitions` is the number of files; by
    default one per `BYTES_PER_PARTITION` of input, at least Spark's parallelism. `splits` are the
    least keys of all files but the first: then the files are the same in every run. `import_id`
    makes a job repeatable: an id that was added is not added again. `progress` is called now and
    then with tasks done and tasks known. Needs no store.

    Raises `UsageError` on bad columns, duplicates and null keys or values; `staging` is gone then.
    """
    require_order(duplicates, order_by)
    count = wanted_partitions(df, partitions, splits)
    rows = chosen(df, key, value, op=op, order_by=order_by)
    directory = Path(staging)
    staged = bulk.Import.create(directory, import_id=import_id)
    build = _builder(directory.resolve(), staged.import_id, is_sorted=duplicates == "last")
    try:
        with watched(df.sparkSession, progress):
            cuts = sampled_splits(rows, count) if splits is None else splits
            ready = parted(rows, count, cuts)
            if duplicates == "last":
                ready = in_order(ready)
            collected = ready.mapInArrow(build, _RESULT_SCHEMA).collect()
        shutil.rmtree(directory / _SCRATCH, ignore_errors=True)
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
    staging: Path, import_id: int, *, is_sorted: bool
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The task: a partition's rows in, one part out, named in the task's only result.

    Rows come in any order, each key once; or sorted, of equal keys the one to take first.
    """

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spare_the_collector()
        scratch = staging / _SCRATCH / uuid.uuid4().hex
        rows = _without_repeats(batches) if is_sorted else sorted_batches(batches, scratch)
        result: Part | _Refusal | None
        try:
            with PartWriter(staging, import_id) as writer:
                for batch in rows:
                    writer.write(batch)
                result = writer.finish()
        except KeyOrderError as error:
            result = _Refusal(error.what, error.remedy, twice=error.key)
        except UsageError as error:
            result = _Refusal(error.what, error.remedy)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if result is not None:
            yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})

    return build


def _without_repeats(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Of rows with equal keys, which lie together, keep the first."""
    last = pa.scalar(None, pa.binary())
    for batch in batches:
        keys = batch.column(KEY)
        if not len(keys):
            continue
        before = pa.concat_arrays([pa.array([last.as_py()], pa.binary()), keys[:-1]])
        last = keys[-1]
        yield batch.filter(pc.fill_null(pc.not_equal(keys, before), True))
