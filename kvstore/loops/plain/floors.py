"""Floors: the greatest live key at or below a place, for many places.

A floor is found from its place downwards. The entries of a key come oldest first on this way, so
the last visible one of them decides, and the references of imports come behind all of them. A key
with many entries takes two seeks; a key that is not alive takes a step for each of its entries.

Invariants
1. The reader stands at the last entry of a key, or at any entry of it, when the key is decided: the
   next move leads to the entries below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    KEY_BYTES_LEAST,
    KIND_MAX,
    TAIL_BYTES,
    VALUE,
    check_data_key,
    decode_suffix,
    encode_suffix,
)
from kvstore.codec.ordered import TERMINATOR, is_escaped, unescape
from kvstore.loops.contract import BackSeeker, LimitNode
from kvstore.loops.plain.deletions import deleted_at, deletions_of


def find_floors(
    reader: BackSeeker,
    check: Callable[[Any], None],
    places: Sequence[bytes],
    times: Sequence[int],
    least: bytes,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    steps: int,
    bytes_max: int,
) -> list[tuple[bytes, bytes] | None] | None:
    """For each of `places` at its own time of `times`: the greatest key whose entries lie below
    the place, and that is alive then, with its value. None where there is no such key with entries
    at or above `least`.

    `limits` is as in `find_timed`. Passes up to `steps` entries of a key before it seeks.
    Returns None once the keys and values found for several places have more than `bytes_max` bytes.
    """
    if len(times) != len(places):
        raise ValueError("a place has one time")
    found: list[tuple[bytes, bytes] | None] = [None] * len(places)
    seeker = _Descent(reader, check, least, stamps, steps)
    for at in sorted(range(len(places)), key=places.__getitem__):
        reader.seek_for_prev(places[at])
        while (version := seeker.newest(times[at])) is not None:
            key, time, value = version
            deleted = deleted_at(deletions_of(limits, depth, key), times[at])
            if value is not None and time >= deleted:
                found[at] = key, value
                bytes_max -= len(key) + len(value)
                if bytes_max < 0 and len(places) > 1:
                    return None
                break
    return found


class _Descent:
    """A reader that moves down from key to key."""

    def __init__(
        self,
        reader: BackSeeker,
        check: Callable[[Any], None],
        least: bytes,
        stamps: Mapping[bytes, tuple[int, int]],
        steps: int,
    ) -> None:
        self._reader = reader
        self._check = check
        self._least = least
        self._stamps = stamps
        self._steps = steps

    def newest(self, as_of: int) -> tuple[bytes, int, bytes | None] | None:
        """The key whose entries the reader has reached, with the time and the value of its newest
        version at `as_of`: -1 and None where it has none. None where no key is left. The reader
        moves below the entries of the key."""
        here = self._here()
        if here is None:
            return None
        stem = here[:-TAIL_BYTES]
        newest, value, passed = -1, None, 0
        while here is not None and here[:-TAIL_BYTES] == stem:
            tail, passed = here[-TAIL_BYTES:], passed + 1
            if tail < FIRST_TIMED_SUFFIX:
                added, reverted = self._stamps.get(tail[:-1], (0, 0))
                is_newer = newest < added <= as_of < reverted
                time = added
            else:
                time = decode_suffix(tail[:-1])
                is_newer = time <= as_of
                if passed > self._steps and is_newer:  # the newest one lies further up
                    here = self._jump(stem + encode_suffix(as_of))
                    time = decode_suffix(here[-TAIL_BYTES:-1])
            if is_newer:
                newest, value = time, self._reader.value() if here[-1] else None
            if passed > self._steps and tail >= FIRST_TIMED_SUFFIX:
                self._reader.seek_for_prev(stem + FIRST_TIMED_SUFFIX)
            else:
                self._reader.prev()
            here = self._here()
        key = stem[: -len(TERMINATOR)]
        if not is_escaped(key):
            check_data_key(stem + encode_suffix(0) + VALUE)
        return unescape(key), newest, value

    def _jump(self, target: bytes) -> bytes:
        self._reader.seek(target)
        here = self._here()
        assert here is not None, "an entry that was passed is gone from the reader's view"
        return here

    def _here(self) -> bytes | None:
        """The entry here, None where it lies below every requested key."""
        here = self._reader.key()
        if here is None:
            self._check(self._reader)
            return None
        if here < self._least:
            return None
        is_framed = here[-KEY_BYTES_LEAST:-TAIL_BYTES] == TERMINATOR
        if len(here) < KEY_BYTES_LEAST or not is_framed or here[-1] > KIND_MAX:
            check_data_key(here)
        return here
