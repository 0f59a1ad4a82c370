"""Writes: the puts that a commit collects, and the entries that it makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.codec.keys import TOMBSTONE, VALUE
from kvstore.codec.ordered import TERMINATOR, escape
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.span import RESERVED


class Puts:
    """Writes as they are collected.

    `put` accepts a plain write while `size` is at most `size_max`, and passes every other write on
    to `put_otherwise`, which a subclass defines. Only the methods of a subclass change `_points`,
    `_ranges` and `_size`, so that the size counts each write.
    """

    __slots__ = ("_points", "_ranges", "_size", "_size_max")

    def __init__(self, size_max: int = sys.maxsize) -> None:
        self._points: dict[bytes, bytes | None] = {}
        self._ranges: list[tuple[bytes, bytes]] = []
        self._size = 0
        self._size_max = size_max

    @property
    def points(self) -> Mapping[bytes, bytes | None]:
        """Each key's new value, None for a delete."""
        return self._points

    @property
    def ranges(self) -> Sequence[tuple[bytes, bytes]]:
        """The range deletes: `start` and `end` of each."""
        return self._ranges

    @property
    def size(self) -> int:
        """The bytes of all keys and values that were written; a key that is written twice counts
        twice."""
        return self._size

    @property
    def size_max(self) -> int:
        """Above this size `put` accepts no write."""
        return self._size_max

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key wins."""
        if (
            self._size > self._size_max
            or type(key) is not bytes
            or type(value) is not bytes
            or len(key) > KEY_BYTES_MAX
            or key >= RESERVED
            or len(value) > VALUE_BYTES_MAX
        ):
            self.put_otherwise(key, value)
            return
        self._points[key] = value
        self._size += len(key) + len(value)

    def put_otherwise(self, key: bytes, value: bytes) -> None:
        """Check `key` and `value` closely. Set `key` to `value`, or raise."""
        raise NotImplementedError


def put_all(
    put: Callable[[bytes, bytes, Any], None],
    points: Mapping[bytes, bytes | None],
    suffix: bytes,
    family: Any,
) -> None:
    """Call `put` with the entry of each point at the time of `suffix`; the entry of None is a
    tombstone. Goes in key order, which takes the memtable half the time of any other order."""
    value_tail = TERMINATOR + suffix + VALUE
    tombstone_tail = TERMINATOR + suffix + TOMBSTONE
    for key in sorted(points):
        value = points[key]
        if value is None:
            put(escape(key) + tombstone_tail, b"", family)
        else:
            put(escape(key) + value_tail, value, family)
