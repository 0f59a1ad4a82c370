"""A page of live keys at one time, in a bounded number of entries and bytes.

With a delimiter, keys that share the bytes up to it become one row, a group, as the folders of a
file system. A group costs one seek, whatever it contains.

Invariants
1. A page passes `BROWSE_ENTRIES_MAX` entries and `BROWSE_BYTES_MAX` bytes, and one chunk more.
2. Each page takes its reader further: its `next` is above its start, or it is the last one.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.browsing.excerpt import Excerpt
from kvstore.codec.keys import KEY_BYTES_LEAST
from kvstore.codec.ordered import unescape
from kvstore.limits import BROWSE_BYTES_MAX, BROWSE_CHUNK, BROWSE_ENTRIES_MAX, BROWSE_VALUE_BYTES
from kvstore.mvcc import Versions
from kvstore.span import Span, prefix_end


class KeyRow(NamedTuple):
    """A live key with the beginning of its value. A group of keys has no value: `key` is the bytes
    that they share, up to the delimiter."""

    key: bytes
    value: Excerpt | None


class KeyPage(NamedTuple):
    """Some rows in key order. `next` is the first key of the page behind, None behind the last one.
    A page `is_cut` if it met a bound before it was full."""

    rows: list[KeyRow]
    next: bytes | None
    is_cut: bool
    passed: int
    """The entries that were read for the page, at most."""


class Folders(NamedTuple):
    """How keys become groups: keys below `prefix` that contain the delimiter behind it."""

    prefix: bytes
    delimiter: bytes

    def group_of(self, key: bytes) -> bytes | None:
        """The group of `key`, None for a key that is its own row."""
        at = key.find(self.delimiter, len(self.prefix))
        return None if at < 0 else key[: at + len(self.delimiter)]


def key_page(
    versions: Versions, span: Span, as_of: int, *, limit: int, fold: Folders | None = None
) -> KeyPage:
    """The first `limit` rows of `span` at `as_of`."""
    return _Filling(versions, as_of, limit, fold).fill(span)


class _Filling:
    """A page that is being made."""

    def __init__(self, versions: Versions, as_of: int, limit: int, fold: Folders | None) -> None:
        self._versions, self._as_of, self._fold = versions, as_of, fold
        self._limit = limit
        self._rows: list[KeyRow] = []
        self._passed = self._bytes = 0

    def fill(self, span: Span) -> KeyPage:
        start: bytes | None = span.start
        while start is not None and len(self._rows) < self._limit:
            if span.end is not None and start >= span.end:
                start = None
            elif self._is_spent and (self._rows or start > span.start):
                return self._page(start, is_cut=True)
            else:
                start = self._pass(Span(start, span.end))
        return self._page(start)

    @property
    def _is_spent(self) -> bool:
        return self._passed >= BROWSE_ENTRIES_MAX or self._bytes >= BROWSE_BYTES_MAX

    def _page(self, following: bytes | None, *, is_cut: bool = False) -> KeyPage:
        return KeyPage(self._rows, following, is_cut, self._passed)

    def _pass(self, span: Span) -> bytes | None:
        """Take rows from the start of `span` on, up to the end of the page or of a group. Returns
        the key to continue at; None at the end of the span."""
        cursor, live = self._versions.live_pass(span, self._as_of)
        count = BROWSE_CHUNK if self._fold is None else BROWSE_CHUNK // 8 or 1
        try:
            while True:
                has_more = cursor.feed(live, count)
                self._passed += count
                count = BROWSE_CHUNK
                if not has_more:
                    live.end()
                for key, value in zip(*live.found(), strict=True):
                    self._bytes += len(value)
                    following = self._take(key, value)
                    if following != key or len(self._rows) == self._limit:
                        return following if following != key else key + b"\x00"
                if not has_more:
                    return None
                if self._is_spent:
                    return self._behind(live.last, span.start)
        finally:
            cursor.close()

    def _take(self, key: bytes, value: bytes) -> bytes | None:
        """Add the row of `key`. Returns `key`, or for a group the first key behind the group."""
        group = None if self._fold is None else self._fold.group_of(key)
        if group is None:
            self._rows.append(KeyRow(key, Excerpt.of(value, BROWSE_VALUE_BYTES)))
            return key
        self._rows.append(KeyRow(group, None))
        return prefix_end(group)

    def _behind(self, last: bytes | None, start: bytes) -> bytes | None:
        """Where to continue a pass whose last stored key is `last`: at its user key, of which the
        pass may have decided nothing yet. A key that takes a whole pass is looked up."""
        assert last is not None, "a pass with more entries has passed one"
        key = unescape(last[:-KEY_BYTES_LEAST])
        if key > start:
            return key
        value = self._versions.get(key, self._as_of)
        following = key if value is None else self._take(key, value)
        return following if following != key else key + b"\x00"
