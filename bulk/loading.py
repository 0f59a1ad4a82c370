"""Rows that come in any order: as one import, as ordinary commits, or as rows of a table with their
index entries."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import word
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.building import Import
from kvstore.bulk.gate import Force, Gate
from kvstore.bulk.ingest import (
    ON_CONFLICT,
    OnConflict,
    added_before,
    as_taken,
    check_for_ingest,
    give_up,
    ingest,
    staging_beside,
    staging_for,
)
from kvstore.bulk.manifest import EncodedBy, Manifest
from kvstore.bulk.row_files import PLAIN_READS, FileReads, due_times, first_row, typed_batches
from kvstore.bulk.sort import DUPLICATES, Duplicates, sorted_batches
from kvstore.bulk.staging import Staging, remove_staging, staging_place
from kvstore.codec.columns import due_column
from kvstore.errors import (
    KeyConflictError,
    KeyOrderError,
    LoadRefusedError,
    UsageError,
    printable,
)
from kvstore.limits import APPLY_BYTES_MAX, REFUSED_LOAD_S, REFUSED_LOADS_MAX
from kvstore.mvcc.arrow import rows_schema
from kvstore.remote.control import StoreOrClient, client_of
from kvstore.store import Store
from kvstore.tables import Table, TableCodec
from kvstore.tables.definition import is_entry
from kvstore.tables.row_codec import conform, default_value, record_batches, row_dues
from kvstore.tables.sources import ImportTarget, require_no_expiry_column
from kvstore.timeline.imports import INGEST_DIRECTORY, REFUSED_PREFIX


def import_rows(
    store: StoreOrClient,
    rows: Iterator[pa.RecordBatch],
    on_conflict: OnConflict,
    duplicates: Duplicates,
    *,
    name_of: Callable[[bytes], str] = printable,
    check: Callable[[], None] | None = None,
    tables: Sequence[EncodedBy] = (),
    staging: Path | BucketUrl | None = None,
    import_id: int | None = None,
    gate: Gate | None = None,
    force: Force | None = None,
) -> tuple[Manifest, Timestamp]:
    """Sort, stage and add rows: batches of binary columns `key` and `value`.

    `name_of` names a key in errors; `check` is that of the import target of a table; `tables` are
    the definitions that encoded the rows. `staging` is as in `staging_for`. Raises `UsageError` for
    a key that comes twice, unless `duplicates` is `"last"`.
    """
    is_local = isinstance(store, Store) and staging is None
    with staging_beside(store) as scratch:  # also the place to sort in
        place = scratch / "staged" if is_local else staging_for(store, staging)
        made = Import.create(place, import_id=import_id)
        try:
            ordered = sorted_batches(rows, scratch / "sorting", duplicates=duplicates)
            made.write_sorted(ordered)
            manifest = made.seal(tables=tables)
        except KeyOrderError as error:  # the rows are sorted, so a key came twice
            made.discard()
            what = f"key {name_of(error.key)} came twice"
            remedy = "remove one row of it, or pass --duplicates last"
            raise UsageError(what, remedy) from error
        except BaseException:
            made.discard()
            raise
        try:
            check = check_for_ingest(store, check)
            taken = as_taken(store, place)
            how: dict[str, Any] = {"on_conflict": on_conflict, "move": True, "check": check}
            if gate is not None:
                if check is not None:
                    check()
                how |= {"check": gate, "force": force}
            stamp = ingest(store, taken, **how)
        except LoadRefusedError as error:
            if not isinstance(place, Path):
                raise
            kept, stays = place, ""
            if staging is None:
                kept, stays = _kept_apart(store, place, manifest)
            cause = error.__cause__ or error
            raise LoadRefusedError(str(kept), error.failed, error.report, stays) from cause
        except UsageError as error:
            give_up(store, manifest.import_id)
            remove_staging(place)
            if isinstance(error, KeyConflictError):
                named = [key for key in error.keys if not is_entry(key)]
                raise KeyConflictError(named or error.keys, name_of) from error
            raise
        except BaseException:
            remove_staging(place)
            raise
        remove_staging(place)
    return manifest, stamp


def _kept_apart(store: StoreOrClient, staged: Path, manifest: Manifest) -> tuple[Path, str]:
    """The directory to which a load that its gate has refused is moved, for inspection, and how
    long it stays. That of a store on disk lies in its `ingest/`: the newest few of a table stay
    there until GC finds them old."""
    path = getattr(store, "path", None)
    if path is None:
        kept = Path(tempfile.mkdtemp(prefix="kvstore-refused-")) / "staged"
        shutil.move(staged, kept)
        return kept, ""
    of = manifest.tables[0].table if manifest.tables else ""
    group = f"{REFUSED_PREFIX}{blake2b(of.encode(), digest_size=8).hexdigest()}"
    kept = Path(path) / INGEST_DIRECTORY / f"{group}-{manifest.import_id:016x}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(exist_ok=True)
    shutil.move(staged, kept)
    os.utime(kept)
    by_age = sorted(kept.parent.glob(f"{group}-*"), key=_age)
    for old in by_age[REFUSED_LOADS_MAX:]:
        shutil.rmtree(old, ignore_errors=True)
    days = int(REFUSED_LOAD_S // 86_400)
    stays = f"the staged rows stay there for {days} days, the newest {REFUSED_LOADS_MAX} of a table"
    return kept, f"{stays}; "


def _age(kept: Path) -> int:
    """Ascends from the newest directory. One that another process has removed is the oldest."""
    try:
        return -kept.stat().st_mtime_ns
    except OSError:
        return 0


# --------------------------------------------------------------------------------------------------
# Rows as ordinary commits: puts and deletes in their order, or the differences to a span.
#
#     apply_rows(store, rows)         columns key, value, op: each row is a put or a delete
#     sync_rows(store, rows, span)    afterwards the span has exactly these rows
#
# Many new rows come by an import (`bulk.loading`). These functions are for few writes: rows that
# differ from the store, or rows that delete.
#
# Invariants
# 1. `sync_rows` writes no key that has its value already, so rows that are all there cost a pass
#    over the span and no commit.
# 2. A commit has at most `APPLY_BYTES_MAX` bytes of keys and values. Up to there all rows become
#    visible at one time; more rows come in several commits of one changeset.

_ROW_BYTES = 64
"""A row's share of a commit beside its key and value: a file of empty rows is bounded as well."""


class RowsApplied(NamedTuple):
    """The writes that were made. `timestamp` is None if there were none."""

    timestamp: Timestamp | None
    puts: int
    deletes: int
    commits: int


def apply_rows(store: StoreOrClient, rows: Iterable[pa.RecordBatch]) -> RowsApplied:
    """Put and delete the rows in their order. Column `op` has `put` or `delete`.

    The value of a delete is not read. Raises `UsageError` for another operation and for a null.
    """
    return _applied(store, _operations(rows))


def sync_rows(
    store: StoreOrClient,
    rows: Iterable[pa.RecordBatch],
    span: Span,
    duplicates: Duplicates = "error",
    *,
    progress: Callable[[int], None] = lambda rows: None,
) -> RowsApplied:
    """Make `span` have exactly the rows, and write the differences alone.

    Rows come in any order; more than fit into memory are sorted on disk. Costs a pass
    over the span. Raises `UsageError` for a key outside the span, for a key that comes twice,
    unless `duplicates` is `"last"`, and for no rows at all where the span has keys: they come from
    a pipe whose first command failed more often than from a wish to delete the span. Another
    writer of the span may leave a difference.
    """
    with staging_beside(store) as directory:
        directory.mkdir(parents=True, exist_ok=True)
        ordered = sorted_batches(rows, directory / "sorting", duplicates=duplicates)
        wanted = _not_empty(span, _inside(span, _pairs(ordered)), store)
        return _applied(store, _differences(wanted, store.scan(span.start, span.end), progress))


_Operation = tuple[bytes, "bytes | None"]
"""A key, and its new value; None deletes it."""


def _operations(rows: Iterable[pa.RecordBatch]) -> Iterator[_Operation]:
    number = 0
    for batch in rows:
        for key, value, op in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            number += 1
            if key is None or (value is None and op == "put"):
                raise UsageError(f"row {number} has a null", "give it a key and a value")
            if op not in ("put", "delete"):
                raise UsageError(f"row {number}: operation {op!r}", "write put or delete")
            yield key, value if op == "put" else None


def _pairs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
    for batch in batches:
        keys, values = (column.to_pylist() for column in batch.columns[:2])
        yield from zip(keys, values, strict=True)


def _inside(span: Span, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    before: bytes | None = None
    for key, value in rows:
        if key not in span:
            raise UsageError(
                f"key {printable(key)} is outside the span", "sync the span that the file has"
            )
        if key == before:
            raise UsageError(
                f"key {printable(key)} came twice",
                "remove one row of it, or pass --duplicates last",
            )
        yield key, value
        before = key


def _not_empty(
    span: Span, rows: Iterator[tuple[bytes, bytes]], store: StoreOrClient
) -> Iterator[tuple[bytes, bytes]]:
    first = next(rows, None)
    if first is not None:
        return chain([first], rows)
    if next(store.scan(span.start, span.end), None) is not None:
        raise UsageError(
            "there are no rows, and a sync would delete every key of the span",
            "look why the input is empty, or delete the span by `kvstore delete-range`",
        )
    return rows


def _differences(
    wanted: Iterator[tuple[bytes, bytes]],
    present: Iterator[tuple[bytes, bytes]],
    progress: Callable[[int], None],
) -> Iterator[_Operation]:
    """The operations that turn `present` into `wanted`. Both ascend by key."""
    rows = 0
    row, old = next(wanted, None), next(present, None)
    while row is not None or old is not None:
        if old is None or (row is not None and row[0] < old[0]):
            assert row is not None
            yield row
            row = next(wanted, None)
        elif row is None or old[0] < row[0]:
            yield old[0], None
            old = next(present, None)
        else:
            if row[1] != old[1]:
                yield row
            row, old = next(wanted, None), next(present, None)
        rows += 1
        if rows % 10_000 == 0:
            progress(rows)


def _applied(store: StoreOrClient, operations: Iterator[_Operation]) -> RowsApplied:
    """Write the operations. The owner of the store does it for a script beside it, and the server
    for a client."""
    owner = client_of(store)
    target: Any = store if owner is None else owner
    stamp: Timestamp | None = None
    puts = deletes = commits = 0
    with store.changeset() if isinstance(store, Store) and owner is None else nullcontext():
        waiting = next(operations, None)
        while waiting is not None:
            size = 0
            with target.batch(durability="sync") as batch:
                while waiting is not None and size < APPLY_BYTES_MAX:
                    key, value = waiting
                    if value is None:
                        batch.delete(key)
                        deletes += 1
                    else:
                        batch.put(key, value)
                        puts += 1
                    size += len(key) + len(value or b"") + _ROW_BYTES
                    waiting = next(operations, None)
            stamp, commits = batch.timestamp, commits + 1
    return RowsApplied(stamp, puts, deletes, commits)


# --------------------------------------------------------------------------------------------------
# Rows of a table as rows of an import: keys and values, and the entries of every index.
#
# Invariants
# 1. A row and its index entries have one due time.
# 2. The batches of one call have the same number of rows, in the same order: the rows come first,
#    and then the entries of each index.


def stored_batches(
    codec: TableCodec, batch: pa.RecordBatch, dues: pa.Array | None = None
) -> Iterator[pa.RecordBatch]:
    """Keys and values of the rows of a batch, and of their entries in each index. With `dues`, or a
    column of the table that tells, they have the times at which the rows expire, and each entry has
    the key of the row with which it expires."""
    column = codec.definition.expiry_column
    if column is not None:
        dues = row_dues(batch.column(column.name))
    keys, values = codec.encode(batch)
    none = pa.nulls(len(keys), pa.binary())
    yield _timed(keys, values, dues, none)
    rows = none if dues is None else pc.if_else(dues.is_valid(), keys, none)
    for index in codec.definition.indexes:
        entries = codec.entries(index, batch)
        empty = pa.repeat(pa.scalar(b"", pa.binary()), len(entries))
        yield _timed(entries, empty, dues, rows)


def deleted_rows(
    codec: TableCodec, batch: pa.RecordBatch, schema: pa.Schema, first: int = 0
) -> pa.RecordBatch:
    """The rows of an import that delete the rows whose keys a batch has, in the columns of
    `schema`. No other column of the batch is looked at. `first` is the number of its first row.
    Raises `UsageError` that names column and row. The entries of the rows stay behind, as those of
    rows that are replaced."""
    names = [column.name for column in codec.key.columns]
    keys = codec.key.keys(conform(codec.definition, batch, first, only=names))
    known = {"key": keys, "op": pa.repeat(pa.scalar(DELETE), len(keys))}
    nulls = [known.get(field.name, pa.nulls(len(keys), field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(nulls, schema=schema)


def with_puts(stored: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Stored rows beside those of `deleted_rows`."""
    ops = pa.repeat(pa.scalar(PUT), stored.num_rows)
    return pa.RecordBatch.from_arrays([*stored.columns, ops], schema=schema)


def require_expiry(codec: TableCodec, expires: object) -> None:
    """Raise `UsageError` for due times beside the rows of a table that has a column of them."""
    if expires is not None:
        require_no_expiry_column(codec.definition, "leave out expires; set {column} in the rows")


def _timed(
    keys: pa.Array, values: pa.Array, dues: pa.Array | None, rows: pa.Array
) -> pa.RecordBatch:
    if dues is None:
        return pa.RecordBatch.from_arrays([keys, values], schema=stored_schema(expires=False))
    return pa.RecordBatch.from_arrays([keys, values, dues, rows], schema=stored_schema())


def stored_schema(*, expires: bool = True, deletes: bool = False) -> pa.Schema:
    """The columns of `stored_batches`, of rows that expire or of rows that stay; with `deletes`
    also of `deleted_rows`."""
    due = [("expires", pa.int64()), ("expires_with", pa.binary())] if expires else []
    return pa.schema([*rows_schema(), *due, *([("op", pa.string())] if deletes else [])])


PUT: Final = "put"
DELETE: Final = "delete"


def key_text(codec: TableCodec, key: bytes) -> str:
    """A key of a row as its columns, for errors."""
    if not key.startswith(codec.key.prefix):
        return printable(key)
    return f"{codec.key.named(key)} of {codec.definition.where}"


# --------------------------------------------------------------------------------------------------
# Rows of a table as an import: the rows, and their entries in every index.
#
# Invariants
# 1. The rows are added only while the definition that encoded them is the newest: the commit looks
#    under its lock. So a new index misses no row.
# 2. An import brings the entries of its rows. Entries of the rows that it replaces stay behind as
#    hints that no row fits. With `on_conflict="error"` they count as live keys, until
#    `Table.tidy` has deleted them.


class TimedRows(NamedTuple):
    """Rows of a table, and the times at which they expire: nanoseconds, null for rows that stay.
    `dues` is None if no row expires."""

    batch: pa.RecordBatch
    dues: pa.Array | None

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.batch.num_rows)


def import_table(
    table: Table,
    rows: object,
    *,
    expires: str | None = None,
    on_conflict: OnConflict = "overwrite",
    duplicates: Duplicates = "error",
    staging: Staging | None = None,
    options: Mapping[str, Any] | None = None,
    import_id: int | None = None,
    check: Gate | Mapping[str, Any] | None = None,
    force: Force | str | None = None,
) -> Timestamp:
    """Load rows into a table as one import. Returns the time at which all became visible, with
    their index entries.

    `table` is of a store that is open here, or of a client. `rows` are Arrow data, such as a reader
    of record batches, or a frame of Polars, DuckDB or pandas, in any order. They have columns of
    the table; a column that is missing is null, or has its default. `expires` names one more
    column, with the times at which rows are deleted, null for rows that stay; a table with a column
    of its own that tells so takes none. Of rows with one key, `duplicates="last"` takes the last.
    `on_conflict` is as in `ingest`.

    `check` is a gate, as in `ingest`: a load that does not pass raises `LoadRefusedError`, which
    names the directory where its files were put: `staging`, or one in the `ingest/` of the store,
    where the newest three of a table stay for seven days. `force`, a `Force` or its reason, adds it
    nevertheless. Raises `ConflictError` if other loads came whenever the gate ran: load again.

    `staging` is an empty or new directory, or a URL with the `options` of its object store. By
    default it lies beside the files of the store; a server takes it from below the places of
    `kvstore serve --imports-from`, of which the first is the default. It is removed afterwards. A
    job that runs again with the same `import_id` reads no row, and returns the first time; after a
    revert it raises `UsageError`, because corrected rows need another id.

    Raises `UsageError` that names column and row for a value that does not fit, `NotUniqueError`
    for a row with the values of another one in a unique index, `TableAlteredError` if the table is
    altered meanwhile, and `AccessDeniedError`, before any row is read, where a server takes no
    imports from the caller, or none from there. Nothing is added then. Memory is bounded: rows are
    sorted on disk.
    """
    ON_CONFLICT.check("on_conflict", on_conflict)
    word(*DUPLICATES).check("duplicates", duplicates)
    if not isinstance(table, Table):
        raise UsageError(
            f"a Table is loaded, not {type(table).__name__}",
            "pass store.table(name) or client.table(name); a coroutine calls asyncio.to_thread",
        )
    gate = None if check is None else Gate.of(check)
    forced = Force.of(force, gate)
    target = table.import_target()
    require_expiry(target.codec, expires)
    if gate is not None:
        gate.require_fits(target.codec.schema_of(None))
    known = None if import_id is None else added_before(target.store, import_id)
    if known is not None and known.added is not None:
        return known.added
    place = None if staging is None else staging_place(staging, options)
    found = timed_rows(target.codec, rows, expires)
    how = (on_conflict, duplicates, place, import_id, gate, forced)
    return _import_timed(target, found, *how)[1]


def import_files(
    table: Table,
    paths: Iterable[Path],
    on_conflict: OnConflict,
    duplicates: Duplicates,
    *,
    expires: str | None = None,
    progress: Callable[[Iterator[TimedRows]], Iterator[TimedRows]] = iter,
    reads: FileReads = PLAIN_READS,
    staging: Staging | None = None,
    gate: Gate | None = None,
    force: Force | None = None,
) -> tuple[Manifest, Timestamp]:
    """Import the rows of files into a table, as `import_table`.

    `expires` names a column of each file that is no column of the table: the time at which the row
    is deleted, with its index entries. A time that has passed deletes the row right after the
    import. Raises `UsageError` that names file, column and row. Nothing is added then.
    """
    target = table.import_target()
    require_expiry(target.codec, expires)
    place = None if staging is None else staging_place(staging)
    rows = progress(file_batches(target.codec, paths, expires, reads))
    return _import_timed(target, rows, on_conflict, duplicates, place, None, gate, force)


def _import_timed(
    target: ImportTarget,
    rows: Iterable[TimedRows],
    on_conflict: OnConflict,
    duplicates: Duplicates,
    staging: Path | BucketUrl | None,
    import_id: int | None = None,
    gate: Gate | None = None,
    force: Force | None = None,
) -> tuple[Manifest, Timestamp]:
    codec = target.codec
    return import_rows(
        target.store,
        (stored for batch, dues in rows for stored in stored_batches(codec, batch, dues)),
        on_conflict,
        duplicates,
        name_of=lambda key: key_text(codec, key),
        check=target.check,
        tables=[EncodedBy.of(codec)],
        staging=staging,
        import_id=import_id,
        gate=gate,
        force=force,
    )


def timed_rows(codec: TableCodec, rows: object, expires: str | None) -> Iterator[TimedRows]:
    """Rows in Arrow, with the columns of a table, and the times in their column `expires`. Raises
    `UsageError` that names column and row."""
    first = 0
    for batch in record_batches(rows):
        dues, given = None, batch
        if expires is not None:
            if expires not in batch.schema.names:
                named = ", ".join(batch.schema.names)
                raise UsageError(f"the rows have no column {expires!r}", f"they have {named}")
            dues = due_column(batch.column(expires), expires, first)
            given = batch.drop_columns([expires])
        yield TimedRows(conform(codec.definition, given, first), dues)
        first += batch.num_rows


def file_batches(
    codec: TableCodec,
    paths: Iterable[Path],
    expires: str | None = None,
    reads: FileReads = PLAIN_READS,
) -> Iterator[TimedRows]:
    """The rows of files, with the columns of a table, and the times in their column `expires`.
    Raises `UsageError`."""
    definition = codec.definition
    defaults = {
        column.name: default_value(column)
        for column in definition.columns
        if column.default is not None
    }
    reads = reads._replace(missing=defaults)
    for path in paths:
        first = first_row(path, reads)
        for batch in typed_batches(path, definition.schema, reads):
            dues = None
            if expires is not None:
                dues = due_times(batch, expires, path, first)
                batch = batch.drop_columns([expires])  # the rest are its rows
            try:
                yield TimedRows(conform(definition, batch, first), dues)
            except UsageError as error:
                raise error.at(f"{path}: ") from None
            first += batch.num_rows
