"""Versions at explicit timestamps over an engine: the store beneath the clock.

Reads see exactly what was written at or below their time. Writes here name their own timestamp,
as replicas, restores and tests need it, and are refused where they would land at or below what is
there. The store itself, whose timestamps only grow, stages its writes without that check.

Invariants
1. `view` holds all range tombstones and import stamps of the engine; both are replaced, never
   changed, so that a reader that took the view keeps a consistent one.
2. A reader takes the view first and reads entries after it: entries leave the engine before the
   tombstone that covers them leaves the view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from kvstore.codec.keys import (
    TAIL_BYTES,
    VALUE,
    check_data_key,
    decode_range,
    span_bounds,
)
from kvstore.codec.ordered import frame
from kvstore.engine.api import DATA, RANGES, Cursor, Engine, pairs
from kvstore.errors import UsageError, WriteTooOldError
from kvstore.limits import REBUILD_FRAGMENTS_FROM
from kvstore.loops import Lookup
from kvstore.mvcc.diff import Difference, differences, stored_keys
from kvstore.mvcc.export import VersionColumns, version_columns
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.lookup import value_below, values_among_imports, values_at
from kvstore.mvcc.scan import Chunk, Read, Rows, live_columns, live_rows
from kvstore.mvcc.version import Entry, Event, Stamps, Version, newest_at, timeline
from kvstore.mvcc.write import WriteSet, stage
from kvstore.span import Span
from kvstore.timestamp import TIMESTAMP_MAX, Timestamp

Tombstones: TypeAlias = "list[RangeTombstone]"


class View(NamedTuple):
    """What a reader needs beside the entries."""

    fragments: Fragments
    stamps: Stamps


class Versions:
    """Versioned keys over an engine. Knows no clock; the caller serialises the writes."""

    def __init__(self, engine: Engine, *, stamps: Stamps | None = None) -> None:
        self.engine = engine
        self.lookup = Lookup(engine, self._get_slowly)
        self.get = self.lookup.get
        """The value of a key at a time, None where it is absent or deleted. One seek."""
        self._show(View(Fragments.of(stored_tombstones(engine)), stamps or {}))

    # -- reading ----------------------------------------------------------------------------

    def get_many(self, keys: Sequence[bytes], as_of: int) -> list[bytes | None]:
        """The values of `keys`, in their order. They are sought in key order, which takes half
        the time of seeking them in no order."""
        fragments, stamps = self.view
        if stamps:
            return values_among_imports(self.engine, keys, as_of, fragments, stamps)
        return values_at(self.engine, keys, as_of, fragments)

    def history(self, key: bytes) -> list[Version]:
        """All versions of `key`, newest first, range tombstones over it included."""
        return [Version(key, Timestamp(t), value) for t, value in self.events(key)]

    def version_at(self, key: bytes, as_of: int) -> Version | None:
        """The newest version of `key` at or below `as_of`, deletions included; None if there is
        none. Under a range tombstone it is that, even where the key was never written."""
        event = newest_at(self.events(key), as_of)
        return None if event is None else Version(key, Timestamp(event[0]), event[1])

    def versions_at(self, span: Span, as_of: int) -> Iterator[Version]:
        """As `version_at`, of each key of `span` that was written at or below `as_of`. One pass.

        Keys that nothing but range tombstones speaks of do not occur: they are a continuum.
        """
        fragments, stamps = self.view
        for key, entries in stored_keys(self._cursor(span)):
            if newest_at(timeline(entries, stamps, ()), as_of) is None:
                continue
            event = newest_at(timeline(entries, stamps, fragments.stack(key)), as_of)
            assert event is not None
            yield Version(key, Timestamp(event[0]), event[1])

    def events(self, key: bytes) -> list[Event]:
        """The history of `key` without the key. O(versions)."""
        fragments, stamps = self.view
        return timeline(self._entries(key), stamps, fragments.stack(key))

    def scan(self, span: Span, as_of: int, *, reverse: bool = False) -> Iterator[Chunk]:
        """Chunks of live keys and values at `as_of`, ascending or descending. Bounded memory."""
        read = self._read(span, as_of)
        return live_rows(self._cursor(span, reverse=reverse), read)

    def scan_columns(
        self, span: Span, as_of: int, *, chunk: int, reverse: bool = False
    ) -> Iterator[Rows]:
        """As `scan`, as Arrow arrays; at most `chunk` rows at once."""
        read = self._read(span, as_of)
        return live_columns(self._cursor(span, reverse=reverse), read, chunk=chunk)

    def diff(
        self,
        span: Span,
        *,
        since: int,
        upto: int = TIMESTAMP_MAX,
        latest: bool = False,
        reverse: bool = False,
    ) -> Iterator[Difference]:
        """What happened in `(since, upto]`: see `kvstore.mvcc.diff`. One pass over the span."""
        fragments, stamps = self.view
        return differences(
            self._cursor(span, reverse=reverse),
            span,
            reverse=reverse,
            since=since,
            upto=upto,
            latest=latest,
            fragments=fragments,
            stamps=stamps,
        )

    def export(
        self, span: Span, *, since: int, upto: int
    ) -> tuple[Iterator[VersionColumns], Tombstones]:
        """All point versions in `(since, upto]` in columns, and the range tombstones by start:
        of the keys, and of the tombstones' starts, that lie in `span`."""
        fragments, stamps = self.view
        cursor = self._cursor(span)
        columns = version_columns(
            cursor, since=since, upto=upto, stamps=stamps, fragments=fragments
        )
        tombstones = fragments.tombstones(Span(), since=since, upto=upto)
        return columns, [found for found in tombstones if found.start in span]

    def imported_keys(self, span: Span, reference: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """Keys of `span` that an import wrote, with its values. One pass over the span."""
        for key, entries in stored_keys(self._cursor(span)):
            for tail, value in entries:
                if tail[:-1] == reference:
                    yield key, value if tail[-1:] == VALUE else None

    # -- writing ----------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes, *, at: int) -> None:
        """Write a version at `at`. Raises `WriteTooOldError` at or below what is there."""
        writes = WriteSet()
        writes.put(key, value)
        self.apply(writes, at=at)

    def delete(self, key: bytes, *, at: int) -> None:
        """Write a tombstone at `at`, whether or not the key is alive. Raises as `put`."""
        writes = WriteSet()
        writes.delete(key)
        self.apply(writes, at=at)

    def delete_range(self, start: bytes, end: bytes, *, at: int) -> None:
        """Write a range tombstone at `at`. Raises as `put`; the check passes over the span."""
        writes = WriteSet()
        writes.delete_range(start, end)
        self.apply(writes, at=at)

    def apply(self, writes: WriteSet, *, at: int) -> None:
        """Write a whole set at `at`, or nothing.

        Raises `WriteTooOldError`, naming the first key in the way and the least timestamp
        that is not. Costs a look-up per key and a pass over each range.
        """
        if not 0 < at <= TIMESTAMP_MAX:
            raise UsageError(f"cannot write at timestamp {at}", "timestamps start at 1")
        writes.seal()
        self._require_newest(writes, at)
        batch = self.engine.batch()
        stage(writes, at, batch, self.engine.families)
        self.engine.write(batch)
        self.publish_ranges(writes.tombstones(at))

    def publish_ranges(self, tombstones: list[RangeTombstone]) -> None:
        """Show range tombstones that have been written. O(fragments)."""
        if not tombstones:
            return
        fragments = self.view.fragments
        if len(tombstones) >= REBUILD_FRAGMENTS_FROM:
            known = fragments.tombstones(Span(), since=0, upto=TIMESTAMP_MAX)
            self.publish_fragments(Fragments.of([*known, *tombstones]))
            return
        for tombstone in tombstones:
            fragments = fragments.adding(tombstone)
        self.publish_fragments(fragments)

    def publish_fragments(self, fragments: Fragments) -> None:
        """Show `fragments` instead, once the engine holds what they say."""
        self._show(self.view._replace(fragments=fragments))

    def publish_stamps(self, stamps: Stamps) -> None:
        """Show imports as `stamps` has them."""
        self._show(self.view._replace(stamps=stamps))

    # -- inside -----------------------------------------------------------------------------

    def tails(self, key: bytes) -> list[bytes]:
        """Tails (suffix and kind) of all stored entries of `key`, in their order. O(entries)."""
        return [tail for tail, _ in self._entries(key)]

    def _show(self, view: View) -> None:
        self.view = view
        self.lookup.show(view.fragments.boundaries, view.fragments.limits, view.stamps)

    def _get_slowly(self, key: bytes, as_of: int) -> bytes | None:
        fragments, stamps = self.view
        if stamps:
            return values_among_imports(self.engine, [key], as_of, fragments, stamps)[0]
        return value_below(self.engine, key, as_of, fragments)

    def _read(self, span: Span, as_of: int) -> Read:
        fragments, stamps = self.view
        return Read.of(as_of, stamps, fragments.cover(span, as_of))

    def _cursor(self, span: Span, *, reverse: bool = False) -> Cursor:
        return self.engine.cursor(DATA, *span_bounds(span.start, span.end), reverse=reverse)

    def _entries(self, key: bytes) -> list[Entry]:
        stem = frame(key)
        entries: list[Entry] = []
        ticket, reader = self.engine.borrow()
        reader.seek(stem)
        while (found := reader.key()) is not None and found.startswith(stem):
            if len(found) != len(stem) + TAIL_BYTES or found[-1] > VALUE[0]:
                check_data_key(found)
            entries.append((found[-TAIL_BYTES:], reader.value()))
            reader.next()
        if found is None:
            self.engine.check(reader)
        self.engine.give_back(ticket, reader)
        return entries

    def _require_newest(self, writes: WriteSet, at: int) -> None:
        """Raise if anything the writes touch, dead or alive, lies at or above `at`.

        The error names the least key in the way, and a time above all that is.
        """
        offenders: list[tuple[bytes, int]] = []
        for start, end in writes.ranges:
            offenders.extend(self._newer_in(Span(start, end), at))
        for key in writes.points:
            newest = self.events(key)[:1]
            if newest and newest[0][0] >= at:
                offenders.append((key, newest[0][0]))
        if offenders:
            first = min(key for key, _ in offenders)
            least = max(timestamp for _, timestamp in offenders) + 1
            raise WriteTooOldError(first, timestamp=at, least=least)

    def _newer_in(self, span: Span, at: int) -> Iterator[tuple[bytes, int]]:
        fragments, stamps = self.view
        for tombstone in fragments.tombstones(span, since=at - 1, upto=TIMESTAMP_MAX):
            yield tombstone.start, tombstone.timestamp
        for key, entries in stored_keys(self._cursor(span)):
            newest = timeline(entries, stamps, ())[:1]
            if newest and newest[0][0] >= at:
                yield key, newest[0][0]


def stored_tombstones(engine: Engine) -> Iterator[RangeTombstone]:
    """All range tombstones an engine holds, by start."""
    for key, value in pairs(engine.cursor(RANGES)):
        yield RangeTombstone(*decode_range(key, value))
