"""A DataFrame into a store, by Spark, as one import: `bulk_import`, or `stage_import` and later
`bulk.ingest`.

    sort runs (mapInArrow) -> merge, one SST per span of keys (mapInArrow) -> manifest -> add

Runs and SSTs are built in Spark's workers, and lie in the staging directory; which keys are to go
into one SST follows from samples that come with the runs. So Spark's own shuffle and sort of whole
rows, and the pass over all input in which it looks for borders, are not paid for. Only where an
order decides among repeated keys does Spark partition and sort: that order is one of its values.

The manifest is written and the import added in the process that called, for only that one has the
store. What tasks return is their only result: a run or a part that no result names was left by
a failed or superseded attempt, and is never read.

A DataFrame is computed once, and partly again where a task is retried; twice with `order_by`, for
Spark samples it first. One whose rows change between runs (`rand()`, `current_timestamp()`) then
gives an import of some of them.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame

import bulk
from bulk.ingest import OnConflict, require_on_conflict
from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from bulk.sort import Duplicates, Run, cuts, merged, sorted_runs
from bulk.staging import discard
from kvstore.errors import ImportRefusedError, KeyOrderError, UsageError
from kvstore.imports import INGEST_DIRECTORY
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp
from spark_connector.loading.progress import Progress, watched
from spark_connector.loading.rows import Columns, Rows, without_repeats
from spark_connector.worker import freeze_objects

_RESULT_SCHEMA: Final = "result binary"
_SCRATCH: Final = "sorting"
"""In the staging directory: the sorted runs, as large as the rows, until they are merged."""


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
    store's files. It needs room for the rows twice, and is removed once the import was added.
    `on_conflict` is as in `bulk.ingest`, the rest as in `stage_import`. A job run again with the
    `import_id` that it had returns the first timestamp, and adds and computes nothing.
    `run_import` does the same and tells more.

    Raises `UsageError` on bad columns, duplicates and null keys or values; then nothing was added.
    """
    rows = Rows(df, key, value, op, partitions, splits, duplicates, order_by)
    return _run(rows, store, staging, on_conflict, import_id, progress).stamp


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
    """As `bulk_import`; returns a report, whose seconds are 0 where the job had been run before."""
    rows = Rows(df, key, value, op, partitions, splits, duplicates, order_by)
    return _run(rows, store, staging, on_conflict, import_id, progress)


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
    `order_by` is taken, among equals a put, then the greatest value. `partitions` is the number of
    files; by default one per `BYTES_PER_PARTITION` of input, at least Spark's parallelism. `splits`
    are the least keys of all files but the first: then the files are the same in every run. A task
    holds at most `SORT_BYTES_MAX` of rows in Python, and sorts what is more on disk. `import_id`
    names the import, from 1 to 2**63 - 1: a store adds an id once. `progress` is called now and
    then with tasks done and tasks known. Needs no store.

    Raises `UsageError` on bad columns, duplicates and null keys or values; `staging` is gone then.
    """
    rows = Rows(df, key, value, op, partitions, splits, duplicates, order_by)
    return _stage(rows, Path(staging), import_id, progress)


def _run(
    rows: Rows,
    store: Store,
    staging: str | Path | None,
    on_conflict: OnConflict,
    import_id: int | None,
    progress: Progress | None,
) -> ImportReport:
    require_on_conflict(on_conflict)
    if import_id is not None and (known := _added_before(store, import_id)) is not None:
        return known
    directory = _staging_directory(store, staging)
    started = time.perf_counter()
    manifest = _stage(rows, directory, import_id, progress)
    built = time.perf_counter()
    try:
        stamp = bulk.ingest(store, directory, on_conflict=on_conflict, move=True)
    except UsageError as error:
        if import_id is not None and isinstance(error, ImportRefusedError):
            known = _added_before(store, import_id)
            if known is not None:  # another thread ran the same job meanwhile
                shutil.rmtree(directory, ignore_errors=True)
                return known
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


def _stage(
    rows: Rows, directory: Path, import_id: int | None, progress: Progress | None
) -> Manifest:
    rows.require_order()
    count = rows.file_count()
    chosen, spark = rows.chosen(), rows.df.sparkSession
    staged = bulk.Import.create(directory, import_id=import_id)
    place = directory.resolve()
    try:
        with watched(spark, progress):
            if rows.order_by is None:
                runs = _results(directory, chosen.mapInArrow(_sorter(place), _RESULT_SCHEMA))
                borders = cuts(runs, count) if rows.splits is None else rows.splits
                build = _merger(place, staged.import_id, runs, _spans(borders))
                pieces = len(borders) + 1 if runs else 0
                tasks = spark.range(0, pieces, 1, max(pieces, 1))
            else:
                build = _builder(place, staged.import_id)
                tasks = rows.by_key()
            parts = _results(directory, tasks.mapInArrow(build, _RESULT_SCHEMA))
        shutil.rmtree(directory / _SCRATCH, ignore_errors=True)
        return staged.seal(parts)
    except BaseException:
        discard(directory)
        raise


def _added_before(store: Store, import_id: int) -> ImportReport | None:
    """What was added under an id. What a crash left of it between two steps is taken back."""
    with store.imports.alone(import_id):  # waits for another thread that is adding it
        known = next((each for each in store.imports.all() if each.import_id == import_id), None)
    if known is None:
        return None
    if known.added is None:
        store.imports.abort(import_id)
        return None
    files = len(known.spans)
    return ImportReport(known.added, import_id, known.rows, files, known.size_bytes, 0.0, 0.0)


def _staging_directory(store: Store, staging: str | Path | None) -> Path:
    if staging is not None:
        return Path(staging)
    if store.path is None:
        raise UsageError("the store has no directory to stage in", "pass staging=")
    return store.path / INGEST_DIRECTORY / f"staging-{secrets.token_hex(8)}"


def _spans(borders: Sequence[bytes]) -> list[Span]:
    ends: list[bytes | None] = [*borders, None]
    return [Span(start, end) for start, end in zip([b"", *borders], ends, strict=True)]


def _results(staging: Path, tasks: DataFrame) -> list[Any]:
    """What the tasks returned. Raises what one of them found wrong with its rows."""
    results = [pickle.loads(row[0]) for row in tasks.collect()]
    for result in results:
        if isinstance(result, _Refusal):
            if result.twice is not None:
                raise KeyOrderError(str(staging), previous=result.twice, key=result.twice)
            raise UsageError(result.what, result.remedy)
    return results


# -- in Spark's workers ---------------------------------------------------------------------

_Task: TypeAlias = "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]"


def _sorter(staging: Path) -> _Task:
    """The task that makes runs of a partition's rows, which come in any order."""

    def sort(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _as_batches(partial(sorted_runs, batches, staging / _SCRATCH))

    return sort


def _merger(staging: Path, import_id: int, runs: Sequence[Run], spans: Sequence[Span]) -> _Task:
    """The task that makes one part of what all runs have in a span, whose number comes in."""

    def merge(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch.column(0).to_pylist() for batch in numbers):
            rows = merged(runs, spans[number])
            yield from _as_batches(partial(_written, staging, import_id, rows))

    return merge


def _builder(staging: Path, import_id: int) -> _Task:
    """The task that makes one part of sorted rows, of equal keys the first."""

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _as_batches(partial(_written, staging, import_id, without_repeats(batches)))

    return build


def _as_batches(work: Callable[[], Sequence[Run | Part]]) -> Iterator[pa.RecordBatch]:
    """What `work` returns, or what it refuses, as the only rows of its task."""
    freeze_objects()
    results: Sequence[Run | Part | _Refusal]
    try:
        results = work()
    except KeyOrderError as error:
        results = [_Refusal(error.what, error.remedy, twice=error.key)]
    except UsageError as error:
        results = [_Refusal(error.what, error.remedy)]
    for result in results:
        yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})


def _written(staging: Path, import_id: int, rows: Iterable[pa.RecordBatch]) -> list[Part]:
    with PartWriter(staging, import_id) as writer:
        for batch in rows:
            writer.write(batch)
        part = writer.finish()
    return [] if part is None else [part]
