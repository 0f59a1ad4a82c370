"""A version of a key, and the history of a key made from its stored entries.

A version of a key comes from one of three records: an entry with a timestamp; an entry of an
import, which carries a stamp reference and is visible from the time the import was added until it
was reverted; a range tombstone over the key. A revert of an import makes versions as well: each key
that showed the import's row gets, at that time, the value it would have without the row. Such a
version is derived when it is read, and stored nowhere.

Invariants
1. The state of a key at t is its newest version at or below t. There is no other rule.
2. At one timestamp a key has one version. Where a batch deleted a range and wrote a key inside it,
   the write is the version of that key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.keys import FIRST_TIMED_SUFFIX, VALUE, decode_suffix


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
"""Lifetime of each added import, by the suffix of its rows. The mapping is replaced, never changed,
so that a reader keeps the one that it began with. An import that was never added has no lifetime:
its rows are invisible."""

Revision: TypeAlias = "tuple[int, bytes | None]"
"""Timestamp and value of one version. The context knows the key."""

StoredEntry: TypeAlias = "tuple[bytes, bytes]"
"""The tail (suffix and kind) and the value of one stored entry. The context knows the key."""


def timeline(
    entries: Iterable[StoredEntry], stamps: Stamps, deletions: Sequence[int]
) -> list[Revision]:
    """All versions of one key, newest first, made from its stored entries.

    `deletions` are the timestamps of the range tombstones that cover the key. O(n log n) in the
    versions; a key without imports and range tombstones, the common one, takes one pass.
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
    """The revision that a read at `as_of` sees. `revisions` has the newest first."""
    for revision in revisions:
        if revision[0] <= as_of:
            return revision
    return None


def _newest_first(revision: Revision) -> int:
    return -revision[0]


def _uncovered(
    timed: Sequence[Revision], lives: Sequence[tuple[Lifetime, bytes | None]]
) -> Iterable[Revision]:
    """The revisions that reverts made: one for each revert that took away the version in sight.

    A sweep over time. `alive` ends with the version in sight: what is below it shows again once it
    is reverted. A version that is reverted never shows again, so each is put there and taken once.
    """
    always = [(Lifetime(timestamp), value) for timestamp, value in timed]
    coming = sorted([*always, *lives], key=lambda life: -life[0].added)  # the next one is the last
    alive: list[tuple[Lifetime, bytes | None]] = []

    def shown(as_of: int) -> tuple[Lifetime, bytes | None] | None:
        while coming and coming[-1][0].added <= as_of:
            alive.append(coming.pop())
        while alive and alive[-1][0].reverted <= as_of:
            alive.pop()
        return alive[-1] if alive else None

    reverts = {life.reverted for life, _ in lives if life.reverted <= TIMESTAMP_MAX}
    for moment in sorted(reverts):
        before = shown(moment - 1)
        if before is not None and before[0].reverted == moment:
            below = shown(moment)
            yield moment, None if below is None else below[1]
