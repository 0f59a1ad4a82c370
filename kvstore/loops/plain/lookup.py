"""Look-ups: the value of one key, or of many, in the entries of `data`.

`kvstore/mvcc/lookup.py` draws the stretch of entries in which a look-up searches: from the escaped
key with `rest` behind it, to below the escaped key with a limit behind it. Where range tombstones
lie, each piece of the key space between two boundaries has a limit of its own. `limits` is the
tree of these (see `LimitNode`), which is `depth` steps deep.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    TAIL_BYTES,
    TOMBSTONE,
    UNLIMITED,
    decode_suffix,
    encode_suffix,
    require_entry,
)
from kvstore.codec.ordered import TERMINATOR, escape
from kvstore.limits import KEY_BYTES_MAX
from kvstore.loops.contract import ABSENT, Absent, Found, Frontiers, LimitNode, Seeker
from kvstore.loops.plain.newest import NewestValues as NewestValues
from kvstore.timestamp import OTHER_UNITS_MAX, Timestamp


class _Lending:
    """Readers that may answer the same look-ups: all keys but `written` have in each reader the
    entries that they have now. `size` counts the bytes of the writes that are noted."""

    __slots__ = ("idle", "is_used", "size", "written")

    def __init__(self) -> None:
        self.idle: list[Any] = []
        self.written: set[bytes] = set()
        self.size = 0
        self.is_used = False


class Readers:
    """Readers kept between look-ups: moving a reader costs less than making one.

    `make` returns a new reader. `check` raises the error that left a reader without an entry. At
    most `most` readers are kept.

    A reader does not see later writes. It may answer for keys that no later write concerns, so
    `outlive` notes the keys of a commit, and the readers stay. Every other write drops them.
    """

    def __init__(self, make: Callable[[], Any], check: Callable[[Any], None], most: int) -> None:
        self._make = make
        self._check = check
        self._most = most
        # `renew` replaces this object. A reader that is given back later goes into the list that
        # lent it, from which no look-up takes any more.
        self._now = _Lending()

    def renew(self) -> None:
        """Drop all readers made so far: they do not see the write that was just made."""
        self._now = _Lending()

    def outlive(self, points: Mapping[bytes, bytes | None], bytes_max: int) -> None:
        """Keep the readers over the write that was just made, which has the versions `points` and
        nothing else. Drops them once such writes have more than `bytes_max` bytes."""
        now = self._now
        if not now.is_used:
            return
        for key, value in points.items():
            now.written.add(key)
            now.size += len(key) + len(value or b"")
            if now.size > bytes_max:
                self.renew()
                return

    def borrow(self) -> tuple[list[Any], Any]:
        """A ticket to give the reader back with, and a reader that sees all writes so far."""
        if self._now.written:
            self.renew()
        now = self._now
        return now.idle, self._taken(now)

    def give_back(self, ticket: list[Any], reader: Any) -> None:
        """Return what `borrow` gave."""
        if len(ticket) < self._most:
            ticket.append(reader)

    def find(self, key: bytes, rest: bytes, limit: bytes) -> Found:
        """The value of the first entry of `key` from `rest` on and below `limit`: None where the
        entry is a tombstone, `ABSENT` where there is no entry."""
        if key in self._now.written:
            self.renew()
        now = self._now
        reader = self._taken(now)
        (value,) = find_many(reader, self._check, [key], rest, ([], [limit]), 0, ABSENT)
        self.give_back(now.idle, reader)
        return value

    def _taken(self, now: _Lending) -> Any:
        now.is_used = True  # before a reader is made: `outlive` notes each write behind that
        try:
            return now.idle.pop()
        except IndexError:
            return self._make()


class Lookup:
    """`get` among the range tombstones and imports that `show` was last given.

    `engine` lends the readers. `slowly` answers two questions that one search cannot: whether a
    range tombstone above the time of the read hides one below it, and what a key has where imports
    and range tombstones meet. `newest` keeps the values of keys that are asked for again.
    """

    def __init__(
        self,
        engine: Any,
        slowly: Callable[[bytes, int], bytes | None],
        newest: NewestValues | None = None,
    ) -> None:
        self._engine = engine
        self._slowly = slowly
        self._newest = newest if newest is not None and newest.most else None
        self.show(([], [UNLIMITED]), 0, {})

    def show(self, limits: LimitNode, depth: int, stamps: Mapping[bytes, tuple[int, int]]) -> None:
        """Use these limits and imports from the next look-up on."""
        self._view = limits, depth, stamps

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`, None where it is absent or deleted."""
        newest = self._newest
        if newest is None:
            return self._searched(key, as_of)
        value = newest.get(key, as_of)
        if value is None:
            value = self._searched(key, as_of)
            if type(value) is bytes:
                newest.keep(key, value, as_of)
        return value

    def _searched(self, key: bytes, as_of: int) -> bytes | None:
        limits, depth, stamps = self._view
        engine, rest = self._engine, TERMINATOR + encode_suffix(as_of)
        if stamps and (depth or limits[0]):
            return self._slowly(key, as_of)
        if stamps:
            ticket, reader = engine.borrow()
            ((_, value),) = find_among(reader, engine.check, [key], as_of, rest, stamps)
            engine.give_back(ticket, reader)
            return value
        limit = _limit(limits, depth, key)
        found: Found = engine.find(key, rest, limit)
        if found is ABSENT:
            return None if limit == UNLIMITED else self._slowly(key, as_of)
        return found


class PointRead:
    """`Store.get` for the common case: a key of bytes, a readable time, a healthy store. Passes
    every other call on to `otherwise`, which checks its arguments and raises."""

    def __init__(
        self,
        lookup: Lookup,
        frontiers: Frontiers,
        otherwise: Callable[[Any, Any, Any], Any],
    ) -> None:
        self._lookup = lookup
        self._frontiers = frontiers
        self._otherwise = otherwise

    def get(self, key: Any, as_of: Any = None, default: Any = None) -> Any:
        """The value of `key` at `as_of`, `default` where it is absent or deleted. One seek."""
        frontiers = self._frontiers
        at = as_of
        if type(key) is bytes and len(key) <= KEY_BYTES_MAX and frontiers.is_healthy:
            if as_of is None:
                at = frontiers.upper - 1
            elif not (
                (type(as_of) is Timestamp or (type(as_of) is int and as_of > OTHER_UNITS_MAX))
                and frontiers.since <= as_of < frontiers.upper
            ):
                return self._otherwise(key, as_of, default)
            value = self._lookup.get(key, at)
            if at >= frontiers.floor:
                return default if value is None else value
        return self._otherwise(key, as_of, default)


def are_keys(keys: list[Any]) -> bool:
    """Whether each of `keys` is `bytes` that a store takes as a key."""
    return all(type(key) is bytes and len(key) <= KEY_BYTES_MAX for key in keys)


def find_many(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    rest: bytes,
    limits: LimitNode,
    depth: int,
    absent: Literal[Absent.ABSENT] | None,
) -> list[Found]:
    """The answers of `Readers.find` for `keys`, in the order given; `absent` for a key that has no
    entry.

    Seeks in key order, which takes half the time of seeking in any other order.
    """
    found: dict[bytes, Found] = {}
    for key in sorted(keys):
        escaped = escape(key)
        reader.seek(escaped + rest)
        stored = reader.key()
        if stored is None:
            check(reader)
            found[key] = absent
        elif stored < escaped + _limit(limits, depth, key):
            require_entry(stored, escaped)
            found[key] = None if stored[-1:] == TOMBSTONE else reader.value()
        else:
            found[key] = absent
    return [found[key] for key in keys]


def find_among(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    as_of: int,
    rest: bytes,
    stamps: Mapping[bytes, tuple[int, int]],
) -> list[tuple[int, bytes | None]]:
    """For each of `keys`, in a store with imports: the time and the value of the newest entry that
    a read at `as_of` sees. The time is -1 where there is no entry, the value None where it is a
    tombstone.

    Mostly takes one seek and one step a key. Seeks in key order.
    """
    found = {key: _newest(reader, check, key, as_of, rest, stamps) for key in sorted(keys)}
    return [found[key] for key in keys]


def _limit(limits: LimitNode, depth: int, key: bytes) -> bytes:
    node: Any = limits
    for _ in range(depth + 1):
        node = node[1][bisect_right(node[0], key)]
    return cast("bytes", node)


def _newest(
    reader: Seeker,
    check: Callable[[Any], None],
    key: bytes,
    as_of: int,
    rest: bytes,
    stamps: Mapping[bytes, tuple[int, int]],
) -> tuple[int, bytes | None]:
    escaped = escape(key)
    end = escaped + UNLIMITED
    newest, value = -1, None
    reader.seek(escaped + TERMINATOR)
    found = reader.key()
    while found is not None and found < end:
        require_entry(found, escaped)
        lifetime = stamps.get(found[-TAIL_BYTES:-1])
        if lifetime is not None:
            added, reverted = lifetime
            if newest < added <= as_of < reverted:
                newest, value = added, reader.value() if found[-1] else None
            reader.next()
        elif found >= escaped + rest:
            timestamp = decode_suffix(found[-TAIL_BYTES:-1])
            if timestamp > newest:
                newest, value = timestamp, reader.value() if found[-1] else None
            break
        elif found[-TAIL_BYTES:] >= FIRST_TIMED_SUFFIX:
            reader.seek(escaped + rest)
        else:  # of an import that this read does not know
            reader.next()
        found = reader.key()
    if found is None:
        check(reader)
    return newest, value
