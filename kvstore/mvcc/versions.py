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

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    SUFFIX_BYTES,
    TAIL_BYTES,
    VALUE,
    decode_suffix,
    encode_suffix,
    span_bounds,
)
from kvstore.codec.ordered import frame, unescape, unframe
from kvstore.engine.api import DATA, RANGES, Cursor, Engine
from kvstore.errors import UsageError, WriteTooOldError
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc.decide import Read
from kvstore.mvcc.diff import Difference, differences, stored_keys
from kvstore.mvcc.export import VersionColumns, version_columns
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.scan import Chunk, KeyColumn, live_columns, live_rows
from kvstore.mvcc.version import Entry, Event, Stamps, Version, timeline
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
        self.view = View(Fragments.of(stored_tombstones(engine)), stamps or {})

    # -- reading ----------------------------------------------------------------------------

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`, None where it is absent or deleted. One seek."""
        fragments, stamps = self.view
        stem = frame(key)
        bound = encode_suffix(as_of)
        newest, value = -1, None
        engine = self.engine
        ticket, reader = engine.borrow()
        # Without imports nothing sorts before the versions: go straight to the one wanted.
        reader.seek(stem if stamps else stem + bound)
        while reader.valid():
            found = reader.key()
            if not found.startswith(stem):
                break
            tail = found[-TAIL_BYTES:]
            if tail >= bound:
                timestamp = decode_suffix(tail[:-1])
                if timestamp > newest:
                    newest = timestamp
                    value = reader.value() if tail[-1:] == VALUE else None
                break
            if tail >= FIRST_TIMED_SUFFIX:
                reader.seek(stem + bound)
                continue
            lifetime = stamps.get(tail[:-1])
            if lifetime is not None and newest < lifetime.added <= as_of < lifetime.reverted:
                newest = lifetime.added
                value = reader.value() if tail[-1:] == VALUE else None
            reader.next()
        else:
            engine.check(reader)
        engine.give_back(ticket, reader)
        if value is not None and fragments and fragments.newest(key, as_of) > newest:
            return None
        return value

    def history(self, key: bytes) -> list[Version]:
        """All versions of `key`, newest first, range tombstones over it included."""
        return [Version(key, Timestamp(t), value) for t, value in self.events(key)]

    def events(self, key: bytes) -> list[Event]:
        """The history of `key` without the key. O(versions)."""
        fragments, stamps = self.view
        return timeline(self._entries(key), stamps, fragments.stack(key))

    def scan(self, span: Span, as_of: int, *, reverse: bool = False) -> Iterator[Chunk]:
        """Chunks of live keys and values at `as_of`, ascending or descending. Bounded memory."""
        read = self._read(span, as_of)
        return live_rows(self._cursor(span, reverse=reverse), read, reverse=reverse)

    def scan_columns(self, span: Span, as_of: int, *, chunk: int) -> Iterator[KeyColumn]:
        """As ascending `scan`, the keys as Arrow arrays; at most `chunk` rows at once."""
        read = self._read(span, as_of)
        return live_columns(self._cursor(span), read, chunk=chunk)

    def diff(
        self, span: Span, *, since: int, upto: int = TIMESTAMP_MAX, latest: bool = False
    ) -> Iterator[Difference]:
        """What happened in `(since, upto]`: see `kvstore.mvcc.diff`. One pass over the span."""
        fragments, stamps = self.view
        return differences(
            self._cursor(span),
            span,
            since=since,
            upto=upto,
            latest=latest,
            fragments=fragments,
            stamps=stamps,
        )

    def export(self, *, since: int, upto: int) -> tuple[Iterator[VersionColumns], Tombstones]:
        """All point versions in `(since, upto]` in columns, and the range tombstones by start."""
        fragments, stamps = self.view
        cursor = self._cursor(Span())
        columns = version_columns(
            cursor, since=since, upto=upto, stamps=stamps, fragments=fragments
        )
        return columns, fragments.tombstones(Span(), since=since, upto=upto)

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
        for start, end in writes.ranges:
            self._require_newest_below(Span(start, end), at)
        for key in writes.points:
            self._require_newest(key, at)
        batch = self.engine.batch()
        stage(writes, at, batch, self.engine.families)
        self.engine.write(batch)
        self.publish_ranges(writes.tombstones(at))

    def publish_ranges(self, tombstones: list[RangeTombstone]) -> None:
        """Show range tombstones that have been written. O(fragments)."""
        if not tombstones:
            return
        fragments = self.view.fragments
        for tombstone in tombstones:
            fragments = fragments.adding(tombstone)
        self.view = self.view._replace(fragments=fragments)

    def publish_fragments(self, fragments: Fragments) -> None:
        """Show `fragments` instead, once the engine holds what they say."""
        self.view = self.view._replace(fragments=fragments)

    def publish_stamps(self, stamps: Stamps) -> None:
        """Show imports as `stamps` has them."""
        self.view = self.view._replace(stamps=stamps)

    # -- inside -----------------------------------------------------------------------------

    def tails(self, key: bytes) -> list[bytes]:
        """Tails (suffix and kind) of all stored entries of `key`, in their order. O(entries)."""
        stem = frame(key)
        tails: list[bytes] = []
        ticket, reader = self.engine.borrow()
        reader.seek(stem)
        while reader.valid() and (found := reader.key()).startswith(stem):
            tails.append(found[-TAIL_BYTES:])
            reader.next()
        if not reader.valid():
            self.engine.check(reader)
        self.engine.give_back(ticket, reader)
        return tails

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
        while reader.valid() and (found := reader.key()).startswith(stem):
            entries.append((found[-TAIL_BYTES:], reader.value()))
            reader.next()
        if not reader.valid():
            self.engine.check(reader)
        self.engine.give_back(ticket, reader)
        return entries

    def _require_newest(self, key: bytes, at: int) -> None:
        events = self.events(key)
        if events and events[0][0] >= at:
            raise WriteTooOldError(key, timestamp=at, least=events[0][0] + 1)

    def _require_newest_below(self, span: Span, at: int) -> None:
        """Raise if anything in `span`, dead or alive, lies at or above `at`."""
        fragments, stamps = self.view
        too_new = fragments.tombstones(span, since=at - 1, upto=TIMESTAMP_MAX)
        offenders = [(tombstone.start, tombstone.timestamp) for tombstone in too_new]
        for key, entries in stored_keys(self._cursor(span)):
            newest = timeline(entries, stamps, ())[:1]
            if newest and newest[0][0] >= at:
                offenders.append((key, newest[0][0]))
        if offenders:
            first = min(key for key, _ in offenders)
            least = max(timestamp for _, timestamp in offenders) + 1
            raise WriteTooOldError(first, timestamp=at, least=least)


def stored_tombstones(engine: Engine) -> Iterator[RangeTombstone]:
    """All range tombstones an engine holds, by start."""
    cursor = engine.cursor(RANGES)
    while True:
        keys, values = cursor.take(SCAN_CHUNK)
        if not keys:
            return
        for key, value in zip(keys, values, strict=True):
            start, suffix = unframe(key[:-SUFFIX_BYTES]), key[-SUFFIX_BYTES:]
            yield RangeTombstone(start, unescape(value), decode_suffix(suffix))
