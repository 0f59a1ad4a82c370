"""Look-ups: the value of one key, or of many, at one time, through a reader of `data`.

These are hot. In units of a raw get of a key in no order: the seek on a kept reader, key and
value taken, costs 0.7, what is around it 0.25; sought in key order, 0.5 and 0.15. So what would
be a line of its own elsewhere (framing, encoding and decoding of suffixes) is written out here.

Invariants
1. Without imports nothing sorts before the versions of a key, newest first: the first entry at or
   above `stem | suffix of the time` is the one, if it is an entry of the key.
2. Among imports the references come first, and each may be newer than any version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    TAIL_BYTES,
    U64_MAX,
    decode_suffix,
    encode_suffix,
)
from kvstore.codec.ordered import TERMINATOR
from kvstore.engine.api import Reader
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.version import Stamps

_from_bytes = int.from_bytes


class Bound(NamedTuple):
    """A time, and what follows the escaped key of the newest version at or below it. Reads of
    one time share it."""

    as_of: int
    rest: bytes

    @classmethod
    def of(cls, as_of: int) -> Bound:
        """The bound of reads at `as_of`."""
        return cls(as_of, TERMINATOR + encode_suffix(as_of))


Check: TypeAlias = "Callable[[Reader], None]"
"""`Engine.check`: raises where a position is not valid because of a failure."""


def value_at(
    reader: Reader, check: Check, key: bytes, bound: Bound, fragments: Fragments, stamps: Stamps
) -> bytes | None:
    """The value of `key` at a time, None where it is absent or deleted. One seek."""
    escaped = key.replace(b"\x00", b"\x00\xff")
    if stamps:
        return _among_imports(reader, check, key, escaped, bound, fragments, stamps)
    reader.seek(escaped + bound.rest)
    found = reader.key()
    if found is None:
        check(reader)
        return None
    if not (found.startswith(escaped + TERMINATOR) and found[-1]):
        return None
    if fragments:
        deleted_at = fragments.newest(key, bound.as_of)
        if deleted_at and U64_MAX - _from_bytes(found[-TAIL_BYTES:-1], "big") < deleted_at:
            return None
    return reader.value()


def values_at(
    reader: Reader,
    check: Check,
    keys: Sequence[bytes],
    bound: Bound,
    fragments: Fragments,
    stamps: Stamps,
) -> list[bytes | None]:
    """As `value_at` of each of `keys`, which ascend."""
    if stamps or fragments:
        return [value_at(reader, check, key, bound, fragments, stamps) for key in keys]
    seek, key_here, value_here = reader.seek, reader.key, reader.value
    rest = bound.rest
    values: list[bytes | None] = []
    add = values.append
    for key in keys:
        # A key without zero bytes comes back from `replace` as it is: no copy is made.
        escaped = key.replace(b"\x00", b"\x00\xff")
        seek(escaped + rest)
        found = key_here()
        if found is None:
            check(reader)
            add(None)
        elif found.startswith(escaped + TERMINATOR) and found[-1]:
            add(value_here())
        else:
            add(None)
    return values


def _among_imports(
    reader: Reader,
    check: Check,
    key: bytes,
    escaped: bytes,
    bound: Bound,
    fragments: Fragments,
    stamps: Stamps,
) -> bytes | None:
    newest, value = _newest_entry(reader, check, escaped + TERMINATOR, bound, stamps)
    if value is not None and fragments and fragments.newest(key, bound.as_of) > newest:
        return None
    return value


def _newest_entry(
    reader: Reader, check: Check, stem: bytes, bound: Bound, stamps: Stamps
) -> tuple[int, bytes | None]:
    """Time and value (None for a tombstone) of the entry that shows."""
    as_of, least = bound.as_of, bound.rest[len(TERMINATOR) :]
    newest, value = -1, None
    reader.seek(stem)
    while (found := reader.key()) is not None and found.startswith(stem):
        tail = found[-TAIL_BYTES:]
        if tail >= least:
            timestamp = decode_suffix(tail[:-1])
            if timestamp > newest:
                return timestamp, reader.value() if tail[-1] else None
            return newest, value
        if tail >= FIRST_TIMED_SUFFIX:
            reader.seek(stem + least)
            continue
        lifetime = stamps.get(tail[:-1])
        if lifetime is not None and newest < lifetime.added <= as_of < lifetime.reverted:
            newest, value = lifetime.added, reader.value() if tail[-1] else None
        reader.next()
    if found is None:
        check(reader)
    return newest, value
