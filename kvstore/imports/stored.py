"""The stored rows of an import that is not yet added: found, left out, and joined by deletes.

The files of an import were built elsewhere. A store that takes them may leave rows out, or delete
further keys at the same stamp. Both become part of the batch that adds the import.

Invariants
1. The record of an import counts the rows that it has once it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from kvstore.codec.keys import TAIL_BYTES, TOMBSTONE, VALUE, span_bounds
from kvstore.codec.ordered import frame
from kvstore.commit import Committer
from kvstore.engine.api import DATA, Engine, WriteBatch, chunks
from kvstore.imports.record import ImportRecord
from kvstore.limits import SCAN_CHUNK
from kvstore.meta import nothing
from kvstore.mvcc.imported import ImportedRow, imported_entries


class RowChanges(NamedTuple):
    """The changes to the rows of one import: the stored keys of rows that are left out, and the
    keys that it deletes beside the rows of its files."""

    left_out: Collection[bytes] = ()
    deleted: Collection[bytes] = ()

    @property
    def rows(self) -> int:
        """The number of rows that the import gains."""
        return len(self.deleted) - len(self.left_out)


UNCHANGED: Final = RowChanges()

Amend: TypeAlias = "Callable[[], RowChanges]"
"""Decides which rows of an import change. It is called under the commit lock, as the last check."""


class StoredRows:
    """The rows of imports in one engine."""

    def __init__(self, engine: Engine, committer: Committer) -> None:
        self._engine, self._committer = engine, committer

    def has(self, record: ImportRecord, key: bytes) -> bool:
        """Whether a linked import has a row for `key`. At most two look-ups."""
        stem = frame(key) + record.reference
        return any(self._engine.get(DATA, stem + kind) is not None for kind in (VALUE, TOMBSTONE))

    def among(self, record: ImportRecord, keys: Iterable[bytes]) -> Iterator[ImportedRow]:
        """The rows that a linked import has for `keys`, which ascend. A seek a key."""
        reference = record.reference
        for rows in imported_entries(self._engine, keys, reference, rows_max=SCAN_CHUNK):
            yield from rows

    def stage(self, batch: WriteBatch, record: ImportRecord, changes: RowChanges) -> None:
        """Add changes to an engine batch."""
        data = self._engine.families[DATA]
        for stored in changes.left_out:
            batch.delete(stored, data)
        for key in changes.deleted:
            batch.put(frame(key) + record.reference + TOMBSTONE, b"", data)

    def remove(self, record: ImportRecord, keys: Sequence[bytes] | None) -> None:
        """Remove all rows of an import that was not added. `keys` is its key list. Costs a pass
        over its spans without it."""
        if keys is not None:
            stems = [frame(key) + record.reference for key in keys]
            self._remove(record, [stem + kind for stem in stems for kind in (VALUE, TOMBSTONE)])
            return
        for span in record.spans:
            for found, _ in chunks(self._engine.cursor(DATA, *span_bounds(span.start, span.end))):
                own = [key for key in found if key[-TAIL_BYTES:-1] == record.reference]
                self._remove(record, own)

    def _remove(self, record: ImportRecord, stored: Sequence[bytes]) -> None:
        if stored:
            stage = partial(self.stage, record=record, changes=RowChanges(stored))
            mend = self._committer.mend_by(nothing)
            self._committer.write_meta(stage, durable=False, mend=mend)
