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

from bulk.definitions import EncodedBy
from bulk.encoded import key_text, stored_batches
from bulk.files import PLAIN_READS, Reads, due_times, first_row, typed_batches
from bulk.loading import import_rows
from bulk.manifest import Manifest
from bulk.remote import OnConflict
from bulk.sort import Duplicates
from kvstore.errors import UsageError
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
    reads: Reads = PLAIN_READS,
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
    reads: Reads = PLAIN_READS,
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
                raise UsageError(f"{path}: {error.what}", error.remedy) from None
            first += batch.num_rows
