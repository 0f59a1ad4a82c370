"""A chunk of `data` keys taken apart into columns, so that a scan decides thousands at a time.

The keys lie joined in one buffer; suffixes and kinds are gathered from it as numbers, and
whether two neighbours have one user key is seen by comparing words of eight bytes. No Python code
runs per key: some 90 ns a key, where the plainest loop over keys takes 250.

    joined  := | 8 zero bytes | key | key | ...        so that a word can end anywhere
    key     := | stem (framed user key) | suffix u64 | kind u8 |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.codec.keys import TAIL_BYTES
from kvstore.codec.ordered import TERMINATOR

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    Bools = npt.NDArray[np.bool_]
    Numbers = npt.NDArray[np.int64]

_WORD: Final = 8
_PAD: Final = bytes(_WORD)
_LOW_BYTES: Final = np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], np.uint64)
"""By a number of bytes: the mask of as many low bytes of a word."""


class Columns:
    """The keys of one chunk, in the order of the engine, as columns."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._joined = _PAD + b"".join(keys)
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        self._ends = np.cumsum(lengths) + _WORD
        self._stems = lengths - TAIL_BYTES
        # Every eight bytes of the buffer as one big-endian number, at any offset.
        self._words = np.ndarray(
            (len(self._joined) - _WORD + 1,), ">u8", self._joined, strides=(1,)
        )

    def __len__(self) -> int:
        return len(self._ends)

    @cached_property
    def times(self) -> Numbers:
        """Timestamps; a stamp reference is negative: the complement of its import id."""
        suffixes = self._words[self._ends - TAIL_BYTES].astype(np.uint64)
        times: Numbers = (~suffixes).view(np.int64)
        return times

    @cached_property
    def is_value(self) -> Bools:
        """Whether each entry is a value; a tombstone else."""
        kinds: Bools = np.frombuffer(self._joined, np.uint8)[self._ends - 1] != 0
        return kinds

    @cached_property
    def repeats(self) -> Bools:
        """Whether each entry has the user key of the one before it. False for the first."""
        stems, words = self._stems, self._words
        stem_ends = self._ends - TAIL_BYTES
        starts = stem_ends - stems
        # The last word tells most neighbours apart; of a short stem only its own bytes count.
        same = np.flatnonzero(stems[1:] == stems[:-1]) + 1
        last = words[stem_ends - _WORD].astype(np.uint64)
        own = _LOW_BYTES[np.minimum(stems[same], _WORD)]
        same = same[((last[same] ^ last[same - 1]) & own) == 0]
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
        """The user keys of the chosen entries as an Arrow binary array."""
        import pyarrow as pa
        import pyarrow.compute as pc

        offsets = np.empty(len(self) + 1, np.int32)
        offsets[0] = _WORD
        offsets[1:] = self._ends
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._joined)]
        stored = pa.Array.from_buffers(pa.binary(), len(self), buffers)
        cut = TAIL_BYTES + len(TERMINATOR)
        escaped = pc.binary_slice(stored.filter(pa.array(chosen)), 0, -cut)
        return pc.replace_substring(escaped, pattern=b"\x00\xff", replacement=b"\x00")
