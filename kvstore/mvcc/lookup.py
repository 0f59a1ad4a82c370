"""Look-ups: the value of one key, or of many, at one time.

A read sees of a key the newest version at or below its time, if it is a value that no newer range
tombstone covers. In bytes as they are stored, newest first, that is the first entry of a stretch:

    escaped key | 00 01 | suffix of the time ...      where the read's time begins, `rest_of`
    escaped key | 00 01 | suffix of the tombstone ff  where the tombstone takes over, `limit_of`
    escaped key | 00 02                               where the next key begins, `UNLIMITED`

So a range tombstone costs a look-up one search for the limit, and nothing is decoded.

These are hot, so what would be a line of its own elsewhere (framing, suffixes) is written out.

Invariants
1. Without imports nothing sorts before the versions of a key, newest first.
2. Among imports the references come first, and each may be newer than any version.
3. A tombstone above the time of the read makes its stretch empty: what has found nothing beside
   range tombstones looks again, below the newest one that the read sees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvstore.codec.keys import FIRST_TIMED_SUFFIX, TAIL_BYTES, decode_suffix, encode_suffix
from kvstore.codec.ordered import TERMINATOR
from kvstore.engine.api import Engine, Reader
from kvstore.mvcc.fragments import UNLIMITED, Fragments, limit_of
from kvstore.mvcc.version import Stamps

Check: TypeAlias = "Callable[[Reader], None]"
"""`Engine.check`: raises where a position is not valid because of a failure."""


def rest_of(as_of: int) -> bytes:
    """What follows the escaped key of the newest version at or below `as_of`."""
    return TERMINATOR + encode_suffix(as_of)


def value_below(engine: Engine, key: bytes, as_of: int, fragments: Fragments) -> bytes | None:
    """The value of `key` at `as_of`, for a key whose stretch was empty beside tombstones that may
    be newer than `as_of`. Without imports. A search, and where there are such, a seek."""
    newest = fragments.newest(key, as_of)
    if fragments.stack(key)[:1] == (newest,):
        return None
    limit = limit_of((newest,)) if newest else UNLIMITED
    escaped = key.replace(b"\x00", b"\x00\xff")
    entry = engine.first(escaped + rest_of(as_of), escaped + limit)
    return entry[1] if entry is not None and entry[0][-1] else None


def values_at(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments
) -> list[bytes | None]:
    """The values of `keys`, which ascend, at `as_of`. Without imports; a seek each."""
    ticket, reader = engine.borrow()
    seek, key_here, value_here = reader.seek, reader.key, reader.value
    rest = rest_of(as_of)
    values: list[bytes | None] = []
    add = values.append
    for first, last, limit in _stretches(keys, fragments):
        for key in keys if last - first == len(keys) else keys[first:last]:
            # A key without zero bytes comes back from `replace` as it is: no copy is made.
            escaped = key.replace(b"\x00", b"\x00\xff")
            seek(escaped + rest)
            found = key_here()
            # One comparison in the place of `startswith` saves 50 ns of 1,300.
            if found is None:
                engine.check(reader)
                add(None)
            elif found < escaped + limit:
                add(value_here() if found[-1] else None)
            elif limit is UNLIMITED:
                add(None)
            else:
                add(value_below(engine, key, as_of, fragments))
    engine.give_back(ticket, reader)
    return values


def _stretches(keys: Sequence[bytes], fragments: Fragments) -> Iterator[tuple[int, int, bytes]]:
    """Positions `[first, last)` of ascending keys that share a limit, and the limit."""
    boundaries, limits = fragments.boundaries, fragments.limits
    first, count = 0, len(keys)
    while first < count:
        at = bisect_right(boundaries, keys[first])
        last = bisect_left(keys, boundaries[at], first) if at < len(boundaries) else count
        yield first, last, limits[at]
        first = last


def value_among_imports(
    reader: Reader,
    check: Check,
    key: bytes,
    as_of: int,
    rest: bytes,
    fragments: Fragments,
    stamps: Stamps,
) -> bytes | None:
    """The value of `key` at `as_of` in a store with imports; `rest` is `rest_of(as_of)`. A seek and
    a step, mostly."""
    escaped = key.replace(b"\x00", b"\x00\xff")
    end = escaped + UNLIMITED
    newest, value = -1, None
    reader.seek(escaped + TERMINATOR)
    found = reader.key()
    while found is not None and found < end:
        lifetime = stamps.get(found[-TAIL_BYTES:-1])
        if lifetime is not None:
            added = lifetime[0]  # a named tuple is taken apart in 50 ns
            if newest < added <= as_of < lifetime[1]:
                newest, value = added, reader.value() if found[-1] else None
            reader.next()
        elif found >= (timed := escaped + rest):
            timestamp = decode_suffix(found[-TAIL_BYTES:-1])
            if timestamp > newest:
                newest, value = timestamp, reader.value() if found[-1] else None
            break
        elif found[-TAIL_BYTES:] >= FIRST_TIMED_SUFFIX:
            reader.seek(timed)
        else:  # of an import that this read does not know
            reader.next()
        found = reader.key()
    if found is None:
        check(reader)
    if value is not None and fragments and fragments.newest(key, as_of) > newest:
        return None
    return value
