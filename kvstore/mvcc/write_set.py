"""The writes of one batch, and the entries they become at one timestamp.

Invariants
1. The last write to a key wins; a range delete drops the batch's own earlier writes inside it.
2. `size` counts every write: the methods are the only way into a set.
3. The range deletes of a sealed batch are disjoint, ascending and as long as possible, and no point
   delete lies inside one. Two batches with the same effect are stored alike.
4. Only the last write to a key decides whether the key expires.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

from kvstore.base.arguments import require_value
from kvstore.base.span import RESERVED, Span, require_key
from kvstore.codec.keys import encode_range_key, encode_suffix, escape
from kvstore.engine.api import DATA, RANGES, WriteBatch
from kvstore.errors import ClosedError, UsageError, printable
from kvstore.loops.writes import Puts, put_all
from kvstore.mvcc.expiry_records import Due, carried_key, encode_due, longest_key, waiting_key
from kvstore.mvcc.fragments import RangeTombstone


def require_plain(key: bytes) -> None:
    """Raise `UsageError` for a key, or the start of a span, that belongs to tables."""
    if key >= RESERVED:
        raise UsageError(
            f"key {printable(key)} belongs to tables",
            "use the calls of the table, or choose a key that does not begin with nine bytes ff",
        )


class WriteSet(Puts):
    """Puts, deletes and range deletes that take effect together, in the order they were made.

    `whose` names the owner in error messages. The set accepts writes until it holds more than
    `size_max` bytes. A negative `size_max` marks a set that was committed or rolled back.
    """

    __slots__ = ()

    expiring: dict[bytes, ExpiringPut] | None
    """The keys whose last put expires."""

    is_plain: ClassVar[bool] = True
    """Whether the keys of tables are refused. Tables write theirs with `put_rows`."""

    def __bool__(self) -> bool:
        return bool(self._points or self._ranges)

    def told(self) -> str:
        """How much is in the set, in words."""
        count = len(self._points) + len(self._ranges)
        return f"{count} {'write' if count == 1 else 'writes'}, {self.size} bytes"

    def require_open(self) -> None:
        """Raise `ClosedError` after the end, `UsageError` where no more writes fit."""
        if self.size_max < 0:
            raise ClosedError(self.whose)
        if self.size > self.size_max:
            raise UsageError(
                f"{self.whose} holds {self.size} bytes, at most {self.size_max} fit",
                "commit smaller ones, or import the data (bulk.Import)",
            )

    def put_otherwise(self, key: bytes, value: bytes) -> None:
        self.require_open()
        key, value = self._require_own(key), require_value(value)
        self._points[key] = value
        self._size += len(key) + len(value)
        if self.expiring is not None:
            self.expiring.pop(key, None)

    def put_expiring(self, key: bytes, value: bytes, due: int) -> None:
        """Set `key` to `value` until the time `due`."""
        self.put(key, value)
        key = bytes(key)
        self._require_expiring(key)
        self._expire(key, due)

    def _require_expiring(self, key: bytes) -> None:
        if len(key) > longest_key():
            raise UsageError(
                f"key has {len(key)} bytes, and one that expires at most {longest_key()}",
                "use a shorter key, or delete it yourself",
            )

    def _expire(self, key: bytes, due: int, row: bytes = b"") -> None:
        if self.expiring is None:
            self.expiring = {}
        self.expiring[key] = ExpiringPut(due, row)

    def schedule(self, timestamp: int) -> int | None:
        """Add the records of the keys that expire, for a commit at `timestamp`; returns the least
        due time. A time that has passed is due right after the commit."""
        least = None
        for key, (due, row) in (self.expiring or {}).items():
            if self._points.get(key) is None:  # it was deleted since
                continue
            at = Due(max(due, timestamp + 1))
            carried, waiting = carried_key(key), waiting_key(at, key)
            self._points[carried] = encode_due(at)
            self._points[waiting] = row
            self._size += 2 * len(waiting) + len(row)
            least = at.time if least is None else min(least, at.time)
        self.expiring = None
        return least

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it exists."""
        self.require_open()
        self._points[self._require_own(key)] = None
        self._size += len(key)

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        due: int | list[int | None] | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table, until the time `due` if there is one, or each until its own one of
        a list. `rows` has, for each key, the row with which it expires, and is empty for a row
        itself."""
        self.require_open()
        dues = due if isinstance(due, list) else repeat(due, len(keys))
        if due is not None:
            for key, at in zip(keys, dues, strict=True):
                if at is not None:
                    self._require_expiring(key)
        self._points.update(zip(keys, values, strict=True))
        self._size += sum(map(len, keys)) + sum(map(len, values))
        if self.expiring is not None:
            for key in keys:
                self.expiring.pop(key, None)
        if due is not None:
            dues = due if isinstance(due, list) else repeat(due, len(keys))
            for key, at, row in zip(keys, dues, rows, strict=True):
                if at is not None:
                    self._expire(key, at, row)
        self._require_room()

    def delete_rows(self, keys: Iterable[bytes]) -> None:
        """Delete keys of a table, whether or not they exist."""
        self.require_open()
        for key in keys:
            self._points[key] = None
            self._size += len(key)
        self._require_room()

    def delete_range(
        self, start: bytes | None, end: bytes | None, prefix: bytes | None = None
    ) -> None:
        """Delete all keys `start <= key < end`, or all with `prefix`. Drops the earlier writes of
        this set inside the range."""
        self.require_open()
        span = Span.to_delete(start, end, prefix)
        if self.is_plain:
            self._require_own(span.start)
            span = span.plain()
        assert span.end is not None, "it ends where tables begin, or before"
        self.delete_row_range(span.start, span.end)

    def delete_row_range(self, start: bytes, end: bytes) -> None:
        """As `delete_range`, of keys of a table."""
        self.require_open()
        for key in [key for key in self._points if start <= key < end]:
            del self._points[key]
        self._add_range(start, end)

    def delete_range_below(self, start: bytes, end: bytes) -> None:
        """As `delete_range`, but for any keys, and the earlier writes inside the range stay. For a
        replica, which takes the parts of a sealed batch in any order."""
        self.require_open()
        self._add_range(start, end)

    def _require_own(self, key: object) -> bytes:
        """`key`, if it can be stored and does not belong to tables."""
        found = require_key(key)
        if self.is_plain:
            require_plain(found)
        return found

    def _require_room(self) -> None:
        """Raise `UsageError` for more than fits, which `put` would find at the next write."""
        if self.size > self.size_max:
            self.require_open()

    def _add_range(self, start: bytes, end: bytes) -> None:
        self._ranges.append((start, end))
        self._size += len(start) + len(end)

    def seal(self) -> None:
        """Bring the set into the form that is stored. O((ranges + points) log ranges)."""
        if not self._ranges:
            return
        disjoint: list[tuple[bytes, bytes]] = []
        for start, end in sorted(self._ranges):
            if disjoint and start <= disjoint[-1][1]:
                disjoint[-1] = (disjoint[-1][0], max(end, disjoint[-1][1]))
            else:
                disjoint.append((start, end))
        self._ranges = disjoint
        starts = [start for start, _ in disjoint]
        for key in [key for key, value in self._points.items() if value is None]:
            index = bisect.bisect_right(starts, key) - 1
            if index >= 0 and key < disjoint[index][1]:
                del self._points[key]

    def tombstones(self, timestamp: int) -> list[RangeTombstone]:
        """The sealed batch's range deletes at `timestamp`."""
        return [RangeTombstone(start, end, timestamp) for start, end in self._ranges]


class ExpiringPut(NamedTuple):
    """The time at which the put of a key expires, and the row with which it does, as `put_rows` has
    it."""

    due: int
    row: bytes


class OpenWriteSet(WriteSet):
    """The writes of a copy, or of a part that keeps reserved keys: every key is allowed."""

    __slots__ = ()

    is_plain: ClassVar[bool] = False


def stage(batch: WriteBatch, writes: WriteSet, timestamp: int, families: Mapping[str, Any]) -> None:
    """Add the entries of a sealed write set at `timestamp` to an engine batch."""
    put_all(batch.put, writes.points, encode_suffix(timestamp), families[DATA])
    if writes.ranges:
        stage_tombstones(batch, writes.tombstones(timestamp), families)


def stage_tombstones(
    batch: WriteBatch, tombstones: Iterable[RangeTombstone], families: Mapping[str, Any]
) -> None:
    """Add range tombstones, each at its own timestamp, to an engine batch."""
    for start, end, timestamp in tombstones:
        batch.put(encode_range_key(start, timestamp), escape(end), families[RANGES])
