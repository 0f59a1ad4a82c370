"""A DataFrame into a store as one import: `bulk_import`, or `stage_import` and later `bulk.ingest`.

The process that calls adds the import, or the owner of the store adds it.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame

import bulk
from bulk.bucket import BucketUrl
from bulk.ingest import require_on_conflict
from bulk.manifest import Manifest
from bulk.micro_batches import Origin
from bulk.remote import OnConflict
from bulk.sort import Duplicates
from kvstore.control.scripts import StoreOrClient, as_store
from kvstore.errors import (
    ImportRefusedError,
    NotUniqueError,
    TableAlteredError,
    UsageError,
)
from kvstore.imports import INGEST_DIRECTORY, ImportRecord
from kvstore.store import Store
from kvstore.tables import Table
from kvstore.timestamp import Timestamp
from spark_connector.access import Address, staging_at
from spark_connector.loading.build import build_import
from spark_connector.loading.columns import Columns
from spark_connector.loading.progress import Progress
from spark_connector.loading.rows import ImportRows
from spark_connector.loading.tables import require_typed, rows_once, table_rows


class OfBatch(NamedTuple):
    """The micro-batch whose rows a load has: the name of its stream, its number, its origin."""

    name: str
    number: int
    origin: Origin

    def require_repeated(self, record: ImportRecord) -> None:
        """Raise `UsageError` if a record with the id of this micro-batch is of another one."""
        known = Origin.of_text(record.origin)
        self.origin.require_repeated(repr(self.name), self.number, known)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of one load: `build_seconds` in Spark, and `add_seconds` for adding the files.

    `stages` has the seconds of compute, sort, write and upload, summed over tasks, and of fetch,
    check and add in this process.
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
) -> Timestamp:
    """Load `df` into `store`. Returns the timestamp at which all its rows became visible.

    `store` is open in this process, or the client of its owner (`kvstore.connect(path)`).
    `staging` must be an empty or new directory that the workers share with this process, or the
    URL of an object store, such as `s3://bucket/staging/run-42`: then the machines share nothing
    else. A directory on the store's file system has its files moved, not copied. The default is a
    directory beside the store's files. A directory needs room for the rows twice. The staging place
    is removed after the import is added. `max_bytes` bounds the load: Spark's estimate of the input
    is compared before any task runs, the files when they are sealed.

    `on_conflict` is the parameter of `bulk.ingest`; the others are as in `stage_import`. A job that
    runs again with the same `import_id` adds and computes nothing, and returns the first timestamp.
    `run_import` returns a report instead.

    For a table (`store.table("trips")`) `df` has columns of the table, in any order, and neither
    `key`, `value`, `op`, `splits` nor `duplicates` is given. The tasks that sort the rows build
    their index entries too, which expire with their row. `expires` names one more column, or is an
    expression. A type, a null or a value that does not fit is refused by column and row. Raises
    `TableAlteredError` if the table is altered meanwhile, and `NotUniqueError` for a row with the
    values of another one in a unique index.

    Raises `UsageError` on bad columns, duplicates and null keys or values; then no row is added.
    """
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
        require_typed(store, duplicates, key, value, op, splits, order_by)
        return _table_import(df, store, staging, partitions, on_conflict, expires, **more)
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
    **more: Any,
) -> Timestamp:
    store, codec, check = table.import_target()
    rows = table_rows(df, codec, expires=expires, partitions=partitions)
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
) -> ImportReport:
    """Load `rows` as `bulk_import` does, and return a report.

    The seconds of the report are 0 if the job ran before. `check` is as in `bulk.ingest`.
    `of_batch` is given by `batch_importer`.
    """
    require_on_conflict(on_conflict)
    with as_store(store) as into:  # a client whose files are elsewhere is refused before the build
        known = None if import_id is None else _added_before(into, import_id, of_batch)
        place = _staging_place(into, staging)
    if known is not None:
        return known
    started, times = time.perf_counter(), bulk.StageTimes()
    manifest = build_import(rows, place, import_id, progress, max_bytes, times)
    built = time.perf_counter()
    try:
        origin = "" if of_batch is None else of_batch.origin.text
        stamp = bulk.ingest(
            store, place, on_conflict, True, check=check, times=times, origin=origin
        )
    except (NotUniqueError, TableAlteredError):  # only other rows could continue
        with as_store(store) as into:
            into.imports.abort(manifest.import_id)
        _remove(place)
        raise
    except UsageError as error:
        if import_id is not None and isinstance(error, ImportRefusedError):
            try:
                with as_store(store) as into:
                    known = _added_before(into, import_id, of_batch)
            except UsageError:
                _remove(place)
                raise
            if known is not None:  # another thread ran the same job meanwhile
                _remove(place)
                return known
        if staging is None:  # the caller does not know the directory, and cannot add it later
            _remove(place)
        raise
    _remove(place)
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


def _added_before(store: Store, import_id: int, of_batch: OfBatch | None) -> ImportReport | None:
    """The report of an import that was added before. Undoes one that a crash left half done. Raises
    `UsageError` if the import is of another micro-batch."""
    with store.imports.alone(import_id):  # waits for another thread that is adding it
        known = store.imports.get(import_id)
    if known is None:
        return None
    if known.added is None:
        store.imports.abort(import_id)
        return None
    if of_batch is not None:
        of_batch.require_repeated(known)
    files = len(known.spans)
    return ImportReport(known.added, import_id, known.rows, files, known.size_bytes, 0.0, 0.0)


def _remove(place: Path | BucketUrl) -> None:
    """Remove a staging place whose import was added, or given up."""
    if isinstance(place, Path):
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.open().remove()


def _staging_place(store: Store, staging: Address | None) -> Path | BucketUrl:
    if staging is not None:
        return staging_at(staging)
    if store.path is None:
        raise UsageError("the store has no directory to stage in", "pass staging=")
    return store.path / INGEST_DIRECTORY / f"staging-{secrets.token_hex(8)}"
