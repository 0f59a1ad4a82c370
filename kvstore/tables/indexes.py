"""Indexes: rows found by an entry, entries made for rows that were there before, entries that no
row fits any more, and entries that are destroyed with their rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, islice
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.errors import TableAlteredError, UsageError
from kvstore.limits import ARROW_BYTES_MAX, CLEAR_SPANS_MAX, INDEX_CHUNK_ROWS, SCAN_CHUNK
from kvstore.mvcc.arrow import binary_array
from kvstore.mvcc.meta import Meta
from kvstore.retention.clear import Clearing
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.definition import Definition, Index, progress_prefix, table_prefix
from kvstore.tables.exact import as_python
from kvstore.tables.row_codec import TableCodec, UnknownLayoutError
from kvstore.tables.sources import (
    GetMany,
    Passing,
    RowChange,
    RowSource,
    StoreRows,
    TransactionRows,
    not_unique,
    value_part,
)
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.parts import Parts

# --------------------------------------------------------------------------------------------------
# Rows by an index. An entry is a hint, and the row decides.
#
# An entry leads to the row of its key at the same time. The row is found only if its own entry has
# the same bytes. So entries that were left behind find nothing at any time.

FIRST_ENTRIES: Final = 128
"""Entries of the first piece: many look-ups by an index find fewer rows."""

_FIRST_ROWS: Final = 16
"""Rows of the first batch: nothing tells yet how large they are."""


def whole_index(codec: TableCodec, name: object) -> Index:
    """The index `name`. Raises `UsageError` where there is none, or its entries are not all
    there."""
    index = codec.definition.index(name)
    if not index.is_whole:
        raise UsageError(
            f"{codec.definition.where}: index {index.name!r} is not whole at that time",
            "run table.build_index, or scan",
        )
    return index


def index_span(codec: TableCodec, index: Index, values: Sequence[Any]) -> Span:
    """The entries of an index that begin with these values."""
    if len(values) > len(index.parts):
        names = ", ".join(codec.definition.parts_named(index.parts))
        raise UsageError(
            f"{codec.definition.where}, index {index.name!r}: {len(values)} values",
            f"its columns are {names}",
        )
    return Span.of_prefix(codec.index_codec(index).key(values))


def found_batches(
    codec: TableCodec,
    reader: RowSource,
    index: Index,
    span: Span,
    *,
    columns: Sequence[str] | None,
    reverse: bool,
    limit: int | None,
) -> Iterator[pa.RecordBatch]:
    """The rows with entries in a span of an index, in the order of the index. A batch has at most
    `SCAN_CHUNK` rows, at most twice as many as the one before, and so few that rows as large as
    those before take half of `ARROW_BYTES_MAX`."""
    missing, count = limit, _FIRST_ROWS
    for batch in reader.batches(span, None, reverse=reverse, limit=None):
        taken = 0
        while taken < batch.num_rows:
            entries = batch.column(0).slice(taken, count)
            taken += len(entries)
            found, fits = fitting(codec, reader.get_many, index, entries)
            count = _next_count(count, len(entries), found.nbytes)
            rows = _fit(found, fits)
            if columns is not None:
                rows = rows.select(list(columns))
            codec.require_texts(rows)
            if missing is not None:
                rows = rows.slice(0, missing)
                missing -= rows.num_rows
            if rows.num_rows:
                yield rows
            if missing == 0:
                return


def found_dicts(
    codec: TableCodec,
    reader: RowSource,
    index: Index,
    span: Span,
    *,
    columns: Sequence[str] | None,
    reverse: bool,
    limit: int | None,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of `found_batches` as dicts, in pieces. Costs a look-up and 1 us a row."""
    indexed = codec.definition.parts_named(index.parts)
    wanted = None if columns is None else tuple(dict.fromkeys((*columns, *indexed)))
    extra = () if columns is None else [name for name in indexed if name not in columns]
    entries = map(itemgetter(0), reader.pairs(span, reverse=reverse))
    count = FIRST_ENTRIES
    while limit != 0 and (
        found := list(islice(entries, count if limit is None else min(count, limit)))
    ):
        keys = codec.row_keys(index, found)
        values = reader.get_many(keys)
        count = _next_count(count, len(keys), sum(map(len, filter(None, values))))
        rows = codec.to_dicts(keys, values, wanted)
        fits = codec.fits(index, found, rows)
        whole = list(compress(rows, fits))
        for name in extra:
            for row in whole:
                del row[name]
        yield whole
        if limit is not None:
            limit -= len(whole)


def _next_count(count: int, taken: int, size: int) -> int:
    """How many entries to take behind `taken` ones that led to `size` bytes of rows: so many that
    their rows have about half of `ARROW_BYTES_MAX`, and at most twice as many as `count`, because
    the next rows may be larger."""
    fitting = taken * ARROW_BYTES_MAX // (2 * max(size, 1))
    return max(min(fitting, 2 * count, SCAN_CHUNK), 1)


def _fit(batch: pa.RecordBatch, fits: list[bool | None]) -> pa.RecordBatch:
    if len(fits) == batch.num_rows and all(fits):
        return batch
    return batch.filter(pa.array((found for found in fits if found is not None), pa.bool_()))


def fitting(
    codec: TableCodec, get_many: GetMany, index: Index, entries: pa.Array
) -> tuple[pa.RecordBatch, list[bool | None]]:
    """The rows that entries lead to, and of each entry whether its row fits it; None where there is
    no row. A row may hold what its columns do not: see `TableCodec.decode`."""
    found = entries.to_pylist()
    ends = codec.index_codec(index).part_ends(entries, len(index.parts))
    keys = [codec.key.prefix + entry[end:] for entry, end in zip(found, ends, strict=True)]
    values = get_many(keys)
    alive = [at for at, value in enumerate(values) if value is not None]
    batch = codec.decode(
        pa.array([keys[at] for at in alive], pa.binary()),
        pa.array([values[at] for at in alive], pa.binary()),
        is_checked=False,
    )
    again = codec.entries(index, batch).to_pylist()
    fits: list[bool | None] = [None] * len(found)
    for at, entry in zip(alive, again, strict=True):
        fits[at] = found[at] == entry
    return batch, fits


# --------------------------------------------------------------------------------------------------
# Indexes of tables that have rows: their entries are made while the table is in use.
#
# A new index is not whole. From the alteration that adds it on, each commit of a row makes the
# row's entry. The builder writes a note that it begins. It makes the entries of the rows that are
# there, chunk by chunk in key order, and notes in the same commit how far it came. When all are
# there, the index becomes whole, from that time on.
#
# A revert of an import brings back rows that no reader of the newest state sees. The builder makes
# the entries of these rows too.
#
# Invariants
# 1. After a kill the next builder begins behind the last commit; at the first row where `since` has
#    passed the first note, because GC may have removed imports that were reverted meanwhile.
# 2. When the index is whole, each row that a revert may bring back has its entry.
# 3. A unique index becomes whole only if no two rows have the same values. Writers that come later
#    find all entries.


def build_index(
    rows: StoreRows, name: str, index_name: str, progress: Callable[[int], None] | None
) -> Timestamp | None:
    """Make all entries of an index. See `Table.build_index`."""
    index = rows.codec(name).definition.index(index_name)
    if index.is_whole:
        return None
    note = progress_prefix(name) + bytes([index.number])
    while not _build(rows, name, index_name, note, progress):
        rows.write_blind(name, lambda *_: RowChange(gone=[note]))
        rows.write_blind(name, lambda *_: RowChange([note], [b""]))
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
    rows: StoreRows, held: RowSource, name: str, index_name: str, note: bytes, after: bytes
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

    def make(newest: TableCodec, _: RowSource) -> RowChange:
        newest.definition.index(index_name)  # raises if it was dropped meanwhile
        return change

    rows.write_blind(name, make)
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
                newest: TableCodec, _: RowSource, covered: list[tuple[bytes, bytes]] = covered
            ) -> RowChange:
                index = newest.definition.index(index_name)  # raises if it was dropped meanwhile
                at = newest.definition.indexes.index(index)
                found = (newest.entries_of(*each)[at : at + 1] for each in covered)
                entries = [entry for each in found for entry in each]
                return RowChange(entries, [b""] * len(entries))

            rows.write_blind(name, make)


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
        return rows.write_blind(name, lambda *_: RowChange(gone=[note]))


def require_distinct(codec: TableCodec, held: RowSource, index: Index) -> None:
    """Raise `NotUniqueError` if two rows have the same values in an index. One pass over it."""
    columns = codec.definition.parts_named(index.parts)
    span = Span.of_prefix(codec.index_codec(index).prefix)
    before, holder = b"", b""
    for batch in held.batches(span, None, reverse=False, limit=None):
        entries = batch.column(0)
        keys = codec.row_keys(index, entries.to_pylist())
        rows, fits = fitting(codec, held.get_many, index, entries)
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


# --------------------------------------------------------------------------------------------------
# Entries of indexes that no row fits any more: imports leave them behind, and GC deletes them.
#
#     tables-tidied := timestamp     entries that imports up to here left behind are gone
#                      due, place    of a walk that has not ended: the last import, the last entry
#
# Invariants
# 1. An entry is deleted only if no kept version of its row fits it: a revert of an import brings an
#    older version back, which needs its entry.
# 2. The deletion reads the row in its transaction, so that nobody sets or reverts the row
#    meanwhile.
# 3. A walk looks at `INDEX_CHUNK_ROWS` entries at once. After a kill the next walk continues there.

_TIDIED: Final = "tables-tidied"


class Tidying:
    """Deletes the index entries that no row of a store fits."""

    def __init__(
        self, parts: Parts, transact: Callable[[Callable[[Any], int]], int], catalogue: Catalogue
    ) -> None:
        self._versions, self._imports = parts.versions, parts.imports
        self._committer = parts.committer
        self._meta = Meta(parts.versions.engine)
        self._transact, self._catalogue = transact, catalogue

    def run(self, since: int, require_running: Callable[[], None] = lambda: None) -> int:
        """Delete the entries that imports left behind, if they were added up to `since` and can no
        longer be reverted; returns the number of entries. `require_running` raises to end the walk.

        Nothing to do costs a look at each import. Otherwise a look-up for each entry of the tables
        that were imported into.
        """
        if self._committer.policy.commits is not None:  # a replica gets the deletions
            return 0
        noted: Mapping[str, Any] = self._meta.read(_TIDIED) or {}
        mark = int(noted.get("timestamp", 0))
        records = [
            record
            for record in self._imports.every()
            if record.added is not None and mark < record.added <= since
        ]
        names = self._catalogue.names() if records else []
        codecs = [self._catalogue.codec(name) for name in names]
        spans = [span for record in records for span in record.spans]
        reached = [codec for codec in codecs if codec.definition.indexes and _meets(codec, spans)]
        if not reached:
            return 0
        due = max(record.added or 0 for record in records)
        place = bytes.fromhex(noted["place"]) if noted.get("due") == due else b""
        deleted = 0
        for codec in sorted(reached, key=lambda codec: codec.key.prefix):
            for index in sorted(codec.definition.indexes, key=lambda index: index.number):
                after = max(place, codec.index_codec(index).prefix)

                def note(last: bytes) -> None:
                    self._note({"timestamp": mark, "due": due, "place": last.hex()})
                    require_running()

                deleted += self.index(codec, index, after, note)
        self._note({"timestamp": due})
        return deleted

    def table(self, name: str) -> int:
        """Delete the entries of a table that no kept version of a row fits; see `Table.tidy`."""
        codec = self._catalogue.codec(name)
        return sum(
            self.index(codec, index, codec.index_codec(index).prefix, lambda _: None)
            for index in codec.definition.indexes
        )

    def index(
        self, codec: TableCodec, index: Index, after: bytes, note: Callable[[bytes], None]
    ) -> int:
        """Delete the entries of an index from `after` on. `note` is called with the end of each
        chunk."""
        end = Span.of_prefix(codec.index_codec(index).prefix).end
        deleted = 0
        while end is None or after < end:
            at = self._committer.upper - 1
            entries = self._entries(Span(after, end), at)
            if not entries:
                break
            read = partial(self._versions.get_many, as_of=at)
            _, fits = fitting(codec, read, index, binary_array(entries))
            suspects = [entry for entry, each in zip(entries, fits, strict=True) if not each]
            if suspects:
                deleted += self._delete(codec.definition.name, index, suspects)
            after = entries[-1] + b"\x00"
            note(after)
        return deleted

    def _entries(self, span: Span, at: int) -> list[bytes]:
        chunks = self._versions.scan(span, at, limit=INDEX_CHUNK_ROWS)
        return list(islice((key for keys, _ in chunks for key in keys), INDEX_CHUNK_ROWS))

    def _delete(self, name: str, index: Index, entries: Sequence[bytes]) -> int:
        """Delete each of `entries` that no kept version of its row fits."""

        def body(transaction: Any) -> int:
            codec = TransactionRows(transaction, self._catalogue).codec(name)
            if index not in codec.definition.indexes:
                return 0
            ends = codec.index_codec(index).part_ends(binary_array(entries), len(index.parts))
            stale = []
            for entry, end in zip(entries, ends, strict=True):
                key = codec.key.prefix + entry[end:]
                transaction.get(key)  # counts as read
                if not self._fits_once(codec, index, key, entry):
                    stale.append(entry)
            transaction.delete_rows(stale)
            return len(stale)

        return self._transact(body)

    def _fits_once(self, codec: TableCodec, index: Index, key: bytes, entry: bytes) -> bool:
        since = self._committer.since
        for _, at, value in self._versions.history(key):
            if value is not None and entry in codec.entries_of(key, value):
                return True
            if at <= since:  # older versions are garbage
                break
        return False

    def _note(self, fields: dict[str, Any]) -> None:
        with self._committer.lock:
            self._committer.write_meta(
                lambda batch: self._meta.stage(batch, _TIDIED, fields), durable=False
            )


def _meets(codec: TableCodec, spans: Iterable[Span]) -> bool:
    whole = Span.of_prefix(table_prefix(codec.definition.number))
    return any(span.intersect(whole.start, whole.end) is not None for span in spans)


# --------------------------------------------------------------------------------------------------
# Rows that are destroyed: the spans of their keys, and of each entry that leads to one of them.
#
# Invariants
# 1. Each stored version of a chosen row goes, and each entry of any index that leads to the row,
#    deleted ones and those of dropped indexes included: entries have values of columns. The entries
#    are found by a pass over them, because GC may have removed the version that made one.
# 2. No entry of another row goes. So neighbours are one span only if nothing is stored between
#    them, and no commit writes into the table between the pass and the clear.


def clear_rows(
    rows: StoreRows,
    name: str,
    span: Callable[[TableCodec], Span],
    where: Passing | None,
    *,
    compact: bool,
) -> Timestamp:
    """Destroy the rows of a span, or of those the ones that pass `where` at any kept time. See
    `Table.clear`."""
    rows.parts.committer.require_commits()
    clearing, catalogue = Clearing(rows.parts), rows.catalogue
    catalogue.forget(name)
    codec = catalogue.codec(name)
    within, number = span(codec), codec.definition.number
    whole = Span.of_prefix(table_prefix(number))
    if where is None and within == Span.of_prefix(codec.key.prefix):
        return clearing.clear(whole, compact=compact)
    groups: list[list[Span]] = []

    def find() -> list[Span]:
        catalogue.forget(name)
        indexes = catalogue.indexes_of(name, number)
        chosen = [within] if where is None else _rows_passing(rows, name, within, where)
        groups[:] = [chosen]
        for each, index in indexes.values():
            groups.append(_entries_leading(rows, each, index, chosen))
        found = [each for group in groups for each in group]
        if len(found) > CLEAR_SPANS_MAX:
            raise UsageError(
                f"{codec.definition.where}: these rows and their entries are {len(found)} spans of "
                f"keys, and one clear takes {CLEAR_SPANS_MAX}",
                "clear fewer rows at once, with a call of gc in between; or all rows",
            )
        return sorted(found, key=lambda each: each.start)

    at = clearing.clear_found(whole, find)
    if compact:
        for group in filter(None, groups):
            clearing.compact(Span(group[0].start, group[-1].end))
    return at


def _rows_passing(rows: StoreRows, name: str, within: Span, where: Passing) -> list[Span]:
    """Spans of the rows of which a kept version passes a filter."""
    codec = rows.catalogue.codec(name)

    def marked() -> Iterator[tuple[bytes, bool]]:
        kept = rows.parts.versions.kept(within, keys_only=False)
        while piece := list(islice(kept, INDEX_CHUNK_ROWS)):
            keys = [key for key, values in piece for _ in values]
            values = [value for _, values in piece for value in values]
            try:
                passing = {keys[place] for place in where(codec, keys, values)} if keys else set()
            except UnknownLayoutError:
                raise TableAlteredError(name) from None
            yield from ((key, key in passing) for key, _ in piece)

    return _runs(marked())


def _entries_leading(
    rows: StoreRows, codec: TableCodec, index: Index, chosen: Sequence[Span]
) -> list[Span]:
    """Spans of the entries of an index that lead to rows of ascending spans."""
    span, starts = Span.of_prefix(codec.index_codec(index).prefix), [each.start for each in chosen]

    def marked() -> Iterator[tuple[bytes, bool]]:
        kept = rows.parts.versions.kept(span, keys_only=True)
        while entries := [key for key, _ in islice(kept, INDEX_CHUNK_ROWS)]:
            for entry, row in zip(entries, codec.row_keys(index, entries), strict=True):
                at = bisect_right(starts, row) - 1
                yield entry, at >= 0 and row in chosen[at]

    return _runs(marked())


def _runs(marked: Iterable[tuple[bytes, bool]]) -> list[Span]:
    """Spans of the marked keys of an ascending pass; no other key of the pass lies in one."""
    spans: list[Span] = []
    first = last = None
    for key, is_marked in marked:
        if is_marked:
            first, last = first or key, key
        elif first is not None and last is not None:
            spans.append(Span(first, last + b"\x00"))
            first = None
    if first is not None and last is not None:
        spans.append(Span(first, last + b"\x00"))
    return spans
