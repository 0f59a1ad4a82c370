"""The rows that every subject gets: the same in each process, from one seed.

Keys are 16 random bytes, values 100 bytes of which half compress. Updates are drawn with
replacement of rounds but not within one, so that a commit of n rows changes n keys.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

KEY_BYTES = 16
VALUE_BYTES = 100
_SEED = 20_260
_RANDOM_BYTES = VALUE_BYTES // 2
_FILLER = b"abcdefghij" * ((VALUE_BYTES - _RANDOM_BYTES) // 10)


class Data:
    """`rows` sorted keys with values, and the updates and look-ups made of them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @cached_property
    def keys(self) -> list[bytes]:
        """All keys, ascending and distinct."""
        raw = np.random.default_rng(_SEED).bytes(self.rows * KEY_BYTES)
        cut = {raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)}
        assert len(cut) == self.rows, "16 random bytes do not collide"
        return sorted(cut)

    @cached_property
    def values(self) -> list[bytes]:
        """A first value for each key."""
        return self._values(self.rows, seed=1)

    def updates(self, count: int, step: int) -> tuple[list[bytes], list[bytes]]:
        """`count` distinct keys in no order, with new values; another set for each `step`."""
        chosen = np.random.default_rng((_SEED, step)).choice(self.rows, count, replace=False)
        keys = self.keys
        return [keys[i] for i in chosen], self._values(count, seed=1000 + step)

    def lookups(self, count: int, step: int) -> list[bytes]:
        """`count` keys that exist, in no order."""
        chosen = np.random.default_rng((_SEED, 7, step)).integers(0, self.rows, count)
        keys = self.keys
        return [keys[i] for i in chosen]

    def middle(self, count: int) -> tuple[bytes, bytes]:
        """Bounds `[start, end)` of `count` neighbouring keys."""
        first = (self.rows - count) // 2
        return self.keys[first], self.keys[first + count]

    def _values(self, count: int, *, seed: int) -> list[bytes]:
        raw = np.random.default_rng((_SEED, seed)).bytes(count * _RANDOM_BYTES)
        cuts = range(0, len(raw), _RANDOM_BYTES)
        return [raw[at : at + _RANDOM_BYTES] + _FILLER for at in cuts]
