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

import pyarrow as pa

from bulk.definitions import EncodedBy
from bulk.files import typed_batches
from bulk.loading import import_rows
from bulk.manifest import Manifest
from bulk.remote import OnConflict
from bulk.sort import Duplicates
from kvstore.arrow import rows_schema
from kvstore.errors import UsageError, printable
from kvstore.tables import Table, TableCodec
from kvstore.tables.conform import conform
from kvstore.timestamp import Timestamp


def import_files(
    table: Table,
    paths: Iterable[Path],
    on_conflict: OnConflict,
    duplicates: Duplicates,
    *,
    progress: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = iter,
) -> tuple[Manifest, Timestamp]:
    """Import the rows of files into a table of a store, at one time.

    Raises `UsageError` that names file, column and row; `TableAlteredError` if the table was
    altered meanwhile. Nothing is added then.
    """
    target = table.import_target()
    codec = target.codec
    rows = progress(file_batches(codec, paths))
    return import_rows(
        target.store,
        (stored for batch in rows for stored in stored_batches(codec, batch)),
        on_conflict,
        duplicates,
        name_of=lambda key: key_text(codec, key),
        check=target.check,
        tables=[EncodedBy.of(codec)],
    )


def file_batches(codec: TableCodec, paths: Iterable[Path]) -> Iterator[pa.RecordBatch]:
    """The rows of files, with the columns of a table. Raises `UsageError`."""
    definition = codec.definition
    for path in paths:
        first = 0
        for batch in typed_batches(path, definition.schema):
            try:
                yield conform(definition, batch, first)
            except UsageError as error:
                raise UsageError(f"{path}: {error.what}", error.remedy) from None
            first += batch.num_rows


def stored_batches(codec: TableCodec, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Keys and values of the rows of a batch, and of their entries in each index."""
    yield pa.RecordBatch.from_arrays(list(codec.encode(batch)), schema=rows_schema())
    for index in codec.definition.indexes:
        entries = codec.entries(index, batch)
        empty = pa.repeat(pa.scalar(b"", pa.binary()), len(entries))
        yield pa.RecordBatch.from_arrays([entries, empty], schema=rows_schema())


def key_text(codec: TableCodec, key: bytes) -> str:
    """A key of a row as its columns, for errors."""
    if not key.startswith(codec.key.prefix):
        return printable(key)
    values = zip(codec.key.columns, codec.key.values(key), strict=True)
    named = (f"{column.name}={value!r:.100}" for column, value in values)
    return f"{', '.join(named)} of {codec.definition.where}"
