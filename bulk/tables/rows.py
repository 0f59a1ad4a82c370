"""Rows of a table as an import: the rows, and their entries in every index.

Invariants
1. The rows are added only while the definition that encoded them is the newest: the commit looks
   under its lock. So a new index misses no row.
2. An import brings the entries of its rows. Entries of the rows that it replaces stay behind as
   hints that no row fits. With `on_conflict="error"` they count as live keys, until
   `Table.tidy` has deleted them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from bulk.definitions import EncodedBy
from bulk.files import due_times, typed_batches
from bulk.loading import import_rows
from bulk.manifest import Manifest
from bulk.progress import Reading
from bulk.remote import OnConflict
from bulk.sort import Duplicates
from kvstore.arrow import rows_schema
from kvstore.errors import UsageError, printable
from kvstore.tables import Table, TableCodec
from kvstore.tables.conform import conform
from kvstore.timestamp import Timestamp


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
    reading: Reading | None = None,
) -> tuple[Manifest, Timestamp]:
    """Import the rows of files into a table of a store, at one time.

    `expires` names a column of each file that is no column of the table: the time at which the row
    is deleted, with its index entries. A time that has passed deletes the row right after the
    import. Raises `UsageError` that names file, column and row; `TableAlteredError` if the table
    was altered meanwhile. Nothing is added then.
    """
    target = table.import_target()
    codec = target.codec
    rows = progress(file_batches(codec, paths, expires, reading))
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
    reading: Reading | None = None,
) -> Iterator[TimedRows]:
    """The rows of files, with the columns of a table, and the times in their column `expires`.
    Raises `UsageError`."""
    definition = codec.definition
    for path in paths:
        first = 0
        for batch in typed_batches(path, definition.schema, reading):
            dues = None
            if expires is not None:
                dues = due_times(batch, expires, path)
                batch = batch.drop_columns([expires])  # the rest are its rows
            try:
                yield TimedRows(conform(definition, batch, first), dues)
            except UsageError as error:
                raise UsageError(f"{path}: {error.what}", error.remedy) from None
            first += batch.num_rows


def stored_batches(
    codec: TableCodec, batch: pa.RecordBatch, dues: pa.Array | None = None
) -> Iterator[pa.RecordBatch]:
    """Keys and values of the rows of a batch, and of their entries in each index. With `dues` they
    have the times at which the rows expire, and each entry the key of the row with which it
    does."""
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
    values = zip(codec.key.columns, codec.key.values(key), strict=True)
    named = (f"{column.name}={value!r:.100}" for column, value in values)
    return f"{', '.join(named)} of {codec.definition.where}"
