"""Live entries: what a read at one time sees of a pass over `data`.

A key's live entry is its newest entry at or below the read's time, if that is a value and no newer
range tombstone covers it. The suffix of an entry has its time. An entry of an import has a
reference there instead, and the time at which the import was added.

Invariants
1. The entries of one key are neighbours in the pass. The newest seen so far is held until the pass
   reaches another key, or ends.
2. Times are compared as suffixes, as they are stored: the newer time is the lesser suffix.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from typing_extensions import Self

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    KEY_BYTES_LEAST,
    KIND_MAX,
    SUFFIX_BYTES,
    TAIL_BYTES,
    UNLIMITED,
    check_data_key,
    encode_suffix,
)
from kvstore.codec.ordered import TERMINATOR, is_escaped, unescape
from kvstore.limits import VERSIONS_PASSED_MAX
from kvstore.loops.contract import Ahead, Buffers, Nearby, Walker
from kvstore.loops.plain.columns import join

_INVISIBLE: Final = b"\xff" * (SUFFIX_BYTES + 1)
"""Stands in the place of a suffix, and is older than every suffix."""


def collect(
    source: Iterator[tuple[bytes, bytes]],
    keys: list[bytes],
    values: list[bytes],
    count: int,
    bytes_max: int,
) -> bool:
    """Append entries of `source` to `keys` and `values`: `count` entries, or fewer once their
    values have `bytes_max` bytes. False where `source` has ended, True where it may have more."""
    missing = count
    for key, value in islice(source, count):
        keys.append(key)
        values.append(value)
        missing -= 1
        bytes_max -= len(value)
        if bytes_max <= 0:
            return True
    return missing == 0


class Entries:
    """The entries from the one where a reader stands, forwards or backwards. The reader may be
    moved meanwhile. With a `bound` the entries end below this key, or backwards at it."""

    def __init__(self, reader: Walker, *, reverse: bool, bound: bytes | None = None) -> None:
        self._reader = reader
        self._reverse, self._bound = reverse, bound
        self._step = reader.prev if reverse else reader.next

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[bytes, bytes]:
        key = self._reader.key()
        if key is None:
            raise StopIteration
        if self._bound is not None and (key < self._bound) == self._reverse:
            raise StopIteration
        value = self._reader.value()
        self._step()
        return key, value


class Live:
    """Picks the live entries out of a pass over `data`, in pieces, forwards or backwards.

    `stamps` maps the reference of each import that the read knows to the times at which the import
    was added and reverted; entries of other imports are invisible. `nearby` tells of the range
    tombstones near a stored key, and is asked again only where the pass leaves the stored keys
    that an answer is about. The subclasses hand out the entries that were found alive.
    """

    last: bytes | None = None
    """The last stored key that was passed over."""

    ahead: Ahead | None = None
    """Where a pass should continue, so that it leaves out versions of one key that decide
    nothing."""

    def __init__(
        self,
        as_of: int,
        stamps: Mapping[bytes, tuple[int, int]],
        nearby: Callable[[bytes], Nearby] | None = None,
    ) -> None:
        self._as_of = as_of
        self._stamps = stamps
        self._nearby = nearby
        self._near: Nearby = b"", b"", [], []
        self._imports: dict[bytes, bytes] = {}
        self._stem: bytes | None = None
        self._first = b""
        self._run = 0
        self._suffix = _INVISIBLE
        self._held = b"", b""
        self._shown: tuple[list[bytes], list[bytes]] = [], []
        """Stored keys and values that were found alive and not yet handed out."""

    def pass_over(
        self, source: Iterator[tuple[bytes, bytes]], count: int, bytes_max: int = sys.maxsize
    ) -> bool:
        """Pass over the next entries of `source`, as many as `collect` takes, or fewer: where
        `ahead` is set, `source` has to continue from there. Raises
        `CorruptionError` for a key that `data` cannot have."""
        self.ahead = None
        keys: list[bytes] = []
        values: list[bytes] = []
        has_more = collect(source, keys, values, count, bytes_max)
        least = encode_suffix(self._as_of)
        stem, newest, held = self._stem, self._suffix, self._held
        for key, value in zip(keys, values, strict=True):
            here = key[:-TAIL_BYTES]
            if len(key) < KEY_BYTES_LEAST or here[-2:] != TERMINATOR or key[-1] > KIND_MAX:
                check_data_key(key)
            if here != stem:
                if newest is not _INVISIBLE:
                    self._release(newest, *held)
                    newest = _INVISIBLE
                stem, self._first, self._run = here, key, 0
            self._run += 1
            suffix = key[-TAIL_BYTES:-1]
            if suffix < FIRST_TIMED_SUFFIX:
                suffix = self._imports.get(suffix) or self._import(suffix)
            if least <= suffix < newest:
                newest, held = suffix, (key, value)
            if self._run > VERSIONS_PASSED_MAX and key[-TAIL_BYTES:] >= FIRST_TIMED_SUFFIX:
                self._run, self.ahead, self.last = 0, self._behind_run(key, least), key
                self._stem, self._suffix, self._held = stem, newest, held
                return True
        self._stem, self._suffix, self._held = stem, newest, held
        self.last = keys[-1] if keys else self.last
        return has_more

    def end(self) -> None:
        """Decide the entry that is held: the pass has no more."""
        if self._suffix is not _INVISIBLE:
            self._release(self._suffix, *self._held)
            self._suffix, self._held = _INVISIBLE, (b"", b"")

    def _behind_run(self, key: bytes, least: bytes) -> Ahead:
        """Where the next entry lies that may decide what the user key of `key` has. The entry with
        the suffix `least` or the next one is the newest timed entry that the read sees."""
        stem = key[:-TAIL_BYTES]
        is_visible = key[-TAIL_BYTES:] >= least
        if key < self._first:
            return (stem + least, False) if is_visible else (stem + FIRST_TIMED_SUFFIX, True)
        return (key[:-KEY_BYTES_LEAST] + UNLIMITED, False) if is_visible else (stem + least, False)

    def _import(self, reference: bytes) -> bytes:
        """The suffix of the time at which an import was added, `_INVISIBLE` if the read does not
        see the import."""
        added, reverted = self._stamps.get(reference, (0, 0))
        visible = added <= self._as_of < reverted
        self._imports[reference] = encode_suffix(added) if visible else _INVISIBLE
        return self._imports[reference]

    def _release(self, suffix: bytes, key: bytes, value: bytes) -> None:
        if not key[-1]:
            return
        if self._nearby is not None and encode_suffix(self._covered(key)) < suffix:
            return
        if not is_escaped(key[:-KEY_BYTES_LEAST]):
            check_data_key(key)
        keys, values = self._shown
        keys.append(key)
        values.append(value)

    def _covered(self, key: bytes) -> int:
        """The time of the newest range tombstone over a stored key."""
        low, high, bounds, newest = self._near
        if key < low or (high is not None and key >= high):
            assert self._nearby is not None
            low, high, bounds, newest = self._near = self._nearby(key)
        # A bound is escaped and not framed: the entries of the key that it escapes sort behind it.
        return newest[bisect_right(bounds, key)]


class LiveRows(Live):
    """Live entries as rows."""

    def found(self) -> tuple[list[bytes], list[bytes]]:
        """User keys and values that were found since the last call."""
        keys, values = self._shown
        self._shown = [], []
        return _user_keys(keys), values


class LiveColumns(Live):
    """Live entries as Arrow columns."""

    @property
    def rows(self) -> int:
        """How many live entries were found since the last call of `found`."""
        return len(self._shown[0])

    @property
    def size(self) -> int:
        """The bytes of their values."""
        return sum(map(len, self._shown[1]))

    def found(self) -> list[Buffers]:
        """Keys and values that were found since the last call, in as many pieces as Arrow arrays
        of their bytes need: none where no entry was found."""
        keys, values = self._shown
        self._shown = [], []
        return list(_joined_pairs(_user_keys(keys), values))


def _joined_pairs(keys: list[bytes], values: list[bytes]) -> Iterator[Buffers]:
    if not keys:
        return
    joined_keys, joined_values = join(keys), join(values)
    if joined_keys is not None and joined_values is not None:
        yield len(keys), *joined_keys, *joined_values
        return
    middle = len(keys) // 2
    yield from _joined_pairs(keys[:middle], values[:middle])
    yield from _joined_pairs(keys[middle:], values[middle:])


def _user_keys(stored: Sequence[bytes]) -> list[bytes]:
    return [unescape(key[:-KEY_BYTES_LEAST]) for key in stored]
