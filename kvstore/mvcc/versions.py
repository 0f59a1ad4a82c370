"""Versions over an engine: reads at any time, and the view of range tombstones that they share.

A read at a time sees exactly the versions at or below it. The commit path stages the writes
(`kvstore.mvcc.write_set`) and chooses their timestamps; `publish_ranges` shows its range
tombstones.

Invariants
1. `view` holds all range tombstones and all import stamps of the engine. A writer replaces the
   view and never changes it, so that a reader keeps a consistent one.
2. A reader takes the view first and reads entries afterwards, because a covered entry leaves the
   engine before its tombstone leaves the view.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, starmap
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvstore.base.arguments import FLAG
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.keys import (
    TAIL_BYTES,
    TERMINATOR,
    TOMBSTONE,
    VALUE,
    check_data_key,
    decode_range,
    escape,
    frame,
    require_entry,
    span_bounds,
    unframe,
)
from kvstore.engine.api import DATA, RANGES, Cursor, Engine, HeldFiles, chunks, pairs
from kvstore.limits import (
    FEW_ROWS_MAX,
    JOIN_PASS_BYTES_MAX,
    JOIN_PASS_LABELS_MIN,
    REBUILD_FRAGMENTS_FROM,
    SCAN_CHUNK,
    SCAN_CHUNK_BYTES,
)
from kvstore.loops.live import LiveRows
from kvstore.loops.lookup import Lookup, NewestValues
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.key_history import Lifetime, Revision, Stamps, StoredEntry, Version, timeline
from kvstore.mvcc.lookup import (
    EVERYTHING,
    LabelColumns,
    LiveRow,
    SearchBounds,
    TimedColumns,
    TimedValues,
    columns_at,
    columns_of_files,
    floors_at,
    following_at,
    span_of,
    value_below,
    values_among_imports,
    values_at,
    versions_at,
)
from kvstore.mvcc.parallel_scan import ThreadedScan, user_spans
from kvstore.mvcc.passes import (
    Difference,
    VersionColumns,
    differences,
    stored_keys,
    version_columns,
)
from kvstore.mvcc.scan import (
    FIRST_ROWS,
    EntryPass,
    FilePass,
    Onward,
    Read,
    RowArrays,
    RowChunk,
    few_rows,
    live_columns,
    live_rows,
)

Tombstones: TypeAlias = "list[RangeTombstone]"

_REBUILD_FACTOR = 8
"""Adding one range tombstone to the map costs as much as rebuilding the map from this number."""


class ReadView(NamedTuple):
    """The state in memory that a reader combines with the stored entries."""

    fragments: Fragments
    stamps: Stamps


class Versions:
    """Versioned keys over an engine. Knows no clock; the caller serialises the publishing."""

    def __init__(
        self, engine: Engine, *, stamps: Stamps | None = None, cache_bytes: int = 0
    ) -> None:
        """`cache_bytes` bounds the cache of newest values, which needs `newest.note` of each
        commit."""
        self.engine = engine
        self.passes = {"files": 0, "iterator": 0}
        """How many long passes have read the files themselves, and how many RocksDB's iterator."""
        self.guard: Callable[[], Callable[[], bool]] = lambda: lambda: False
        """Gives a function that tells whether no history has been removed since: see
        `kvstore.timeline.read_times.Reads.guard`. A long pass asks it before it reads files
        itself."""
        self.after_flush: Callable[[], None] = lambda: None
        """Called when a pass had the engine write what lay in memory to a small file."""
        self.newest = NewestValues(cache_bytes)
        self.lookup = Lookup(engine, self._get_slowly, self.newest)
        self.get = self.lookup.get
        """The value of a key at a time, None where it is absent or deleted. One seek."""
        stored = starmap(decode_range, pairs(engine.cursor(RANGES)))
        self._show(ReadView(Fragments.of(stored), stamps or {}))

    # -- reading ----------------------------------------------------------------------------

    def get_many(self, keys: Sequence[bytes], as_of: int) -> list[bytes | None]:
        """The values of `keys`, in the order of `keys`. The look-ups go in key order, which takes
        half the time of any other order."""
        fragments, stamps = self.view
        if stamps:
            return values_among_imports(self.engine, keys, as_of, fragments, stamps)
        return values_at(self.engine, keys, as_of, fragments)

    def get_timed(
        self, keys: list[bytes], times: Buffer, bounds: SearchBounds = EVERYTHING
    ) -> TimedValues | None:
        """The version that each of `keys` has at its own time: see `versions_at`."""
        fragments, stamps = self.view
        return versions_at(self.engine, keys, times, fragments, stamps, bounds)

    def get_columns(self, labels: LabelColumns, bounds: SearchBounds) -> TimedColumns | None:
        """The versions of labels in order: see `columns_at`. Where labels lie closely, by a pass
        over the files."""
        fragments, stamps = self.view
        held = self._held_for(labels)
        if held is None:
            return columns_at(self.engine, labels, fragments, stamps, bounds)
        try:
            return columns_of_files(held, labels, fragments, stamps, bounds)
        finally:
            held.close()

    def is_dense(self, span: Span, count: int) -> bool:
        """Whether `count` labels lie in `span` so closely that a pass over its files is faster than
        a look-up for each. A file counts whole, for its keys need not lie evenly. Costs 5 us a
        file."""
        size = sum(
            file.size_bytes
            for file in user_spans(self.engine.files())
            if file.last >= span.start and (span.end is None or file.first < span.end)
        )
        return size <= count * JOIN_PASS_BYTES_MAX

    def floors(
        self, keys: list[bytes], times: Sequence[int], span: Span, bytes_max: int = sys.maxsize
    ) -> list[LiveRow | None] | None:
        """The floor of each of `keys` at its own time: see `floors_at`."""
        fragments, stamps = self.view
        return floors_at(self.engine, keys, times, span, fragments, stamps, bytes_max)

    def following(self, keys: list[bytes], times: Buffer, upto: int) -> npt.NDArray[np.int64]:
        """The next version of each of `keys` from its own time on: see `following_at`."""
        fragments, stamps = self.view
        return following_at(self.engine, keys, times, upto, fragments, stamps)

    def history(self, key: bytes) -> list[Version]:
        """All versions of `key`, newest first, range tombstones over it included."""
        return [Version(key, Timestamp(t), value) for t, value in self.revisions(key)]

    def has_more(self, key: bytes, bytes_max: int) -> bool:
        """Whether the values of all versions of `key` have more than `bytes_max` bytes. Holds one
        value at a time."""
        left = bytes_max
        for _, value in self._entries(key):
            left -= len(value)
            if left < 0:
                return True
        return False

    def revisions(self, key: bytes) -> list[Revision]:
        """The history of `key` without the key. O(versions)."""
        fragments, stamps = self.view
        return timeline(self._entries(key), stamps, fragments.stack(key))

    def scan(
        self,
        span: Span,
        as_of: int,
        *,
        reverse: bool = False,
        limit: int | None = None,
        keys_only: bool = False,
    ) -> Iterator[RowChunk]:
        """Chunks of live keys and values at `as_of`, ascending or descending. Bounded memory. Few
        entries are read behind the first `limit` rows. With `keys_only` values may be empty.

        The first rows are read within the call, some MiB of values at most: those of a small
        `limit`, or of a small span.
        """
        FLAG.check("reverse", reverse)
        read = self._read(as_of)
        first: list[RowChunk] = []
        if not keys_only:
            few = min(FIRST_ROWS, FEW_ROWS_MAX)
            count = limit if limit is not None and limit <= FEW_ROWS_MAX else few
            bounds = span_bounds(span.start, span.end)
            keys, values, is_passed = few_rows(self.engine, bounds, read, count, reverse=reverse)
            if keys:
                first = [(keys, values)]
            if is_passed or len(keys) == limit:
                return iter(first)
            if keys:  # a key behind the last row was seen, so the rest of the span is not empty
                last = keys[-1]
                span = Span(span.start, last) if reverse else Span(last + b"\x00", span.end)
                limit = None if limit is None else limit - len(keys)
        onward = None if reverse else self._onward(span, read, keys_only=keys_only)
        cursor = self._cursor(span, reverse=reverse, keys_only=keys_only)
        return chain(first, live_rows(cursor, read, limit=limit, onward=onward))

    def scan_columns(
        self,
        span: Span,
        as_of: int,
        *,
        chunk: int,
        reverse: bool = False,
        keys_only: bool = False,
    ) -> Iterator[RowArrays]:
        """As `scan`, in Arrow arrays of at most `chunk` rows."""
        FLAG.check("reverse", reverse)
        read = self._read(as_of)
        onward = None if reverse else self._onward(span, read, keys_only=keys_only)
        cursor = self._cursor(span, reverse=reverse, keys_only=keys_only)
        return live_columns(cursor, read, chunk=chunk, onward=onward)

    def scan_by_threads(
        self, span: Span, as_of: int, *, chunk: int, threads: int
    ) -> Iterator[RowArrays]:
        """As `scan_columns`, with `threads` threads, if the pass can read the files itself."""
        read = self._read(as_of)
        held = self._held(*span_bounds(span.start, span.end), self.guard())
        if held is None:
            return live_columns(self._cursor(span), read, chunk=chunk)
        return ThreadedScan(held, span, read, chunk=chunk, threads=threads)

    def live_pass(
        self, span: Span, as_of: int, *, reverse: bool = False
    ) -> tuple[Cursor, LiveRows]:
        """A pass over `span` and the loop that picks its live rows, for a caller that counts the
        entries. The caller closes the pass."""
        read = self._read(as_of)
        return self._cursor(span, reverse=reverse), LiveRows(*read)

    def diff(
        self,
        span: Span,
        *,
        since: int,
        upto: int = TIMESTAMP_MAX,
        latest: bool = False,
    ) -> Iterator[Difference]:
        """The differences of `(since, upto]`: see `kvstore.mvcc.passes`. One pass over the
        span."""
        fragments, stamps = self.view
        return differences(
            self._entries_of_span(span),
            span,
            since=since,
            upto=upto,
            latest=latest,
            fragments=fragments,
            stamps=stamps,
        )

    def has_fewer(self, span: Span, count: int) -> bool:
        """Whether `span` has fewer than `count` entries. Reads at most `count` of them, and no
        values."""
        cursor = self._cursor(span, keys_only=True)
        try:
            while count > 0:
                keys, _ = cursor.take(min(count, SCAN_CHUNK))
                if not keys:
                    return True
                count -= len(keys)
            return False
        finally:
            cursor.close()

    def export(
        self, span: Span, *, since: int, upto: int
    ) -> tuple[Iterator[VersionColumns], Tombstones]:
        """All versions in `(since, upto]`: the point versions of the keys in `span`, as columns,
        and the range tombstones that start in `span`, by start."""
        fragments, stamps = self.view
        cursor = self._entries_of_span(span)
        columns = version_columns(
            cursor, since=since, upto=upto, stamps=stamps, fragments=fragments
        )
        tombstones = fragments.tombstones(Span(), since=since, upto=upto)
        return columns, [found for found in tombstones if found.start in span]

    def kept(self, span: Span, *, keys_only: bool) -> Iterator[tuple[bytes, list[bytes]]]:
        """Each key of `span` that has a stored version, deleted ones and those of imports that do
        not show included, with the values of its versions. One pass over `span`, in memory for one
        key at a time. With `keys_only` values may be empty."""
        cursor = self._cursor(span, keys_only=keys_only)
        try:
            for key, entries in stored_keys(cursor):
                yield key, [value for tail, value in entries if tail[-1:] == VALUE]
        finally:
            cursor.close()

    def imported_keys(self, span: Span, reference: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """The keys in `span` that an import wrote, each with the import's value. One pass over
        `span`, 0.25 us an entry and 1 us a row of the import."""
        tails = reference + TOMBSTONE, reference + VALUE
        for keys, values in chunks(self._entries_of_span(span)):
            for at in [at for at, key in enumerate(keys) if key.endswith(tails)]:
                check_data_key(keys[at])
                stem, kind = keys[at][:-TAIL_BYTES], keys[at][-1:]
                yield unframe(stem), values[at] if kind == VALUE else None

    def imported_columns(self, span: Span, reference: bytes) -> Iterator[RowArrays]:
        """The keys in `span` that an import put, with the import's values, as columns. No other
        version shows. One pass over `span`, in a compiled loop."""
        alone = Read(0, {reference: Lifetime(0)}, None)
        onward = self._onward(span, alone, keys_only=False)
        return live_columns(self._cursor(span), alone, chunk=SCAN_CHUNK, onward=onward)

    def imported_among(
        self, keys: Iterable[bytes], reference: bytes
    ) -> Iterator[list[tuple[bytes, bytes | None]]]:
        """As `imported_keys`, of some keys, in chunks bounded in rows and in bytes. A seek a key;
        no reader is open while a chunk is used."""
        for rows in imported_entries(self.engine, keys, reference, rows_max=SCAN_CHUNK):
            yield [(row.key, row.value if row.kind == VALUE else None) for row in rows]

    # -- publishing -------------------------------------------------------------------------

    def publish_ranges(self, tombstones: list[RangeTombstone]) -> None:
        """Show range tombstones to readers. The engine must hold them already. Each costs the
        stretches that it covers."""
        if not tombstones:
            return
        fragments = self.view.fragments
        count = len(tombstones)
        if count >= REBUILD_FRAGMENTS_FROM and count * _REBUILD_FACTOR >= len(fragments):
            known = fragments.tombstones(Span(), since=0, upto=TIMESTAMP_MAX)
            self.publish_fragments(Fragments.of([*known, *tombstones]))
            return
        for tombstone in tombstones:
            fragments = fragments.adding(tombstone)
        self.publish_fragments(fragments)

    def publish_fragments(self, fragments: Fragments) -> None:
        """Show `fragments` in place of the present ones. The engine must agree with them
        already."""
        self._show(self.view._replace(fragments=fragments))

    def publish_stamps(self, stamps: Stamps) -> None:
        """Show the imports with the lifetimes in `stamps`."""
        self._show(self.view._replace(stamps=stamps))

    # -- inside -----------------------------------------------------------------------------

    def _show(self, view: ReadView) -> None:
        self.view = view
        self.lookup.show(*view.fragments.tree, view.stamps)

    def _get_slowly(self, key: bytes, as_of: int) -> bytes | None:
        fragments, stamps = self.view
        if stamps:
            return values_among_imports(self.engine, [key], as_of, fragments, stamps)[0]
        return value_below(self.engine, key, as_of, fragments)

    def _read(self, as_of: int) -> Read:
        fragments, stamps = self.view
        return Read(as_of, stamps, fragments.nearby(as_of))

    def _onward(self, span: Span, read: Read, *, keys_only: bool) -> Onward:
        """How a scan goes ahead. Call it before making the cursor: the guard has to look first."""
        _, end = span_bounds(span.start, span.end)
        is_whole = self.guard()

        def onward(begin: bytes) -> FilePass | None:
            held = self._held(begin, end, is_whole)
            if held is None:
                return None
            return FilePass(held, begin, end, read, keys_only=keys_only)

        return onward

    def _held(
        self, begin: bytes, end: bytes | None, is_whole: Callable[[], bool]
    ) -> HeldFiles | None:
        held = self.engine.hold_files(begin, end)
        if held is not None and not is_whole():  # look behind the opening
            held.close()
            held = None
        self.passes["iterator" if held is None else "files"] += 1
        if held is not None and held.has_flushed:
            self.after_flush()
        return held

    def _held_for(self, labels: LabelColumns) -> HeldFiles | None:
        """The files for labels, if these lie closely in them. Call it behind taking the view."""
        count = len(memoryview(labels.times))
        if count < JOIN_PASS_LABELS_MIN:
            return None
        is_whole = self.guard()
        span = Span(*span_of(labels.keys))
        if not self.is_dense(span, count):
            return None
        return self._held(*span_bounds(span.start, span.end), is_whole)

    def _entries_of_span(self, span: Span) -> Cursor:
        """A pass over all entries, which reads the files itself where it is long."""
        _, end = span_bounds(span.start, span.end)
        is_whole = self.guard()
        return EntryPass(self._cursor(span), end, lambda begin: self._held(begin, end, is_whole))

    def _cursor(self, span: Span, *, reverse: bool = False, keys_only: bool = False) -> Cursor:
        bounds = span_bounds(span.start, span.end)
        return self.engine.cursor(DATA, *bounds, reverse=reverse, keys_only=keys_only)

    def _entries(self, key: bytes) -> Iterator[StoredEntry]:
        """The entries of `key`. The reader is given back behind the last one, and dropped if the
        caller stops before."""
        stem = frame(key)
        ticket, reader = self.engine.borrow()
        reader.seek(stem)
        while (found := reader.key()) is not None and found.startswith(stem):
            if len(found) != len(stem) + TAIL_BYTES or found[-1] > VALUE[0]:
                check_data_key(found)
            yield found[-TAIL_BYTES:], reader.value()
            reader.next()
        if found is None:
            self.engine.check(reader)
        self.engine.give_back(ticket, reader)


def stored_tombstones(
    engine: Engine, begin: bytes = b"", end: bytes | None = None, *, reverse: bool = False
) -> Iterator[RangeTombstone]:
    """The range tombstones that an engine holds with stored keys in `begin <= key < end`, by start,
    descending if `reverse`."""
    for key, value in pairs(engine.cursor(RANGES, begin, end, reverse=reverse)):
        yield RangeTombstone(*decode_range(key, value))


# --------------------------------------------------------------------------------------------------
# The stored rows of one import, found by its keys.


class ImportedRow(NamedTuple):
    """A row of an import. `stored` is its key in `data`."""

    key: bytes
    stored: bytes
    value: bytes

    @property
    def kind(self) -> bytes:
        """The kind of the row: a value or a tombstone."""
        return self.stored[-1:]


def imported_entries(
    engine: Engine, keys: Iterable[bytes], reference: bytes, *, rows_max: int
) -> Iterator[list[ImportedRow]]:
    """The rows that an import still has among `keys`, which ascend, in chunks of at most `rows_max`
    rows, or fewer where values are large. One seek a key. No reader is open between chunks."""
    waiting = iter(keys)
    while True:
        asked = 0
        rows: list[ImportedRow] = []
        size = 0
        ticket, reader = engine.borrow()
        for key in islice(waiting, rows_max):
            asked += 1
            escaped = escape(key)
            stem = escaped + TERMINATOR + reference
            reader.seek(stem)
            stored = reader.key()
            if stored is None:
                engine.check(reader)
            elif stored.startswith(stem):
                require_entry(stored, escaped)
                rows.append(ImportedRow(key, stored, value := reader.value()))
                size += len(value)
                if size > SCAN_CHUNK_BYTES:
                    break
        engine.give_back(ticket, reader)
        if not asked:
            return
        if rows:
            yield rows
