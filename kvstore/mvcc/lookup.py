"""Look-ups: the value of one key, or of many, at one time.

A read sees of a key the newest version at or below its time, if it is a value that no newer range
tombstone covers. In bytes as they are stored, newest first, that is the first entry of a stretch:

    escaped key | 00 01 | suffix of the time ...      where the read's time begins, `rest_of`
    escaped key | 00 01 | suffix of the tombstone ff  where the tombstone takes over, `limit_of`
    escaped key | 00 02                               where the next key begins, `UNLIMITED`

So a range tombstone costs a look-up one search for the limit, and nothing is decoded.

Invariants
1. Without imports nothing sorts before the versions of a key, newest first.
2. Among imports the references come first, and each may be newer than any version.
3. A tombstone above the time of the read makes its stretch empty: what has found nothing beside
   range tombstones looks again, below the newest one that the read sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvstore.codec.keys import UNLIMITED, encode_suffix
from kvstore.codec.ordered import TERMINATOR
from kvstore.engine.api import Engine
from kvstore.loops import ABSENT, find_among, find_many
from kvstore.mvcc.fragments import Fragments, limit_of
from kvstore.mvcc.version import Stamps


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
    value = engine.find(key, rest_of(as_of), limit)
    return None if value is ABSENT else value


def values_at(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments
) -> list[bytes | None]:
    """The values of `keys` at `as_of`. Without imports; a seek each."""
    ticket, reader = engine.borrow()
    rest, (boundaries, limits) = rest_of(as_of), (fragments.boundaries, fragments.limits)
    absent = ABSENT if fragments else None
    found = find_many(reader, engine.check, keys, rest, boundaries, limits, absent)
    engine.give_back(ticket, reader)
    if fragments:
        for at, value in enumerate(found):
            if value is ABSENT:
                found[at] = value_below(engine, keys[at], as_of, fragments)
    return cast("list[bytes | None]", found)


def values_among_imports(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments, stamps: Stamps
) -> list[bytes | None]:
    """The values of `keys` at `as_of` in a store with imports. A seek and a step each, mostly."""
    ticket, reader = engine.borrow()
    found = find_among(reader, engine.check, keys, as_of, rest_of(as_of), stamps)
    engine.give_back(ticket, reader)
    if not fragments:
        return [value for _, value in found]
    return [
        None if fragments.newest(key, as_of) > time else value
        for key, (time, value) in zip(keys, found, strict=True)
    ]
