"""A push is taken back by rows, in a store that has its rows and no record of its import.

A store that was put back from a backup has the versions that a push made, at the stamp of the push.
The revert there is an import of the store's own: each key whose value comes from the push gets the
value that it would have without it, or a delete.

Invariants
1. The result is the same as of a revert by the record: live writes that came after the push stay,
   and earlier pushes that were reverted show nothing.
2. All rows appear at one time, together with the position. A kill leaves them invisible, and the
   next look begins again.

Costs a pass over the versions of the store, and a look at the history of each key of the push. It
raises `HistoryGoneError` where the state below the push is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bulk.ingest import staging_beside
from bulk.part import PartWriter
from bulk.pushes.amended import AmendedPush
from bulk.pushes.modes import PushMode
from bulk.pushes.newer import PushStamps
from kvstore.commit import After
from kvstore.errors.system import storage_errors
from kvstore.imports import ImportRecord
from kvstore.reserve import FIRST_ROW
from kvstore.span import RESERVED, Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp


def revert_rows(
    store: Store,
    import_id: int,
    added: Timestamp,
    stamps: PushStamps,
    after: After,
    tell: Callable[[str], None],
) -> Timestamp:
    """Take the push back that was added at `added`. Returns the time.

    `import_id` is the id of the import that does so, and `after` makes the writes that belong to
    it. `stamps` are of all pushes of the store. `tell` is called between rows, and ends the work by
    an error.
    """
    imports = store.imports
    known = imports.get(import_id)
    if known is not None and known.added is None:
        imports.abort(import_id)  # its rows were made for an older state
    with (
        imports.alone(import_id, adding=True),
        store.snapshot() as snapshot,
        staging_beside(store) as directory,
    ):
        at = snapshot.as_of
        record, files = _written(store, import_id, added, at, stamps, directory, tell)
        amends = AmendedPush(store, PushMode(built_at=at), PushStamps(), tell)
        keys = imports.keys_in(record, files) if files and record.is_small else None
        record, keys, _ = amends.begin(record, keys, at, files, directory)
        imports.prepare(record, keys)
        imports.link(files)
        return imports.add(import_id, after=after, amend=amends.linked())


def _written(
    store: Store,
    import_id: int,
    added: Timestamp,
    at: Timestamp,
    stamps: PushStamps,
    directory: Path,
    tell: Callable[[str], None],
) -> tuple[ImportRecord, list[Path]]:
    """The import that takes the push back, and its file."""
    with storage_errors(str(directory)):
        directory.mkdir(parents=True)
    writer = PartWriter(directory, import_id)
    for key, value in _below(store, added, at, stamps):
        tell("revert")
        writer.put(key, value) if value is not None else writer.delete(key)
    part = writer.finish()
    digest = f"revert of {added}"
    if part is None:
        return ImportRecord(import_id, digest, 0, 0, ()), []
    span = Span(part.smallest, part.largest + b"\x00")
    record = ImportRecord(import_id, digest, part.rows, part.size_bytes, (span,))
    return record, [directory / part.name]


def _below(
    store: Store, added: Timestamp, at: Timestamp, stamps: PushStamps
) -> Iterator[tuple[bytes, bytes | None]]:
    """The keys whose values at `at` come from the push, each with its value without the push."""
    without = PushStamps(stamps.standing - {added}, stamps.passed | {added})
    for start, end in ((b"", RESERVED), (FIRST_ROW, None)):
        for change in store.changes(added - 1, added, start=start, end=end):
            if stamps.last_write(store, change.key, at).timestamp == added:
                yield change.key, without.last_write(store, change.key, at).value
