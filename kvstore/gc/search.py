"""Finding garbage: of keys that changed, by look-ups, and of whole spans, by passes.

`kvstore.gc.rules` has the rule for garbage. In a store without range tombstones and imports the
rule is short, and a look-up is one seek: the newest version of a key at or below `since` stays, and
the older ones go.

Invariants
1. A search takes the view before it reads entries, as every reader does.
2. The oldest entries of a key come first, because they must be removed in this order.
3. A value that a revert brought back moves to the time of the revert where the row of the import
   goes.
4. No engine reader is open while entries are yielded: the caller removes them then.
5. A search borrows one reader for many keys or spans: making one takes as long as ten seeks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    TAIL_BYTES,
    VALUE,
    check_data_key,
    encode_suffix,
    span_bounds,
)
from kvstore.codec.ordered import TERMINATOR, escape, frame
from kvstore.engine.api import DATA, EntryReader
from kvstore.gc.rules import garbage, revived
from kvstore.limits import GC_SHORT_SPAN_ENTRIES
from kvstore.mvcc import Versions
from kvstore.mvcc.diff import entries_by_key, stored_keys
from kvstore.mvcc.version import Stamps, StoredEntry
from kvstore.mvcc.versions import ReadView
from kvstore.span import Span


class Move(NamedTuple):
    """The stored key of a row that goes, and of a value that its revert brought back, now and with
    the time of the revert. One batch does all three."""

    row: bytes
    stored: bytes
    plain: bytes


Removal: TypeAlias = "bytes | Move"
"""The stored key of an entry that goes, or a move."""


def garbage_of_keys(
    versions: Versions, keys: Sequence[bytes], since: int, *, entries_max: int
) -> Iterator[Removal]:
    """The garbage of `keys`, which ascend. Holds about `entries_max` entries at once."""
    at = 0
    while at < len(keys):
        is_short = not any(versions.view)
        search = _superseded if is_short else _outlived
        found, at = search(versions, keys, at, since, entries_max)
        yield from found


def garbage_in_spans(
    versions: Versions, spans: Sequence[Span], since: int, *, entries_max: int
) -> Iterator[Removal]:
    """The garbage of `spans`, which ascend and are disjoint. One seek a span and a pass over it.
    Holds about `entries_max` entries at once."""
    engine = versions.engine
    at = 0
    while at < len(spans):
        view = versions.view
        doomed: list[Removal] = []
        long: Span | None = None
        ticket, reader = engine.borrow()
        while at < len(spans) and long is None and len(doomed) < entries_max:
            keys = _keys_of_short(versions, reader, spans[at])
            if keys is None:
                long = spans[at]
            else:
                doomed += _garbage(entries_by_key([(keys, keys)]), view, since)
            at += 1
        engine.give_back(ticket, reader)
        yield from doomed
        if long is not None:
            cursor = engine.cursor(DATA, *span_bounds(long.start, long.end))
            for entries in stored_keys(cursor):
                yield from _garbage([entries], versions.view, since)


def _keys_of_short(versions: Versions, reader: EntryReader, span: Span) -> list[bytes] | None:
    """The stored keys of a span, None if it has more than `GC_SHORT_SPAN_ENTRIES`."""
    begin, end = span_bounds(span.start, span.end)
    keys: list[bytes] = []
    reader.seek(begin)
    while (found := reader.key()) is not None:
        if end is not None and found >= end:
            return keys
        if len(keys) == GC_SHORT_SPAN_ENTRIES:
            return None
        keys.append(found)
        reader.next()
    versions.engine.check(reader)
    return keys


def _garbage(
    found: Iterable[tuple[bytes, list[StoredEntry]]], view: ReadView, since: int
) -> Iterator[Removal]:
    fragments, stamps = view
    for key, entries in found:
        stack = fragments.stack(key) if fragments else ()
        yield from _removals(frame(key), [tail for tail, _ in entries], stamps, stack, since)


def _removals(
    stem: bytes, tails: list[bytes], stamps: Stamps, stack: Sequence[int], since: int
) -> list[Removal]:
    """The removals of one key, whose framed form is `stem`."""
    doomed = garbage(tails, stamps, stack, since=since)
    found = None
    if len(doomed) < len(tails) and any(tail < FIRST_TIMED_SUFFIX for tail in doomed):
        found = revived(tails, stamps, stack, since=since)
    if found is None:
        return [stem + tail for tail in doomed]
    plain = stem + encode_suffix(found.time) + VALUE
    move = Move(stem + found.row, stem + found.tail, plain)
    return [move if tail == found.row else stem + tail for tail in doomed]


def _outlived(
    versions: Versions, keys: Sequence[bytes], at: int, since: int, entries_max: int
) -> tuple[list[Removal], int]:
    """The garbage of some of `keys[at:]`, and the index of the first key that was not searched."""
    fragments, stamps = versions.view
    engine = versions.engine
    ticket, reader = engine.borrow()
    doomed: list[Removal] = []
    while at < len(keys) and len(doomed) < entries_max:
        key = keys[at]
        at += 1
        stem = frame(key)
        tails: list[bytes] = []
        reader.seek(stem)
        while (found := reader.key()) is not None and found.startswith(stem):
            if len(found) != len(stem) + TAIL_BYTES or found[-1] > VALUE[0]:
                check_data_key(found)
            tails.append(found[-TAIL_BYTES:])
            reader.next()
        if found is None:
            engine.check(reader)
        stack = fragments.stack(key) if fragments else ()
        doomed += _removals(stem, tails, stamps, stack, since)
    engine.give_back(ticket, reader)
    return doomed, at


def _superseded(
    versions: Versions, keys: Sequence[bytes], at: int, since: int, entries_max: int
) -> tuple[list[Removal], int]:
    """The garbage of some of `keys[at:]`, and the index of the first key that was not searched.

    Hot: once per changed key, 5 us. No import is added while there are no stamps; rows of imports
    sort before the bound, so the search passes over none. A deletion with nothing left under it
    goes too.
    """
    engine = versions.engine
    ticket, reader = engine.borrow()
    seek, key_here, step = reader.seek, reader.key, reader.next
    bound = TERMINATOR + encode_suffix(since)
    doomed: list[Removal] = []
    while at < len(keys) and len(doomed) < entries_max:
        escaped = escape(keys[at])
        stem = escaped + TERMINATOR
        size = len(stem) + TAIL_BYTES
        at += 1
        seek(escaped + bound)
        newest = found = key_here()
        if newest is not None and newest.startswith(stem):
            older: list[bytes] = []
            # A damaged entry does not tell which of the others it superseded.
            if len(newest) != size or newest[-1] > VALUE[0]:
                check_data_key(newest)
            step()
            while (found := key_here()) is not None and found.startswith(stem):
                if len(found) != size:
                    check_data_key(found)
                older.append(found)
                step()
            doomed += older[::-1]
            if not newest[-1]:
                doomed.append(newest)
        if found is None:
            engine.check(reader)
    engine.give_back(ticket, reader)
    return doomed, at
