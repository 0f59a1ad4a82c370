"""Writes: the puts that a commit collects, and the entries that it makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.codec.keys import TOMBSTONE, VALUE
from kvstore.codec.ordered import TERMINATOR, escape
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX


class Puts:
    """Point writes as they are collected.

    `points` maps each key to its new value, None for a delete. `size` counts the bytes of all keys
    and values that were written; a key that is written twice counts twice. `put` accepts a plain
    write while `size` is at most `size_max`, and passes every other write on to `put_otherwise`,
    which a subclass defines.
    """

    __slots__ = ("points", "size", "size_max")

    def __init__(self) -> None:
        self.points: dict[bytes, bytes | None] = {}
        self.size = 0
        self.size_max = sys.maxsize

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key wins."""
        if (
            self.size > self.size_max
            or type(key) is not bytes
            or type(value) is not bytes
            or len(key) > KEY_BYTES_MAX
            or len(value) > VALUE_BYTES_MAX
        ):
            self.put_otherwise(key, value)
            return
        self.points[key] = value
        self.size += len(key) + len(value)

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
