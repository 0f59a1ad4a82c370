"""Look-ups: the value of one key, or of many, at one time.

A read sees the newest version of a key at or below its time, if that version is a value and no
newer range tombstone covers it. Versions are stored newest first, so the read takes the first
entry of a stretch of stored keys. The stretch has these bounds:

    escaped key | 00 01 | suffix of the time ...      where the read's time begins, `rest_of`
    escaped key | 00 01 | suffix of the tombstone ff  where the tombstone takes over, `limit_of`
    escaped key | 00 02                               where the next key begins, `UNLIMITED`

So range tombstones cost a look-up one binary search for the limit, and nothing is decoded.

Invariants
1. Without imports the versions of a key, newest first, are all its entries.
2. With imports the stamp references of a key sort first, and each may be newer than any version.
3. A tombstone above the time of the read makes the stretch empty. A look-up that finds nothing
   therefore looks again, below the newest tombstone that the read sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvstore.codec.keys import UNLIMITED, encode_suffix
from kvstore.codec.ordered import TERMINATOR
from kvstore.engine.api import Engine
from kvstore.loops import ABSENT, find_among, find_many
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.stretches import limit_of
from kvstore.mvcc.version import Stamps


def rest_of(as_of: int) -> bytes:
    """The bytes behind the escaped key at which the versions at or below `as_of` begin."""
    return TERMINATOR + encode_suffix(as_of)


def value_below(engine: Engine, key: bytes, as_of: int, fragments: Fragments) -> bytes | None:
    """The value of `key` at `as_of` in a store without imports. Called where the stretch was empty,
    perhaps because of a tombstone newer than `as_of`. One search; a seek where there is such."""
    newest = fragments.newest(key, as_of)
    if fragments.stack(key)[:1] == (newest,):
        return None
    limit = limit_of((newest,)) if newest else UNLIMITED
    value = engine.find(key, rest_of(as_of), limit)
    return None if value is ABSENT else value


def values_at(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments
) -> list[bytes | None]:
    """The values of `keys` at `as_of` in a store without imports. One seek a key."""
    ticket, reader = engine.borrow()
    rest, (limits, depth) = rest_of(as_of), fragments.tree
    absent = ABSENT if fragments else None
    found = find_many(reader, engine.check, keys, rest, limits, depth, absent)
    engine.give_back(ticket, reader)
    if fragments:
        for at, value in enumerate(found):
            if value is ABSENT:
                found[at] = value_below(engine, keys[at], as_of, fragments)
    return cast("list[bytes | None]", found)


def values_among_imports(
    engine: Engine, keys: Sequence[bytes], as_of: int, fragments: Fragments, stamps: Stamps
) -> list[bytes | None]:
    """The values of `keys` at `as_of` in a store with imports. Usually a seek and a step a key."""
    ticket, reader = engine.borrow()
    found = find_among(reader, engine.check, keys, as_of, rest_of(as_of), stamps)
    engine.give_back(ticket, reader)
    if not fragments:
        return [value for _, value in found]
    return [
        None if fragments.newest(key, as_of) > time else value
        for key, (time, value) in zip(keys, found, strict=True)
    ]
