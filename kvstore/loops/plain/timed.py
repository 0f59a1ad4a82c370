"""The version of each key at a time of its own, for many keys in one walk.

The walk takes the keys in key order, and the times of one key newest first, because the entries of
`data` lie in this order. So the reader only moves forwards. It takes up to `steps` entries one by
one before it seeks: a `steps` of 0 is a seek for each version, a large one is a merge of the labels
with the entries. Between the two the walk finds the cheaper way by itself: after steps in vain it
seeks for a while, and then tries again.

Invariants
1. Each place that the reader is sent to lies at or above the place before it.
2. A version that answers one time answers the next one, without a move, if it is not newer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from typing_extensions import Buffer

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    TAIL_BYTES,
    UNLIMITED,
    decode_suffix,
    encode_suffix,
    require_entry,
)
from kvstore.codec.ordered import TERMINATOR, escape
from kvstore.loops.contract import LimitNode, Seeker
from kvstore.loops.plain.deletions import Deletions, deleted_at, deletions_of
from kvstore.loops.plain.labels import Keys, listed, require_starts

VAIN_MAX: Final = 15
"""Seeks after which the walk tries steps again, however often steps were in vain."""


def find_timed(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    age_max: int,
    steps: int,
    bytes_max: int,
) -> tuple[list[bytes | None], array[int]] | None:
    """The value of the newest version of each of `keys` at its own time of `times`, which are
    integers of 64 bits, and the time of that version. The value is None and the time -1 where there
    is no version, where it deletes, and where it is older than `age_max`.

    `limits` is the tree of range tombstones: see `LimitNode`. Returns None once the values of
    several keys have more than `bytes_max` bytes.
    """
    asked_at = memoryview(times).tolist()
    if len(asked_at) != len(keys):
        raise ValueError("a key has one time")
    walk = _Walk(reader, check, stamps, steps)
    values: list[bytes | None] = [None] * len(keys)
    found = array("q", [-1]) * len(keys)
    key: bytes | None = None
    deletions: Deletions = ((), ())
    for at in sorted(range(len(keys)), key=lambda at: (keys[at], -asked_at[at])):
        as_of = asked_at[at]
        if keys[at] != key:
            key = keys[at]
            deletions = deletions_of(limits, depth, key)
            walk.enter(key)
        time, value = walk.version(as_of, deleted_at(deletions, as_of))
        if value is not None and as_of - time <= age_max:
            values[at], found[at] = value, time
            bytes_max -= len(value)
            if bytes_max < 0 and len(keys) > 1:
                return None
    return values, found


def find_ordered(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Keys,
    starts: Buffer,
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    age_max: int,
    steps: int,
    bytes_max: int,
) -> tuple[array[int], bytes, array[int]] | None:
    """As `find_timed`, for labels in order, in columns: the `keys` are distinct and ascend, and key
    i has the labels from `starts[i]` on and below `starts[i + 1]`, newest first.

    Returns the offsets of the values, integers of 32 bits, the bytes of the values, and the times
    of their versions, integers of 64 bits.
    """
    asked, firsts = listed(keys), memoryview(starts).tolist()
    count = len(memoryview(times))
    require_starts(firsts, len(asked), count)
    if firsts[0] != 0 or firsts[-1] != count:
        raise ValueError("the labels of a key are no part of the labels")
    labels = [key for at, key in enumerate(asked) for _ in range(firsts[at], firsts[at + 1])]
    found = find_timed(
        reader, check, labels, times, limits, depth, stamps, age_max, steps, bytes_max
    )
    if found is None:
        return None
    values = [b"" if value is None else value for value in found[0]]
    return array("i", accumulate(map(len, values), initial=0)), b"".join(values), found[1]


class _Life(NamedTuple):
    """An entry of an import: when it is visible, and its value, None where it deletes."""

    added: int
    reverted: int
    value: bytes | None


class _Walk:
    """A reader that moves forwards through the entries of ascending keys."""

    def __init__(
        self,
        reader: Seeker,
        check: Callable[[Any], None],
        stamps: Mapping[bytes, tuple[int, int]],
        steps: int,
    ) -> None:
        self._reader = reader
        self._check = check
        self._stamps = stamps
        self._steps = steps
        self._vain = 0
        self._seeks_due = 0
        self._is_placed = False
        self._here: bytes | None = None

    def enter(self, key: bytes) -> None:
        """Continue with the entries of `key`, which lie behind the entries of the key before."""
        self._escaped = escape(key)
        self._lives: list[_Life] = []
        self._is_fresh = True
        self._time = -1
        self._value: bytes | None = None
        if self._stamps:
            self._take_lives()

    def version(self, as_of: int, deleted: int) -> tuple[int, bytes | None]:
        """The time and the value of the newest version at `as_of`. The newest range tombstone that
        this read sees has the time `deleted`. The value is None where there is none."""
        if self._is_fresh or self._time > as_of:
            self._is_fresh = False
            self._go(self._escaped + TERMINATOR + encode_suffix(as_of))
            self._arrive()
        newest, life = self._time, None
        for each in self._lives:
            if newest < each.added <= as_of < each.reverted:
                newest, life = each.added, each
        if newest < 0 or deleted > newest:
            return -1, None
        covered = max(self._time, deleted)
        moments = (e.reverted for e in self._lives if newest < e.reverted <= as_of)
        shown = max((m for m in moments if self._was_showing(m, covered)), default=newest)
        return shown, self._value if life is None else life.value

    def _was_showing(self, moment: int, covered: int) -> bool:
        """Whether an import that was reverted at `moment` was in sight until then: the revert made
        a version of the key."""
        alive = [e for e in self._lives if e.added < moment <= e.reverted]
        newest = max(alive, key=lambda e: e.added)
        return newest.reverted == moment and newest.added > covered

    def _take_lives(self) -> None:
        self._go(self._escaped + TERMINATOR)
        end = self._escaped + TERMINATOR + FIRST_TIMED_SUFFIX
        while self._here is not None and self._here < end:
            require_entry(self._here, self._escaped)
            lifetime = self._stamps.get(self._here[-TAIL_BYTES:-1])
            if lifetime is not None:
                value = self._reader.value() if self._here[-1] else None
                self._lives.append(_Life(*lifetime, value))
            self._step()

    def _arrive(self) -> None:
        """Take the entry here, if it is one of the key."""
        self._time, self._value = -1, None
        if self._here is not None and self._here < self._escaped + UNLIMITED:
            require_entry(self._here, self._escaped)
            self._time = decode_suffix(self._here[-TAIL_BYTES:-1])
            self._value = self._reader.value() if self._here[-1] else None

    def _go(self, target: bytes) -> None:
        """Move to the first entry at or above `target`."""
        if self._is_placed:
            if self._here is None or self._here >= target:
                return
            if self._seeks_due:
                self._seeks_due -= 1
            else:
                for _ in range(self._steps):
                    self._step()
                    if self._here is None or self._here >= target:
                        self._vain = 0
                        return
                self._vain = min(2 * self._vain + 1, VAIN_MAX)
                self._seeks_due = self._vain
        self._reader.seek(target)
        self._is_placed = True
        self._look()

    def _step(self) -> None:
        self._reader.next()
        self._look()

    def _look(self) -> None:
        self._here = self._reader.key()
        if self._here is None:
            self._check(self._reader)
