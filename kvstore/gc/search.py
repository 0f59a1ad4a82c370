"""Finding garbage: of keys that changed, by look-ups, and of whole spans, by a pass.

`kvstore.gc.rules` says what is garbage. Where there are neither range tombstones nor imports, the
rule is one line, and a look-up one seek: of each key the newest version at or below `since` stays,
what is older goes.

Invariants
1. The view is taken before the entries are read, as readers do.
2. Of a key the oldest entries come first: in this order they may be removed.
3. No reader is held while entries are handed out: they are removed then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.codec.keys import TAIL_BYTES, VALUE, check_data_key, encode_suffix, span_bounds
from kvstore.codec.ordered import TERMINATOR, escape, frame
from kvstore.engine.api import DATA
from kvstore.gc.rules import garbage
from kvstore.mvcc import Versions
from kvstore.mvcc.diff import stored_keys
from kvstore.span import Span


def garbage_of_keys(
    versions: Versions, keys: Sequence[bytes], since: int, *, entries_max: int
) -> Iterator[bytes]:
    """Stored entries of `keys`, which ascend, that can go. Holds some `entries_max` at once."""
    at = 0
    while at < len(keys):
        fragments, stamps = versions.view
        if fragments or stamps:
            key, at = keys[at], at + 1
            stack = fragments.stack(key) if fragments else ()
            doomed = garbage(versions.tails(key), stamps, stack, since=since)
            stem = frame(key)
            yield from [stem + tail for tail in doomed]
        else:
            found, at = _superseded(versions, keys, at, since, entries_max)
            yield from found


def garbage_in_span(versions: Versions, span: Span, since: int) -> Iterator[bytes]:
    """Stored entries of a span that can go. One pass."""
    cursor = versions.engine.cursor(DATA, *span_bounds(span.start, span.end))
    for key, entries in stored_keys(cursor):
        fragments, stamps = versions.view
        stack = fragments.stack(key) if fragments else ()
        doomed = garbage([tail for tail, _ in entries], stamps, stack, since=since)
        if doomed:
            stem = frame(key)
            yield from [stem + tail for tail in doomed]


def _superseded(
    versions: Versions, keys: Sequence[bytes], at: int, since: int, entries_max: int
) -> tuple[list[bytes], int]:
    """Garbage of `keys[at:]`, and the place of the key that comes next.

    Hot: once per changed key, 5 us. Rows of imports, which are not added yet where there are no
    stamps, sort before the bound; a deletion with nothing left under it goes too.
    """
    engine = versions.engine
    ticket, reader = engine.borrow()
    seek, key_here, step = reader.seek, reader.key, reader.next
    bound = TERMINATOR + encode_suffix(since)
    doomed: list[bytes] = []
    while at < len(keys) and len(doomed) < entries_max:
        escaped = escape(keys[at])
        stem = escaped + TERMINATOR
        size = len(stem) + TAIL_BYTES
        at += 1
        seek(escaped + bound)
        newest = found = key_here()
        if newest is not None and newest.startswith(stem):
            older: list[bytes] = []
            # Where one entry of a key is rotten, nothing says which of the others it superseded.
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
