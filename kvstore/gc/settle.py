"""Settling: old small imports become plain versions, and their records go.

    before   framed key | import id | kind     and a record that gives the id its time
    after    framed key | suffix of that time | kind

A store that takes an import every ten seconds takes three million in a year. Each record costs
memory, opening, and every read that meets a row, so records are kept for recent imports and for
large ones, whose number the data bounds.

Invariants
1. An import settles if it was added at or below `since`, and stands. No window of changes begins
   before it, its change entries are trimmed, it cannot be reverted, and its garbage is gone.
2. One engine batch writes a row in its new form and removes the old one. Both forms give the row
   the same time, so every reader sees the row once and alike, whichever batch the reader saw last.
3. The record goes in the batch of the last rows or later, and leaves the view of readers after
   that. A reader that holds an older view knows both forms; one that takes the new view reads
   entries afterwards, and meets only plain versions.
4. A crash leaves an import of which some rows have settled. The next run continues with the others.
5. A clear between reading and writing a row takes the row: nothing that was cleared comes back.

An import with a key list costs its rows. Small imports without one, whose keys are
long, share one pass over their spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvstore.clears import Clear
from kvstore.codec.keys import TAIL_BYTES, encode_suffix, span_bounds
from kvstore.engine.api import DATA, WriteBatch, chunks
from kvstore.imports import ImportRecord
from kvstore.limits import SCAN_CHUNK_BYTES, SETTLE_STEP_ROWS
from kvstore.mvcc.imported import imported_entries
from kvstore.parts import Parts
from kvstore.span import merge_spans


class _Row(NamedTuple):
    """A stored row of an import, its key as a plain version, and its value."""

    stored: bytes
    plain: bytes
    value: bytes


class Settled(NamedTuple):
    """The work of a batch: the stored keys that it replaced, and the imports that it made past."""

    stored: list[bytes]
    imports: int


class Settling:
    """Lets the old small imports of one store settle. One run works at a time."""

    def __init__(self, parts: Parts) -> None:
        self._imports, self._clears = parts.imports, parts.clears
        self._engine = parts.versions.engine
        self._committer = parts.committer

    def run(self, since: int) -> Iterator[Settled]:
        """Let imports settle that were added at or below `since`; yields after each batch."""
        clears = self._clears.all()
        rows: list[_Row] = []
        done: list[ImportRecord] = []
        size = 0
        for piece in self._pieces(since):
            if isinstance(piece, ImportRecord):
                done.append(piece)
            else:
                rows.append(piece)
                size += len(piece.value)
            if len(rows) + len(done) >= SETTLE_STEP_ROWS or size > SCAN_CHUNK_BYTES:
                yield self._write(rows, done, clears)
                rows, done, size = [], [], 0
        if rows or done:
            yield self._write(rows, done, clears)

    def _pieces(self, since: int) -> Iterator[_Row | ImportRecord]:
        """The rows that settle, and each import after its last row."""
        unlisted: list[ImportRecord] = []
        for record in self._imports.every():
            if record.settles(since):
                keys = self._imports.keys_of(record) if record.spans else []
                if keys is None:
                    unlisted.append(record)
                else:
                    yield from self._listed(record, keys)
        yield from chain(self._swept(unlisted), unlisted)

    def _listed(self, record: ImportRecord, keys: list[bytes]) -> Iterator[_Row | ImportRecord]:
        """The rows of an import and itself. One look-up a key."""
        suffix = _suffix_of(record)
        for found in imported_entries(
            self._engine, keys, record.reference, rows_max=SETTLE_STEP_ROWS
        ):
            for row in found:
                yield _settled(row.stored, suffix, row.value)
        yield record

    def _swept(self, records: list[ImportRecord]) -> Iterator[_Row]:
        """The rows of imports. One pass over all their spans."""
        suffixes = {record.reference: _suffix_of(record) for record in records}
        for span in merge_spans(span for record in records for span in record.spans):
            cursor = self._engine.cursor(DATA, *span_bounds(span.start, span.end))
            for keys, values in chunks(cursor):
                for stored, value in zip(keys, values, strict=True):
                    suffix = suffixes.get(stored[-TAIL_BYTES:-1])
                    if suffix is not None:
                        yield _settled(stored, suffix, value)

    def _write(
        self, rows: list[_Row], done: list[ImportRecord], clears: tuple[Clear, ...]
    ) -> Settled:
        """Write one batch. `clears` are the clears that were known before its rows were read."""

        def stage(batch: WriteBatch) -> None:
            data = self._engine.families[DATA]
            for row in rows:
                batch.put(row.plain, row.value, data)
                batch.delete(row.stored, data)

        with self._committer.lock:
            if self._clears.all() is not clears:
                rows = [row for row in rows if self._engine.get(DATA, row.stored) is not None]
            self._imports.retire(done, stage)
        return Settled([row.stored for row in rows], len(done))


def _suffix_of(record: ImportRecord) -> bytes:
    assert record.added is not None
    return encode_suffix(record.added)


def _settled(stored: bytes, suffix: bytes, value: bytes) -> _Row:
    return _Row(stored, stored[:-TAIL_BYTES] + suffix + stored[-1:], value)
