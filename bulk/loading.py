"""Rows that come in any order: as one import, as ordinary commits, or as rows of a table with their
index entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.building import Import
from kvstore.bulk.files import PLAIN_READS, FileReads, due_times, first_row, typed_batches
from kvstore.bulk.ingest import OnConflict, ingest, staging_beside
from kvstore.bulk.sort import Duplicates, sorted_batches
from kvstore.bulk.staging import EncodedBy, Manifest
from kvstore.errors import KeyOrderError, NotUniqueError, TableAlteredError, UsageError, printable
from kvstore.limits import APPLY_BYTES_MAX
from kvstore.mvcc.arrow import rows_schema
from kvstore.remote.control import client_of
from kvstore.store import Store
from kvstore.tables import Table, TableCodec
from kvstore.tables.codec import conform


def import_rows(
    store: Store,
    rows: Iterator[pa.RecordBatch],
    on_conflict: OnConflict,
    duplicates: Duplicates,
    *,
    name_of: Callable[[bytes], str] = printable,
    check: Callable[[], None] | None = None,
    tables: Sequence[EncodedBy] = (),
) -> tuple[Manifest, Timestamp]:
    """Sort, stage and add rows: batches of binary columns `key` and `value`.

    `name_of` names a key in errors; `check` is as in `ingest`; `tables` are the definitions that
    encoded the rows. Raises `UsageError` for a key that comes twice, unless `duplicates` is
    `"last"`.
    """
    with staging_beside(store) as directory:
        made = Import.create(directory / "staged")
        try:
            ordered = sorted_batches(rows, directory / "sorting", duplicates=duplicates)
            made.write_sorted(ordered)
            manifest = made.seal(tables=tables)
        except KeyOrderError as error:  # the rows are sorted, so a key came twice
            what = f"key {name_of(error.key)} came twice"
            remedy = "remove one row of it, or pass --duplicates last"
            raise UsageError(what, remedy) from error
        try:
            stamp = ingest(store, made.staging, on_conflict=on_conflict, move=True, check=check)
        except (
            NotUniqueError,
            TableAlteredError,
        ):  # only other rows could continue
            store.imports.abort(manifest.import_id)
            raise
    return manifest, stamp


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


def apply_rows(store: Store, rows: Iterable[pa.RecordBatch]) -> RowsApplied:
    """Put and delete the rows in their order. Column `op` has `put` or `delete`.

    The value of a delete is not read. Raises `UsageError` for another operation and for a null.
    """
    return _applied(store, _operations(rows))


def sync_rows(
    store: Store,
    rows: Iterable[pa.RecordBatch],
    span: Span,
    duplicates: Duplicates = "error",
    *,
    progress: Callable[[int], None] = lambda rows: None,
) -> RowsApplied:
    """Make `span` have exactly the rows, and write the differences alone.

    Rows come in any order; more than fit into memory are sorted on the store's disk. Costs a pass
    over the span. Raises `UsageError` for a key outside the span, for a key that comes twice,
    unless `duplicates` is `"last"`, and for no rows at all where the span has keys: they come from
    a pipe whose first command failed more often than from a wish to delete the span. Another
    writer of the span may leave a difference.
    """
    with staging_beside(store) as directory:
        directory.mkdir(parents=True)
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
    span: Span, rows: Iterator[tuple[bytes, bytes]], store: Store
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


def _applied(store: Store, operations: Iterator[_Operation]) -> RowsApplied:
    """Write the operations. The owner of the store does it for a script beside it."""
    owner = client_of(store)
    target: Any = store if owner is None else owner
    stamp: Timestamp | None = None
    puts = deletes = commits = 0
    with store.changeset() if owner is None else nullcontext():
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
    """Keys and values of the rows of a batch, and of their entries in each index. With `dues` they
    have the times at which the rows expire, and each entry has the key of the row with which it
    expires."""
    keys, values = codec.encode(batch)
    none = pa.nulls(len(keys), pa.binary())
    yield _timed(keys, values, dues, none)
    rows = none if dues is None else pc.if_else(dues.is_valid(), keys, none)
    for index in codec.definition.indexes:
        entries = codec.entries(index, batch)
        empty = pa.repeat(pa.scalar(b"", pa.binary()), len(entries))
        yield _timed(entries, empty, dues, rows)


def _timed(
    keys: pa.Array, values: pa.Array, dues: pa.Array | None, rows: pa.Array
) -> pa.RecordBatch:
    if dues is None:
        return pa.RecordBatch.from_arrays([keys, values], schema=stored_schema(expires=False))
    return pa.RecordBatch.from_arrays([keys, values, dues, rows], schema=stored_schema())


def stored_schema(*, expires: bool = True) -> pa.Schema:
    """The columns of `stored_batches`, of rows that expire or of rows that stay."""
    more = [("expires", pa.int64()), ("expires_with", pa.binary())]
    return pa.schema([*rows_schema(), *more]) if expires else rows_schema()


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


def import_files(
    table: Table,
    paths: Iterable[Path],
    on_conflict: OnConflict,
    duplicates: Duplicates,
    *,
    expires: str | None = None,
    progress: Callable[[Iterator[TimedRows]], Iterator[TimedRows]] = iter,
    reads: FileReads = PLAIN_READS,
) -> tuple[Manifest, Timestamp]:
    """Import the rows of files into a table of a store, at one time.

    `expires` names a column of each file that is no column of the table: the time at which the row
    is deleted, with its index entries. A time that has passed deletes the row right after the
    import. Raises `UsageError` that names file, column and row; `TableAlteredError` if the table
    was altered meanwhile. Nothing is added then.
    """
    target = table.import_target()
    codec = target.codec
    rows = progress(file_batches(codec, paths, expires, reads))
    return import_rows(
        target.store,
        (stored for batch, dues in rows for stored in stored_batches(codec, batch, dues)),
        on_conflict,
        duplicates,
        name_of=lambda key: key_text(codec, key),
        check=target.check,
        tables=[EncodedBy.of(codec)],
    )


def file_batches(
    codec: TableCodec,
    paths: Iterable[Path],
    expires: str | None = None,
    reads: FileReads = PLAIN_READS,
) -> Iterator[TimedRows]:
    """The rows of files, with the columns of a table, and the times in their column `expires`.
    Raises `UsageError`."""
    definition = codec.definition
    for path in paths:
        first = first_row(path)
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
