"""Differences: what happened to a span in a window `(since, upto]`, in key order.

One pass over the stored entries of the span, whatever share of them lies in the window: the
way to read large windows, and the yardstick for the change index, which must give the same.

* All revisions: every version and every range tombstone in the window, each key oldest first.
* Latest: of each key the newest version in the window; of each fragment the newest range
  tombstone; versions under a newer range tombstone of the window are left out, for it
  deletes them.
* Latest from the beginning of time (`since=0`) is the state: live values, no tombstones.

A range tombstone comes at its start key, before that key's own versions, cut to the span. A
descending pass brings it at its end key instead; each key's versions come oldest first both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from kvstore.codec.keys import TAIL_BYTES, VALUE, check_data_key
from kvstore.codec.ordered import is_framed, unframe
from kvstore.engine.api import Cursor, chunks
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.version import Entry, Event, Stamps, Version, timeline
from kvstore.span import Span
from kvstore.timestamp import Timestamp

Difference: TypeAlias = "Version | RangeTombstone"


def stored_keys(cursor: Cursor, *, reverse: bool = False) -> Iterator[tuple[bytes, list[Entry]]]:
    """Each user key of a pass over `data` with all its stored entries, in ascending order.

    `reverse` says that the pass descends: then the keys do too. Raises `CorruptionError` on what
    is no key of `data`.
    """
    current = b""
    entries: list[Entry] = []
    for keys, values in chunks(cursor):
        for key, value in zip(keys, values, strict=True):
            stem = key[:-TAIL_BYTES]
            if stem != current or not stem:
                if entries:
                    yield unframe(current), entries[::-1] if reverse else entries
                current, entries = stem, []
                if not is_framed(stem):
                    check_data_key(key)
            if key[-1] > VALUE[0]:
                check_data_key(key)
            entries.append((key[-TAIL_BYTES:], value))
    if entries:
        yield unframe(current), entries[::-1] if reverse else entries


def differences(
    cursor: Cursor,
    span: Span,
    *,
    since: int,
    upto: int,
    latest: bool,
    fragments: Fragments,
    stamps: Stamps,
    reverse: bool = False,
) -> Iterator[Difference]:
    """What happened in `(since, upto]`, in key order. `cursor` passes over `span`."""
    state = latest and since == 0
    ranges = [] if state else fragments.tombstones(span, since=since, upto=upto, latest=latest)
    versions = (
        Version(key, Timestamp(timestamp), value)
        for key, events, stack in _histories(cursor, fragments, stamps, reverse=reverse)
        for timestamp, value in choose(events, stack, since=since, upto=upto, latest=latest)
    )
    if reverse:
        ranges.sort(key=lambda tombstone: tombstone.end, reverse=True)
        return _merged(ranges, versions, lambda tombstone, key: tombstone.end > key)
    return _merged(ranges, versions, lambda tombstone, key: tombstone.start <= key)


def _histories(
    cursor: Cursor, fragments: Fragments, stamps: Stamps, *, reverse: bool
) -> Iterator[tuple[bytes, list[Event], tuple[int, ...]]]:
    for key, entries in stored_keys(cursor, reverse=reverse):
        stack = fragments.stack(key) if fragments else ()
        yield key, timeline(entries, stamps, stack), stack


def choose(
    events: list[Event], stack: tuple[int, ...], *, since: int, upto: int, latest: bool
) -> list[Event]:
    """Of one key's history (newest first) what a difference shows, oldest first.

    Deletions by a range tombstone are left to the range tombstone itself.
    """
    if latest:
        newest = next((event for event in events if event[0] <= upto), None)
        if newest is None or newest[0] <= since or (newest[1] is None and newest[0] in stack):
            return []
        return [] if since == 0 and newest[1] is None else [newest]
    return [
        event
        for event in reversed(events)
        if since < event[0] <= upto and not (event[1] is None and event[0] in stack)
    ]


def _merged(
    ranges: list[RangeTombstone],
    versions: Iterable[Version],
    comes_before: Callable[[RangeTombstone, bytes], bool],
) -> Iterator[Difference]:
    waiting = iter(ranges)
    tombstone = next(waiting, None)
    for version in versions:
        while tombstone is not None and comes_before(tombstone, version.key):
            yield tombstone
            tombstone = next(waiting, None)
        yield version
    while tombstone is not None:
        yield tombstone
        tombstone = next(waiting, None)
