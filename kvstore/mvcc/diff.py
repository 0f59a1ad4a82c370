"""Differences: what happened to a span in a window `(since, upto]`, in key order.

A difference takes one pass over all stored entries of the span, however few of them lie in the
window. Large windows are read this way, and tests hold the change index to the same result.

* All revisions: every version and every range tombstone in the window, each key oldest first.
* Latest: the newest version of each key in the window, and the newest range tombstone of each
  fragment. A version under a newer range tombstone of the window is left out, because the
  tombstone deletes it.
* Latest from the beginning of time (`since=0`) is the state: live values, no tombstones.

A range tombstone comes at its start key, before that key's own versions, cut to the span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from kvstore.codec.keys import TAIL_BYTES, VALUE, check_data_key
from kvstore.codec.ordered import is_framed, unframe
from kvstore.engine.api import Cursor, chunks
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.version import Revision, Stamps, StoredEntry, Version, timeline
from kvstore.span import Span
from kvstore.timestamp import Timestamp

Difference: TypeAlias = "Version | RangeTombstone"


def stored_keys(cursor: Cursor) -> Iterator[tuple[bytes, list[StoredEntry]]]:
    """Each user key of an ascending pass over `data`, with all its stored entries in their order.

    Raises `CorruptionError` on bytes that are no key of `data`.
    """
    return entries_by_key(chunks(cursor))


def entries_by_key(
    found: Iterable[tuple[Sequence[bytes], Sequence[bytes]]],
) -> Iterator[tuple[bytes, list[StoredEntry]]]:
    """As `stored_keys`, of stored keys and values that were read already, in ascending order."""
    current = b""
    entries: list[StoredEntry] = []
    for keys, values in found:
        for key, value in zip(keys, values, strict=True):
            stem = key[:-TAIL_BYTES]
            if stem != current or not stem:
                if entries:
                    yield unframe(current), entries
                current, entries = stem, []
                if not is_framed(stem):
                    check_data_key(key)
            if key[-1] > VALUE[0]:
                check_data_key(key)
            entries.append((key[-TAIL_BYTES:], value))
    if entries:
        yield unframe(current), entries


def differences(
    cursor: Cursor,
    span: Span,
    *,
    since: int,
    upto: int,
    latest: bool,
    fragments: Fragments,
    stamps: Stamps,
) -> Iterator[Difference]:
    """The versions and range tombstones of `(since, upto]`, in key order. `cursor` passes over
    `span`."""
    state = latest and since == 0
    ranges = [] if state else fragments.tombstones(span, since=since, upto=upto, latest=latest)
    versions = (
        Version(key, Timestamp(timestamp), value)
        for key, revisions, stack in _histories(cursor, fragments, stamps)
        for timestamp, value in choose(revisions, stack, since=since, upto=upto, latest=latest)
    )
    return _merged(ranges, versions)


def _histories(
    cursor: Cursor, fragments: Fragments, stamps: Stamps
) -> Iterator[tuple[bytes, list[Revision], tuple[int, ...]]]:
    for key, entries in stored_keys(cursor):
        stack = fragments.stack(key) if fragments else ()
        yield key, timeline(entries, stamps, stack), stack


def choose(
    revisions: list[Revision], stack: tuple[int, ...], *, since: int, upto: int, latest: bool
) -> list[Revision]:
    """The revisions of one key that a difference shows, oldest first; `revisions` has the newest
    first.

    A deletion by a range tombstone is left out: the difference shows the range tombstone itself.
    """
    if latest:
        newest = next((revision for revision in revisions if revision[0] <= upto), None)
        if newest is None or newest[0] <= since or (newest[1] is None and newest[0] in stack):
            return []
        return [] if since == 0 and newest[1] is None else [newest]
    deleted = set(stack)  # a search of the stack for each revision would be quadratic
    return [
        revision
        for revision in reversed(revisions)
        if since < revision[0] <= upto and not (revision[1] is None and revision[0] in deleted)
    ]


def _merged(ranges: list[RangeTombstone], versions: Iterable[Version]) -> Iterator[Difference]:
    waiting = iter(ranges)
    tombstone = next(waiting, None)
    for version in versions:
        while tombstone is not None and tombstone.start <= version.key:
            yield tombstone
            tombstone = next(waiting, None)
        yield version
    while tombstone is not None:
        yield tombstone
        tombstone = next(waiting, None)
