"""A chunk of `data` keys as columns, so that an export decides about thousands of keys at a time.

The keys lie joined in one Arrow buffer. NumPy gathers suffixes and kinds from it as numbers, and
compares neighbouring user keys in words of eight bytes. No Python code runs per key: a key takes
45 ns, where the plainest loop takes 250.

    joined  := | 8 zero bytes | key | key | ...        so that a word can end anywhere
    key     := | stem (framed user key) | suffix u64 | kind u8 |

Values stay a list; `of_chosen` picks from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import compress
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.codec.keys import TAIL_BYTES, VALUE, check_data_key
from kvstore.codec.ordered import TERMINATOR
from kvstore.errors import CorruptionError, printable

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    Bools = npt.NDArray[np.bool_]
    Numbers = npt.NDArray[np.int64]

_WORD: Final = 8
_PAD: Final = bytes(_WORD)
_CUT: Final = TAIL_BYTES + len(TERMINATOR)
"""Bytes of a key behind its escaped user key."""


@cache
def _low_bytes() -> npt.NDArray[np.uint64]:
    """Masks of the `n` low bytes of a word, for each `n` in turn."""
    return np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], np.uint64)


class KeyColumns:
    """The keys of one chunk, in the order of the engine, as columns."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        import pyarrow as pa

        # Arrow joins the keys and counts their bytes in 20 ns a key; `join` and `len` take 30.
        _, offsets, joined = pa.array([_PAD, *keys], pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(keys) + 2)
        self._buffer = joined
        self._ends = bounds[2:]
        self._stem_ends = self._ends - TAIL_BYTES
        self._starts = bounds[1:-1]
        self._bytes = np.frombuffer(joined, np.uint8, bounds[-1])
        # Every eight bytes of the buffer as one big-endian number, at any offset.
        self._words = np.ndarray((int(bounds[-1]) - _WORD + 1,), ">u8", joined, strides=(1,))

        self._check(keys)

    def __len__(self) -> int:
        return len(self._ends)

    def _check(self, keys: Sequence[bytes]) -> None:
        """Raise `CorruptionError` unless each key ends with a terminator, a suffix and a kind."""
        wrong = (self._ends - self._starts) < _CUT
        if not wrong.any():
            wrong = self._bytes[self._ends - 1] > VALUE[0]
            wrong |= self._bytes[self._stem_ends - 2] != TERMINATOR[0]
            wrong |= self._bytes[self._stem_ends - 1] != TERMINATOR[1]
        if wrong.any():
            check_data_key(keys[int(np.argmax(wrong))])

    @cached_property
    def times(self) -> Numbers:
        """The timestamp of each key; for a stamp reference the complement of its id, below 0."""
        suffixes = self._words[self._stem_ends].astype(np.uint64)
        times: Numbers = (~suffixes).view(np.int64)
        return times

    @cached_property
    def is_value(self) -> Bools:
        """Whether each entry is a value. The others are tombstones."""
        kinds: Bools = self._bytes[self._ends - 1] != 0
        return kinds

    @cached_property
    def repeats(self) -> Bools:
        """Whether each entry has the user key of the entry before it. False for the first entry."""
        words, starts, stem_ends = self._words, self._starts, self._stem_ends
        stems = stem_ends - starts
        # The last word tells most neighbours apart. In a short stem only its own bytes count.
        last = words[stem_ends - _WORD].astype(np.uint64)
        apart = last[1:] ^ last[:-1]
        if stems.min() < _WORD:
            apart &= _low_bytes()[np.minimum(stems[1:], _WORD)]
        same = np.flatnonzero((apart == 0) & (stems[1:] == stems[:-1])) + 1
        at = 0
        while same.size:
            longer = stems[same] > at + _WORD
            if not longer.any():
                break
            looked = same[longer]
            equal = np.ones(same.size, np.bool_)
            equal[longer] = words[starts[looked] + at] == words[starts[looked - 1] + at]
            same = same[equal]
            at += _WORD
        repeats = np.zeros(len(stems), np.bool_)
        repeats[same] = True
        return repeats

    def user_keys(self, chosen: Bools) -> pa.Array:
        """The user keys of the chosen entries as an Arrow binary array. Raises `CorruptionError`
        where a key is not escaped."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # Each key is two items, its stem and its tail: one filter cuts the tails and chooses keys.
        count = len(self)
        bounds = np.empty(2 * count + 1, np.int32)
        bounds[:1] = _WORD
        bounds[1::2] = self._ends - _CUT
        bounds[2::2] = self._ends
        halves = pa.Array.from_buffers(
            pa.binary(), 2 * count, [None, pa.py_buffer(bounds), self._buffer]
        )
        wanted = np.zeros(2 * count, np.bool_)
        wanted[::2] = chosen
        escaped = halves.filter(pa.array(wanted))
        if not _has_zeros(escaped):
            return escaped
        user_keys = pc.replace_substring(escaped, pattern=b"\x00\xff", replacement=b"\x00")
        again = pc.replace_substring(user_keys, pattern=b"\x00", replacement=b"\x00\xff")
        if not again.equals(escaped):
            places = pc.indices_nonzero(pc.not_equal(again, escaped))
            key = escaped[places[0].as_py()].as_py()
            raise CorruptionError(f"data key {printable(key)}", "its user key is not escaped")
        return user_keys


def _has_zeros(items: pa.Array) -> bool:
    """Whether a byte of any item of a binary array is zero."""
    _, offsets, data = items.buffers()
    if not len(items) or data is None:
        return False
    bounds = np.frombuffer(offsets, np.int32)[items.offset : items.offset + len(items) + 1]
    return bool((np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] == 0).any())


def of_chosen(values: list[bytes], chosen: Bools) -> list[bytes]:
    """The values of the chosen entries. Usually all are chosen, or all but the last of a chunk: a
    slice costs 1 ns a value, a choice one by one 8 ns."""
    count = int(np.count_nonzero(chosen))
    if chosen[:count].all():
        return values[:count]
    return list(compress(values, chosen.tobytes()))
