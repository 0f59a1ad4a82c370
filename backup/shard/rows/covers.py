"""The newest range tombstones over sorted rows, window by window.

Invariants
1. The ranges that are kept are disjoint and in order, and each has the newest timestamp over its
   keys. So a range that newer ones hide costs nothing, however many there are: a million deletes of
   one span are one range.
2. A window costs O(rows + ranges log rows), where ranges are the kept ones that reach beyond the
   window before.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

NO_TIME: Final = np.iinfo(np.int64).min
"""Stands where no range tombstone covers a key, and is older than every time."""

_SEARCHES_MAX: Final = 64
"""A binary search takes 17 us in Arrow's array, and below 1 us in a list, which takes 3 ms to make
of the keys of a window."""


class Range(NamedTuple):
    """One range tombstone. `start` is below `end`."""

    start: bytes
    end: bytes
    timestamp: int


class Covers:
    """The range tombstones that reach into the window at hand or beyond it."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """Add range tombstones."""
        self._ranges = disjoint([*self._ranges, *ranges])

    def newest(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """For each of the sorted `keys` the time of the newest range tombstone over it, or
        `NO_TIME`. Forgets the range tombstones that end at or below the last key."""
        found = np.full(len(keys), NO_TIME, np.int64)
        place = _place_in(keys, many=len(self._ranges) > _SEARCHES_MAX)
        for start, end, timestamp in self._ranges:
            found[place(start) : place(end)] = timestamp
        last = keys[-1].as_py()
        self._ranges = [each for each in self._ranges if each.end > last]
        return found


def disjoint(ranges: Iterable[Range]) -> list[Range]:
    """The ranges cut into disjoint ones in order, each with the newest timestamp over it. Costs
    O(n log n), and gives fewer than 2 n ranges."""
    found: list[Range] = []
    open_: list[tuple[int, bytes]] = []
    at = b""
    for start, end, timestamp in sorted(ranges):
        _cut(open_, found, at, start)
        heapq.heappush(open_, (-timestamp, end))
        at = start
    _cut(open_, found, at, None)
    return found


def _cut(open_: list[tuple[int, bytes]], found: list[Range], at: bytes, upto: bytes | None) -> None:
    """Add the ranges from `at` up to `upto`. `open_` is a heap of the ranges that began at or below
    `at`, the newest one first."""
    while open_ and (upto is None or at < upto):
        negative, end = open_[0]
        if end <= at:
            heapq.heappop(open_)
            continue
        stop = end if upto is None else min(end, upto)
        if found and found[-1].end == at and found[-1].timestamp == -negative:
            found[-1] = found[-1]._replace(end=stop)
        else:
            found.append(Range(at, stop, -negative))
        at = stop


def _place_in(keys: pa.Array, *, many: bool) -> Callable[[bytes], int]:
    """A function that tells how many of the sorted `keys` are below a key."""
    return partial(bisect.bisect_left, keys.to_pylist()) if many else partial(lower_bound, keys)


def lower_bound(keys: pa.Array, key: bytes) -> int:
    """How many of the sorted `keys` are below `key`. O(log n)."""
    return bisect.bisect_left(range(len(keys)), key, key=lambda i: keys[i].as_py())
