"""The rows that every subject gets: the same in each process, from one seed.

    key      place among all rows 8 | random 8     ascending by number: one key in each stretch
    value    random 50 | filler 50                 so half of it compresses

Both are made from the number of their row, so that nothing needs all of them at once. Up to
`HELD_ROWS` rows they are held as lists, and no work that is timed waits for them. Above, they are
made in pieces when they are asked for, and memory does not grow with the rows. Updates are drawn
with replacement of rounds but not within one, so that a commit of n rows changes n keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, overload

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
VALUE_BYTES = 100
HELD_ROWS = 4_000_000
_SEED = 20_260
_RANDOM_BYTES = VALUE_BYTES // 2
_FILLER = b"abcdefghij" * ((VALUE_BYTES - _RANDOM_BYTES) // 10)
_PIECE = 1 << 16


class Data:
    """`rows` sorted keys with values, and the updates and look-ups made of them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @cached_property
    def keys(self) -> Sequence[bytes]:
        """All keys, ascending and distinct."""
        return self._column(lambda first, last: self._keys_at(np.arange(first, last)))

    @cached_property
    def values(self) -> Sequence[bytes]:
        """A first value for each key."""
        return self._column(lambda first, last: _values(last - first, (1, first)))

    def updates(self, count: int, step: int) -> tuple[list[bytes], list[bytes]]:
        """`count` distinct keys in no order, with new values; another set for each `step`."""
        chosen = np.random.default_rng((_SEED, step)).choice(self.rows, count, replace=False)
        return self._keys_at(chosen), _values(count, (1000 + step,))

    def lookups(self, count: int, step: int) -> list[bytes]:
        """`count` keys that exist, in no order."""
        return self._keys_at(np.random.default_rng((_SEED, 7, step)).integers(0, self.rows, count))

    def middle(self, count: int) -> tuple[bytes, bytes]:
        """Bounds `[start, end)` of `count` neighbouring keys."""
        first = (self.rows - count) // 2
        start, end = self._keys_at(np.array([first, first + count]))
        return start, end

    def _column(self, made: Callable[[int, int], list[bytes]]) -> Sequence[bytes]:
        pieces = Pieces(self.rows, made)
        return list(pieces) if self.rows <= HELD_ROWS else pieces

    def _keys_at(self, numbers: npt.NDArray[np.int64]) -> list[bytes]:
        """The keys of rows. The keys are spread evenly: each has a stretch of its own."""
        counted = numbers.astype(np.uint64)
        stretch = np.uint64((1 << 64) // (self.rows + 1))
        words = np.empty((len(numbers), 2), dtype=">u8")
        words[:, 0] = counted * stretch + _mixed(counted) % stretch
        words[:, 1] = _mixed(counted + np.uint64(self.rows))
        return _cut(words.tobytes(), KEY_BYTES)


class Pieces(Sequence[bytes]):
    """Items that are made in pieces, each piece by a call with its bounds."""

    def __init__(self, count: int, made: Callable[[int, int], list[bytes]]) -> None:
        self._count = count
        self._made = made
        self._last: tuple[int, list[bytes]] = (-1, [])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, self._count, _PIECE):
            yield from self._made(first, min(first + _PIECE, self._count))

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        places = range(self._count)[at]
        if isinstance(places, int):
            return self._piece(places // _PIECE)[places % _PIECE]
        assert places.step == 1, "a slice is a run of neighbours"
        found: list[bytes] = []
        for number in range(places.start // _PIECE, -(-places.stop // _PIECE)):
            start, end = (max(each - number * _PIECE, 0) for each in (places.start, places.stop))
            found += self._piece(number)[start:end]
        return found

    def _piece(self, number: int) -> list[bytes]:
        if self._last[0] != number:
            first = number * _PIECE
            self._last = number, self._made(first, min(first + _PIECE, self._count))
        return self._last[1]


def _values(count: int, seed: Sequence[int]) -> list[bytes]:
    raw = np.random.default_rng((_SEED, *seed)).bytes(count * _RANDOM_BYTES)
    return [part + _FILLER for part in _cut(raw, _RANDOM_BYTES)]


def _cut(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


_MULTIPLIERS: Final = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A well-mixed word for each number: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", 2014)."""
    words = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))
