"""Rows that come in any order, as one import of a store: sorted, staged beside its files, added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from bulk.definitions import EncodedBy
from bulk.ingest import ingest, staging_beside
from bulk.manifest import Manifest
from bulk.remote import OnConflict
from bulk.sort import Duplicates, sorted_batches
from bulk.staged import Import
from kvstore.errors import KeyOrderError, NotUniqueError, TableAlteredError, UsageError, printable
from kvstore.store import Store
from kvstore.timestamp import Timestamp


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
