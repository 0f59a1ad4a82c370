"""The garbage of one key: the stored entries that no read at or above `since` can see.

Each record of a key has a lifetime: a version and a range tombstone live from their timestamp on, a
row of an import lives from the time it was added until the time it was reverted. A read at t sees
the newest record alive at t. Among the records that began at or below `since`, reads at or above
`since` can see the newest; if its life ends, then also the newest record that outlives it; and so
on, up to a record that lives for ever. All other records are garbage.

A read tells the time of its version as well. Where the revert of an import brought a value back,
this is the time of the revert. So the value's entry gets that time in the step that removes the row
of the import. If the value's own life ends, the row stays until then.

Invariants
1. Removing garbage changes no read at or above `since` and no window that starts there, nor the
   time of a value.
2. That holds after each single removal in the order given, oldest first, so that a crash in between
   leaves only unreadable records. Range tombstones go after all garbage.
3. A record that began above `since` is never garbage, nor is a row of an import not yet added.

Source: CockroachDB's rule for one version (garbage if the next newer one, or a covering range
tombstone, is at or below the threshold), extended by lifetimes that end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.codec.keys import FIRST_TIMED_SUFFIX, VALUE, decode_suffix
from kvstore.mvcc.version import Lifetime, Stamps


class _Life(NamedTuple):
    """The lifetime of one record. Sorts by its begin; a range tombstone, which has no tail, sorts
    before a version of the same time, because the version wins."""

    began: int
    tail: bytes
    ended: int


def garbage(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], *, since: int
) -> list[bytes]:
    """The tails of the entries of one key that are garbage, in the order in which to remove them.

    `tails` are the tails of all entries of the key, `deletions` the times of the range tombstones
    over it. O(n log n) in their number.
    """
    lives = _lives(tails, stamps, deletions, since)
    doomed: list[bytes] = []
    seen_until = since
    for life in lives:
        if life.ended <= seen_until:
            doomed.append(life.tail)
            continue
        seen_until = life.ended
        if seen_until == _FOREVER and life.tail[-1:] != VALUE:
            doomed.append(life.tail)  # a deletion with nothing left under it
    found = _brought_back(lives, since) if doomed else None
    if found is not None and found.shown.ended != _FOREVER:
        doomed.remove(found.row.tail)  # the row gives the value its time
    return [tail for tail in reversed(doomed) if tail]


class Revived(NamedTuple):
    """A value that the revert of an import brought back: the tails of its entry and of the import's
    row, and the time of the revert."""

    tail: bytes
    row: bytes
    time: int


def revived(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], *, since: int
) -> Revived | None:
    """The value of a key that has to get the time of a revert when its `garbage` is removed. Its
    row is garbage."""
    found = _brought_back(_lives(tails, stamps, deletions, since), since)
    if found is None or found.shown.ended != _FOREVER:
        return None
    return Revived(found.shown.tail, found.row.tail, found.row.ended)


class _BroughtBack(NamedTuple):
    """The record that a read at `since` sees, and the row whose revert showed it again."""

    shown: _Life
    row: _Life


def _lives(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], since: int
) -> list[_Life]:
    """The records of a key that began at or below `since`, newest first."""
    lives = [_Life(t, b"", _FOREVER) for t in deletions if t <= since]
    for tail in tails:
        life = _life(tail, stamps)
        if life is not None and life.began <= since:
            lives.append(life)
    lives.sort(reverse=True)
    return lives


def _brought_back(lives: Sequence[_Life], since: int) -> _BroughtBack | None:
    """The value that the last revert at or below `since` brought back, if a read there sees it."""
    shown = next((life for life in lives if life.ended > since), None)
    if shown is None or shown.tail[-1:] != VALUE:
        return None
    ended = [life for life in lives if shown.began < life.ended <= since]
    for row in sorted(ended, key=lambda life: -life.ended):
        # A newer record that was alive until then hid the row: its revert changed nothing.
        if not any(row.began < other.began < row.ended <= other.ended for other in lives):
            return _BroughtBack(shown, row)
    return None


def _life(tail: bytes, stamps: Stamps) -> _Life | None:
    if tail >= FIRST_TIMED_SUFFIX:
        return _Life(decode_suffix(tail[:-1]), tail, _FOREVER)
    lifetime = stamps.get(tail[:-1])
    return None if lifetime is None else _Life(lifetime.added, tail, lifetime.reverted)


_FOREVER = Lifetime(0).reverted
