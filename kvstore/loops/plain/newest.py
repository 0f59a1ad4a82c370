"""The newest values of keys that are read again and again, kept in memory between look-ups.

    get     asks for the value of a key at a time
    keep    offers a value that a look-up has found
    note    tells of a commit: its time, its points, and the spans in which it may have written

A kept value has the time of the read that found it, or of the commit that wrote it, and answers
every read at or after that time. It leaves, or is replaced, with the first commit that writes its
key.

Invariants
1. `note` is called for each commit after the engine has taken its entries and before a read can ask
   for its time, in the order of commits. Nothing is kept before the first `note`.
2. A value is kept only if its read was at or above the time of the newest `note`: the look-up then
   saw every commit that was noted, and `note` will tell of every later one. So a kept value is the
   newest value of its key, except below the time that it has.
3. A write to a span leaves the kept values in place. A value that was last looked at before this
   write is compared with the span at its next use. The last `SPANS_MAX` writes are remembered; a
   value that is older than these is dropped.
4. `size`, which counts `ENTRY_BYTES` for the objects of each value, stays at or below `most`. Above
   it the values that were not used since the last turn leave first (the clock algorithm: Corbató,
   "A paging experiment with the Multics system", 1969).
5. A key is let in when it is asked for a second time: one pass over many keys leaves what is kept
   in place. `_asked` remembers some bits of the keys that were asked for once (the doorkeeper of
   Einziger, Friedman and Manes, "TinyLFU", 2017).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.timestamp import TIMESTAMP_MAX

ENTRY_BYTES: Final = 320
"""Bytes of the objects of a kept value, beside its bytes and those of its key."""

SPANS_MAX: Final = 64

_BYTES_PER_SLOT: Final = 1024
_LARGEST_PART: Final = 16


class _Kept:
    """A kept value, the time from which it is newest, and the writes to spans up to which this is
    known: one tuple, which a reader takes at once. The value is None once it has left; its place in
    the ring is then free."""

    __slots__ = ("is_used", "key", "state")

    def __init__(self, key: bytes, value: bytes, since: int, spans: int) -> None:
        self.key = key
        self.state: tuple[bytes | None, int, int] = value, since, spans
        self.is_used = False


class NewestValues:
    """At most `most` bytes of newest values. 0 keeps none."""

    __slots__ = (
        "_asked",
        "_hand",
        "_kept",
        "_lock",
        "_ring",
        "_spans",
        "_spans_noted",
        "_touched",
        "hits",
        "misses",
        "most",
        "size",
    )

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self.hits = 0
        self.misses = 0
        self._kept: dict[bytes, _Kept] = {}
        self._ring: list[_Kept] = []
        self._hand = 0
        self._spans: list[tuple[bytes, bytes | None]] = []
        self._spans_noted = 0
        self._touched = TIMESTAMP_MAX
        self._asked: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`, None where it is not kept."""
        kept = self._kept.get(key)
        if kept is not None:
            value, since, spans = kept.state
            if as_of >= since and (spans == self._spans_noted or self._is_current(kept)):
                kept.is_used = True
                self.hits += 1
                return value
        self.misses += 1
        return None

    def keep(self, key: bytes, value: bytes, as_of: int) -> None:
        """Offer the value that a look-up at `as_of` has found."""
        with self._lock:
            weight = len(key) + len(value) + ENTRY_BYTES
            if as_of < self._touched or weight > self.most // _LARGEST_PART:
                return
            if key in self._kept or not self._is_asked_again(key):
                return
            kept = self._kept[key] = _Kept(key, value, as_of, self._spans_noted)
            self._ring.append(kept)
            self.size += weight
            self._make_room()

    def note(
        self,
        timestamp: int,
        points: Mapping[bytes, bytes | None],
        spans: Iterable[tuple[bytes, bytes | None]],
    ) -> None:
        """Take a commit into account: values of its points replace those that are kept."""
        with self._lock:
            self._touched = timestamp
            for span in spans:
                self._spans.append(span)
                self._spans_noted += 1
            if len(self._spans) > SPANS_MAX:
                del self._spans[:-SPANS_MAX]
            if not self._kept:
                return
            for key, value in points.items():
                kept = self._kept.get(key)
                if kept is None:
                    continue
                before = kept.state[0]
                assert before is not None, "it is kept"
                if type(value) is bytes:
                    kept.state = value, timestamp, self._spans_noted
                    self.size += len(value) - len(before)
                else:
                    self._drop(kept)
            self._make_room()

    def _is_current(self, kept: _Kept) -> bool:
        """Whether no write to a span has touched a value since it was last looked at."""
        with self._lock:
            value, since, spans = kept.state
            missed = self._spans_noted - spans
            if value is None or missed > len(self._spans) or self._hits(kept.key, missed):
                self._drop(kept)
                return False
            kept.state = value, since, self._spans_noted
            return True

    def _hits(self, key: bytes, last: int) -> bool:
        """Whether one of the last writes to spans may have written `key`."""
        spans = self._spans[len(self._spans) - last :]
        return any(start <= key and (end is None or key < end) for start, end in spans)

    def _is_asked_again(self, key: bytes) -> bool:
        if not self._asked:
            self._asked = [0] * _slots(self.most)
        bits = hash(key)
        slot, mark = bits & (len(self._asked) - 1), (bits >> 32 & 0xFFFFFFFF) | 1
        if self._asked[slot] == mark:
            return True
        self._asked[slot] = mark
        return False

    def _drop(self, kept: _Kept) -> None:
        value, since, spans = kept.state
        if value is not None:
            self.size -= len(kept.key) + len(value) + ENTRY_BYTES
            kept.state = None, since, spans
            del self._kept[kept.key]

    def _make_room(self) -> None:
        if len(self._ring) > 2 * len(self._kept) + SPANS_MAX:
            self._ring = [kept for kept in self._ring if kept.state[0] is not None]
        ring = self._ring
        while self.size > self.most:
            if self._hand >= len(ring):
                self._hand = 0
            kept = ring[self._hand]
            if kept.is_used and kept.state[0] is not None:
                kept.is_used = False
                self._hand += 1
                continue
            self._drop(kept)
            last = ring.pop()
            if last is not kept:
                ring[self._hand] = last


def _slots(most: int) -> int:
    return 1 << max(6, (most // _BYTES_PER_SLOT).bit_length())
