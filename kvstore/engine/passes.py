"""Readers and cursors of the memory engine: passes over an edition that they hold.

Invariants
1. A pass shows the edition with which it was made. Later writes do not appear.
2. Once the engine is closed, every call raises `ClosedError`, so a pass never ends early.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from kvstore.engine.api import next_count
from kvstore.engine.editions import Edition, SortedChunk
from kvstore.errors import ClosedError
from kvstore.limits import SCAN_CHUNK
from kvstore.loops.live import Live


class Owner(Protocol):
    """The calls that a pass makes on its engine."""

    is_closed: bool

    def require_open(self) -> None:
        """Raise `ClosedError` once the engine is closed."""
        ...

    def release(self, edition: Edition) -> None:
        """Count one holder of `edition` less."""
        ...


class MemoryReader:
    """A position in one edition of `data`."""

    __slots__ = ("_at", "_engine", "_index", "_keys", "edition")

    def __init__(self, engine: Owner, edition: Edition) -> None:
        self.edition = edition
        self._engine = engine
        self._at = 0
        self._index = 0
        self._keys: list[bytes] = []

    def seek(self, key: bytes) -> None:
        if self._engine.is_closed:
            self._engine.require_open()
        # Hot: each look-up does this. As `Edition.position`, without its call and its pair.
        edition = self.edition
        self._at = at = bisect_right(edition.firsts, key) - 1
        self._keys = keys = edition.chunks[at].keys
        self._index = index = bisect_left(keys, key)
        if index >= len(keys):
            self._settle()

    def seek_for_prev(self, key: bytes) -> None:
        self.seek(key)
        if self.key() != key:
            self.prev()

    def next(self) -> None:
        self._engine.require_open()
        self._index += 1
        self._settle()

    def prev(self) -> None:
        self._engine.require_open()
        if self._index > 0:
            self._index -= 1
        elif self._at > 0:
            self._at -= 1
            self._keys = self.edition.chunks[self._at].keys
            self._index = len(self._keys) - 1
        else:
            self._keys = []

    def status(self) -> None:
        self._engine.require_open()

    def key(self) -> bytes | None:
        keys, index = self._keys, self._index
        return keys[index] if index < len(keys) else None

    def value(self) -> bytes:
        return self.edition.chunks[self._at].values[self._index]

    def _settle(self) -> None:
        """Move from behind the last entry of a chunk to the first entry of the next chunk."""
        chunks = self.edition.chunks
        self._keys = chunks[self._at].keys
        if self._index >= len(self._keys) and self._at + 1 < len(chunks):
            self._at, self._index = self._at + 1, 0
            self._keys = chunks[self._at].keys


class MemoryCursor:
    """A pass over one span of one edition, in slices of its chunks."""

    def __init__(
        self,
        engine: Owner,
        edition: Edition,
        start: bytes,
        end: bytes | None,
        *,
        reverse: bool,
    ) -> None:
        self._engine = engine
        self._edition: Edition | None = edition
        self._low = edition.position(start)
        self._high = edition.end() if end is None else edition.position(end)
        self._reverse = reverse
        self._is_done = False
        self._fitting = SCAN_CHUNK  # entries, by the size of the values before

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        self._engine.require_open()
        keys: list[bytes] = []
        values: list[bytes] = []
        edition = self._edition
        if edition is None:
            if not self._is_done:
                raise ClosedError("the scan")
            return keys, values
        take_slice = self._descend if self._reverse else self._ascend
        while len(keys) < count and self._low < self._high:
            chunk, part = take_slice(edition, count - len(keys))
            keys += chunk.keys[part]
            values += chunk.values[part]
        if not keys and count > 0:
            self.close()
            self._is_done = True
        return keys, values

    def feed(self, live: Live, count: int) -> bool:
        keys, values = self.take(min(count, self._fitting))
        self._fitting = next_count(values, SCAN_CHUNK)
        live.pass_over(zip(keys, values, strict=True), len(keys))
        if live.ahead is not None:
            self._go(*live.ahead)
        return bool(keys)

    def _go(self, target: bytes, is_floor: bool) -> None:
        assert self._edition is not None
        at, index = self._edition.position(target)
        if not self._reverse:
            self._low = at, index
        elif is_floor:
            self._high = at, index
        else:
            chunk = self._edition.chunks[at]
            self._high = (at, index + 1) if index < len(chunk.keys) else (at + 1, 1)

    def close(self) -> None:
        edition, self._edition = self._edition, None
        self._is_done = False
        if edition is not None:
            self._engine.release(edition)

    def _ascend(self, edition: Edition, count: int) -> tuple[SortedChunk, slice]:
        (at, index), (last, end) = self._low, self._high
        chunk = edition.chunks[at]
        stop = min(index + count, end if at == last else len(chunk.keys))
        is_used_up = at < last and stop == len(chunk.keys)
        self._low = (at + 1, 0) if is_used_up else (at, stop)
        return chunk, slice(index, stop)

    def _descend(self, edition: Edition, count: int) -> tuple[SortedChunk, slice]:
        (first, start), (at, stop) = self._low, self._high
        chunk = edition.chunks[at]
        index = max(stop - count, start if at == first else 0)
        is_used_up = at > first and index == 0
        self._high = (at - 1, len(edition.chunks[at - 1].keys)) if is_used_up else (at, index)
        if not stop:  # the pass ends before the first key of this chunk
            return chunk, slice(0)
        return chunk, slice(stop - 1, index - 1 if index else None, -1)
