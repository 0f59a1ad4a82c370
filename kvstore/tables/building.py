"""Indexes of tables that have rows: their entries are made while the table is in use.

A new index is not whole. From the alteration that adds it on, each commit of a row makes the row's
entry. The builder writes a note that it begins. It makes the entries of the rows that are there,
chunk by chunk in key order, and notes in the same commit how far it came. When all are there, the
index becomes whole, from that time on.

A revert of an import brings back rows that no reader of the newest state sees. The builder makes
the entries of these rows too.

Invariants
1. After a kill the next builder begins behind the last commit; at the first row where `since` has
   passed the first note, because GC may have removed imports that were reverted meanwhile.
2. When the index is whole, each row that a revert may bring back has its entry.
3. A unique index becomes whole only if no two rows have the same values. Writers that come later
   find all entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from kvstore.errors import TableAlteredError
from kvstore.imports import ImportRecord
from kvstore.limits import INDEX_CHUNK_ROWS
from kvstore.span import RESERVED, Span
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Definition, Index
from kvstore.tables.exact import as_python
from kvstore.tables.finding import fitting
from kvstore.tables.sources import RowChange, RowReader, StoreRows
from kvstore.tables.writing import not_unique, value_part
from kvstore.timestamp import Timestamp

_PROGRESS = RESERVED + b"\x00kvstore.tables.progress\x00"


def build_index(
    rows: StoreRows, name: str, index_name: str, progress: Callable[[int], None] | None
) -> Timestamp | None:
    """Make all entries of an index. See `Table.build_index`."""
    index = rows.codec(name).definition.index(index_name)
    if index.is_whole:
        return None
    note = _PROGRESS + name.encode() + b"\x00" + bytes([index.number])
    while not _build(rows, name, index_name, note, progress):
        rows.write(name, lambda *_: RowChange(gone=[note]), is_checked=False)
        rows.write(name, lambda *_: RowChange([note], [b""]), is_checked=False)
    return _finish(rows, name, index_name, note)


def _build(
    rows: StoreRows,
    name: str,
    index_name: str,
    note: bytes,
    progress: Callable[[int], None] | None,
) -> bool:
    """Make all entries, from the place on at which an earlier builder was killed. False, with
    nothing done, where no builder has begun, or GC may have removed imports that hid rows from it.
    """
    done = 0
    with rows.held(None) as held:
        since, records = rows.parts.committer.since, rows.parts.imports.every()
        if _begun_at(rows, note) <= since:
            return False
        # With the reverted ones: a later import may cover the rows that their reverts brought back.
        imports = [each for each in records if (each.reverted or each.added or 0) > since]
        after = rows.get(note) or b""
        while not rows.codec(name).definition.index(index_name).is_whole:
            count, after = _chunk(rows, held, name, index_name, note, after)
            if not count:
                break
            done += count
            if progress is not None:
                progress(done)
        _cover_reverts(rows, name, index_name, imports)
    return True


def _begun_at(rows: StoreRows, note: bytes) -> int:
    """The time at which the builder began whose note is there, 0 where there is none."""
    begun = 0
    for _, at, value in rows.parts.versions.history(note):
        if value is None:
            break
        begun = int(at)
    return begun


def _chunk(
    rows: StoreRows, held: RowReader, name: str, index_name: str, note: bytes, after: bytes
) -> tuple[int, bytes]:
    """Make the entries of the next rows; returns their number, and the key of the last."""
    codec = rows.codec(name)
    whole = Span.of_prefix(codec.key.prefix)
    span = Span(max(whole.start, after), whole.end)
    keys: list[bytes] = []
    entries: list[bytes] = []
    index = codec.definition.index(index_name)
    for batch in held.batches(span, None, reverse=False, limit=INDEX_CHUNK_ROWS):
        keys += batch.column(0).to_pylist()
        decoded = codec.decode(batch.column(0), batch.column(1))
        entries += codec.entries(index, decoded).to_pylist()
    if not keys:
        return 0, after
    after = keys[-1] + b"\x00"
    change = RowChange([*entries, note], [b""] * len(entries) + [after])

    def make(newest: TableCodec, _: RowReader) -> RowChange:
        newest.definition.index(index_name)  # raises if it was dropped meanwhile
        return change

    rows.write(name, make, is_checked=False)
    return len(keys), after


def _cover_reverts(
    rows: StoreRows, name: str, index_name: str, imports: list[ImportRecord]
) -> None:
    """Make the entries of the rows that `imports` cover, or covered until they were reverted: a row
    of an import that a later one covers is among them. Costs a pass over the rows that an import
    shares with the table, and a look-up for each of its keys."""
    versions, whole = rows.parts.versions, Span.of_prefix(rows.codec(name).key.prefix)
    for record in imports:
        spans = (span.intersect(whole.start, whole.end) for span in record.spans)
        found = (
            key
            for span in spans
            if span is not None
            for key, _ in versions.imported_keys(span, record.reference)
        )
        while keys := list(islice(found, INDEX_CHUNK_ROWS)):
            values = versions.get_many(keys, (record.added or 0) - 1)
            covered = [
                (key, value) for key, value in zip(keys, values, strict=True) if value is not None
            ]

            def make(
                newest: TableCodec, _: RowReader, covered: list[tuple[bytes, bytes]] = covered
            ) -> RowChange:
                index = newest.definition.index(index_name)  # raises if it was dropped meanwhile
                at = newest.definition.indexes.index(index)
                found = (newest.entries_of(*each)[at : at + 1] for each in covered)
                entries = [entry for each in found for entry in each]
                return RowChange(entries, [b""] * len(entries))

            rows.write(name, make, is_checked=False)


def _finish(rows: StoreRows, name: str, index_name: str, note: bytes) -> Timestamp | None:
    """Mark an index as whole, because all its entries are there."""
    while True:
        codec = rows.codec(name)
        index = codec.definition.index(index_name)
        if index.is_whole:
            return None
        if index.is_unique:
            with rows.held(None) as held:
                require_distinct(codec, held, index)

        def whole(definition: Definition) -> Definition:
            indexes = tuple(
                replace(each, is_whole=True) if each.name == index_name else each
                for each in definition.indexes
            )
            return replace(definition, revision=definition.revision + 1, indexes=indexes)

        try:
            rows.alter(name, whole)
        except TableAlteredError:
            continue
        return rows.write(name, lambda *_: RowChange(gone=[note]), is_checked=False)


def require_distinct(codec: TableCodec, held: RowReader, index: Index) -> None:
    """Raise `NotUniqueError` if two rows have the same values in an index. One pass over it."""
    columns = codec.definition.parts_named(index.parts)
    span = Span.of_prefix(codec.index_codec(index).prefix)
    before, holder = b"", b""
    for batch in held.batches(span, None, reverse=False, limit=None):
        entries = batch.column(0)
        keys = codec.row_keys(index, entries.to_pylist())
        rows, fits = fitting(codec, held, index, entries)
        row = -1
        for entry, key, fit in zip(entries.to_pylist(), keys, fits, strict=True):
            row += fit is not None  # the rows of entries that lead to one
            if not fit:
                continue
            values = value_part(codec, key, entry)
            is_whole = all(rows.column(name)[row].is_valid for name in columns)
            if is_whole and values == before:
                told = [as_python(rows.column(name), row) for name in columns]
                raise not_unique(codec, index, told, holder)
            before, holder = values, key
