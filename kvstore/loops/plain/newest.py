"""The newest values of keys that are read again and again, kept in memory between look-ups.

    get     asks for the value of a key at a time
    keep    offers a value that a look-up has found
    note    tells of a commit: its time, its points, and the spans in which it may have written

A kept value has a time: the time of the read that found it, or of the commit that wrote it. It
answers every read at or after that time. The next commit to its key replaces it or removes it: a
commit of many keys removes, because its time would double with the values that it replaces.

Invariants
1. `note` is called for each commit, in the order of commits, after the engine has taken the entries
   and before any read asks for the time of the commit. Nothing is kept before the first `note`.
2. A value is kept only if its read was at or above the time of the newest `note`. The look-up then
   saw every commit that was noted, and `note` will tell of every later one. So a kept value is the
   newest value of its key at each time that it answers.
3. A write to a span leaves the kept values in place. A value that was last looked at before this
   write is compared with the span at its next use. The last `SPANS_MAX` writes to spans are
   remembered; a value that missed more of them is dropped.
4. `size`, which counts `ENTRY_BYTES` for the objects of each value, stays at or below `most`. Above
   it the values that were not used since the last turn leave first (the clock algorithm: Corbató,
   "A paging experiment with the Multics system", 1969).
5. A full cache lets a key in when it is asked for a second time, so a pass over many keys changes
   little. A write by a commit of few keys counts as the first time. `_asked` remembers some bits of
   each such key (the doorkeeper of Einziger, Friedman and Manes, "TinyLFU", 2017).
   Where keys are read once they were written, as a sample of them shows, a write lets its key in.
6. A full cache that answers few reads rests: it asks and keeps a sample of the keys only, so it
   costs next to nothing where keys are read in no order. It works again once the sample has hits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.timestamp import TIMESTAMP_MAX

ENTRY_BYTES: Final = 160
"""Bytes that a kept value takes beside its own bytes and the bytes of its key: a slot of the
compiled table, of which three fifths are taken after it grew, and the head of an object. This half
takes twice as many."""

SPANS_MAX: Final = 64

_BYTES_PER_SLOT: Final = 1024
"""Bytes of the cache for each slot of `_asked`. With fewer, a key is let in that is asked for again
much later than the cache turns over: uniform reads then take 10 % longer."""

REPLACED_MAX: Final = 64
"""A commit of more keys removes the values of its keys. A search for a key whose value is not read
takes 10 ns; a replaced value takes 120 ns, in memory that no cache of the processor holds."""

_LARGEST_PART: Final = 16
"""A value may take this part of the cache."""

ROUND: Final = 4096
"""The reads after which the cache counts its hits."""

LEAST_HITS: Final = ROUND // 16
"""Hits in a round, below which a full cache rests. A miss costs less than a sixteenth of what a hit
saves."""

SAMPLE: Final = 0xF << 27
"""A key is in the sample if its hash has none of these bits: one key of sixteen."""

WRITES_JUDGED: Final = 64
"""The writes to keys of the sample after which the cache counts how many of the keys were read: a
quarter is enough. Keys that are let in and not read push others out: with four such writes to each
read of YCSB's zipfian keys, three fifths of the reads hit instead of four fifths."""

_ASKED: Final = 1
_WRITTEN: Final = 2
"""The last bits of a mark in `_asked`."""


class _Kept:
    """A kept value, the time from which it is newest, and the writes to spans up to which this is
    known: one tuple, which a reader takes at once. The value is None once it has left."""

    __slots__ = ("is_used", "key", "place", "state")

    def __init__(self, key: bytes, value: bytes, since: int, spans: int, place: int) -> None:
        self.key = key
        self.place = place
        self.state: tuple[bytes | None, int, int] = value, since, spans
        self.is_used = False


class NewestValues:
    """At most `most` bytes of newest values. 0 keeps none."""

    __slots__ = (
        "_admits_writes",
        "_asked",
        "_free",
        "_hand",
        "_hits_before",
        "_is_resting",
        "_kept",
        "_left",
        "_lock",
        "_read_back",
        "_ring",
        "_spans",
        "_spans_noted",
        "_touched",
        "_written",
        "hits",
        "misses",
        "most",
        "passed",
        "size",
    )

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self.hits = 0
        self.misses = 0
        self.passed = 0
        """The slots of other keys that searches have passed over. A `dict` tells none."""
        self._kept: dict[bytes, _Kept] = {}
        self._ring: list[_Kept | None] = []
        self._free: list[int] = []
        self._hand = 0
        self._spans: list[tuple[bytes, bytes | None]] = []
        self._spans_noted = 0
        self._touched = TIMESTAMP_MAX
        self._asked: list[int] = []
        self._left = ROUND
        self._hits_before = 0
        self._is_resting = False
        self._admits_writes = False
        self._written = self._read_back = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`, None where it is not kept."""
        if self._rests_for(key):
            self.misses += 1
            return None
        self._left -= 1
        if self._left <= 0:
            self._judge()
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
            self._offer(key, value, as_of)

    def _offer(self, key: bytes, value: bytes, as_of: int) -> None:
        weight = len(key) + len(value) + ENTRY_BYTES
        if as_of < self._touched or weight > self.most // _LARGEST_PART or self._rests_for(key):
            return
        if self.size + weight > self.most and not self._is_asked_again(key):
            return
        if key in self._kept:
            return
        self._make_room(weight)
        if self._free:
            place = self._free.pop()
        else:
            place = len(self._ring)
            self._ring.append(None)
        kept = _Kept(key, value, as_of, self._spans_noted, place)
        self._ring[place] = self._kept[key] = kept
        self.size += weight

    def note(
        self,
        timestamp: int,
        points: Mapping[bytes, bytes | None],
        spans: Iterable[tuple[bytes, bytes | None]],
    ) -> None:
        """Take a commit into account: a kept value is replaced by a later one."""
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
                    if self._asked and type(value) is bytes and len(points) <= REPLACED_MAX:
                        self._meet(key, value, timestamp)
                    continue
                before = kept.state[0]
                assert before is not None, "it is kept"
                if type(value) is bytes and len(points) <= REPLACED_MAX:
                    kept.state = value, timestamp, self._spans_noted
                    self.size += len(value) - len(before)
                else:
                    self._drop(kept)
            self._make_room(0)

    def _judge(self) -> None:
        """Rest after a round of few hits, until a round of the sample has more."""
        self._is_resting = bool(self._asked) and self.hits - self._hits_before < LEAST_HITS
        self._hits_before, self._left = self.hits, ROUND

    def _rests_for(self, key: bytes) -> bool:
        return self._is_resting and hash(key) & SAMPLE != 0

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

    def _meet(self, key: bytes, value: bytes, timestamp: int) -> None:
        """Remember that a key without a value was written, or keep its value where such keys are
        read."""
        is_sampled = hash(key) & SAMPLE == 0
        if is_sampled:
            self._written += 1
            if self._written == WRITES_JUDGED:
                self._admits_writes = 4 * self._read_back >= WRITES_JUDGED
                self._written = self._read_back = 0
        elif self._is_resting:
            return
        slot, mark = self._marked(key)
        self._asked[slot] = mark | _WRITTEN
        if self._admits_writes and not is_sampled:
            self._offer(key, value, timestamp)

    def _is_asked_again(self, key: bytes) -> bool:
        if not self._asked:
            self._asked = [0] * _slots(self.most)
        slot, mark = self._marked(key)
        before, self._asked[slot] = self._asked[slot], mark
        if before == mark | _WRITTEN:
            self._read_back += hash(key) & SAMPLE == 0
            return True
        return before == mark

    def _marked(self, key: bytes) -> tuple[int, int]:
        """The place of a key in `_asked`, and its mark there."""
        bits = hash(key)
        return bits & (len(self._asked) - 1), bits >> 32 & 0xFFFFFFFC | _ASKED

    def _drop(self, kept: _Kept) -> None:
        value, since, spans = kept.state
        if value is not None:
            self.size -= len(kept.key) + len(value) + ENTRY_BYTES
            kept.state = None, since, spans
            self._ring[kept.place] = None
            self._free.append(kept.place)
            del self._kept[kept.key]

    def _make_room(self, weight: int) -> None:
        """Drop values until `weight` more bytes fit."""
        while self.size + weight > self.most:
            if self._hand >= len(self._ring):
                self._hand = 0
            kept = self._ring[self._hand]
            self._hand += 1
            if kept is not None and kept.is_used:
                kept.is_used = False
            elif kept is not None:
                self._drop(kept)


def _slots(most: int) -> int:
    return 1 << max(6, (most // _BYTES_PER_SLOT).bit_length())
