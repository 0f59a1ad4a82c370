"""What a key was at one time, and how the stored entries of one key become its history.

Three things make a version of a key: an entry with a timestamp, an entry of an import (a stamp
reference, visible from the time the import was added until it was reverted), and a range
tombstone that covers it. When an import is reverted, each key that showed its row becomes at
that time what it would be without it: that is a version too, derived, stored nowhere.

Invariants
1. The state of a key at t is its newest version at or below t. There is no other rule.
2. At one timestamp a key has one version; where a batch deleted a range and wrote into it, the
   write is it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kvstore.codec.keys import FIRST_TIMED_SUFFIX, VALUE, decode_suffix
from kvstore.timestamp import TIMESTAMP_MAX, Timestamp


class Version(NamedTuple):
    """A key at one time. `value` is None where the key was deleted, by point or by range."""

    key: bytes
    timestamp: Timestamp
    value: bytes | None


class Lifetime(NamedTuple):
    """When an import is visible: `added <= t < reverted`."""

    added: int
    reverted: int = TIMESTAMP_MAX + 1


Stamps: TypeAlias = Mapping[bytes, Lifetime]
"""Lifetime of each added import, by the suffix its rows carry. Replaced, never changed, so that a
reader keeps what it started with. Imports that were never added are not in it: invisible."""

Revision: TypeAlias = "tuple[int, bytes | None]"
"""Timestamp and value of one version, the key being understood."""

StoredEntry: TypeAlias = "tuple[bytes, bytes]"
"""The tail (suffix and kind) and the value of one stored entry, the key being understood."""


def timeline(
    entries: Iterable[StoredEntry], stamps: Stamps, deletions: Sequence[int]
) -> list[Revision]:
    """All versions of one key, newest first, from what is stored of it.

    `deletions` are the timestamps of the range tombstones that cover the key. Costs
    O(n log n) in the versions; the common key without imports and ranges is one pass.
    """
    lives: list[tuple[Lifetime, bytes | None]] = []
    revisions: list[Revision] = []
    for tail, value in entries:
        content = value if tail[-1:] == VALUE else None
        if tail < FIRST_TIMED_SUFFIX:
            lifetime = stamps.get(tail[:-1])
            if lifetime is not None:
                lives.append((lifetime, content))
        else:
            revisions.append((decode_suffix(tail[:-1]), content))
    if not lives and not deletions:
        return revisions
    written = {timestamp for timestamp, _ in revisions}
    revisions.extend((timestamp, None) for timestamp in deletions if timestamp not in written)
    timed = revisions[:]
    revisions.extend((lifetime.added, content) for lifetime, content in lives)
    revisions.extend(_uncovered(timed, lives))
    revisions.sort(key=_newest_first)
    return revisions


def newest_at(revisions: Sequence[Revision], as_of: int) -> Revision | None:
    """The version a read at `as_of` sees, from revisions that are newest first."""
    for revision in revisions:
        if revision[0] <= as_of:
            return revision
    return None


def _newest_first(revision: Revision) -> int:
    return -revision[0]


def _uncovered(
    timed: Sequence[Revision], lives: Sequence[tuple[Lifetime, bytes | None]]
) -> Iterable[Revision]:
    """What the key became at each revert that took away the version it showed."""
    always = [(Lifetime(timestamp), value) for timestamp, value in timed]
    everything = sorted([*always, *lives], key=lambda life: -life[0].added)
    for moment in {
        lifetime.reverted for lifetime, _ in lives if lifetime.reverted <= TIMESTAMP_MAX
    }:
        shown = _showing(everything, moment - 1)
        if shown is not None and shown[0].reverted == moment:
            below = _showing(everything, moment)
            yield moment, None if below is None else below[1]


def _showing(
    everything: Sequence[tuple[Lifetime, bytes | None]], as_of: int
) -> tuple[Lifetime, bytes | None] | None:
    for life in everything:
        if life[0].added <= as_of < life[0].reverted:
            return life
    return None
