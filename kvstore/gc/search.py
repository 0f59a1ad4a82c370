"""Finding garbage: of keys that changed, by look-ups, and of whole spans, by a pass.

`kvstore.gc.rules` has the rule for garbage. In a store without range tombstones and imports the
rule is short, and a look-up is one seek: the newest version of a key at or below `since` stays, and
the older ones go.

Invariants
1. A search takes the view before it reads entries, as every reader does.
2. The oldest entries of a key come first, because they must be removed in this order.
3. No engine reader is open while entries are yielded: the caller removes them then.
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
    """The garbage of `keys`, which ascend. Holds about `entries_max` entries at once."""
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
    """The garbage of a span. One pass over the span."""
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
    """The garbage of some of `keys[at:]`, and the index of the first key that was not searched.

    Hot: once per changed key, 5 us. No import is added while there are no stamps; rows of imports
    sort before the bound, so the search passes over none. A deletion with nothing left under it
    goes too.
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
