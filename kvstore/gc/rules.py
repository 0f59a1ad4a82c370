"""The garbage of one key: the stored entries that no read at or above `since` can see.

Each record of a key has a lifetime: a version and a range tombstone live from their timestamp on, a
row of an import lives from the time it was added until the time it was reverted. A read at t sees
the newest record alive at t. Among the records that began at or below `since`, reads at or above
`since` can see the newest; if its life ends, then also the newest record that outlives it; and so
on, up to a record that lives for ever. All other records are garbage.

Invariants
1. Removing garbage changes no read at or above `since` and no window that starts there.
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
    lives = [_Life(t, b"", _FOREVER) for t in deletions if t <= since]
    for tail in tails:
        life = _life(tail, stamps)
        if life is not None and life.began <= since:
            lives.append(life)
    lives.sort(reverse=True)
    doomed: list[bytes] = []
    seen_until = since
    for life in lives:
        if life.ended <= seen_until:
            doomed.append(life.tail)
            continue
        seen_until = life.ended
        if seen_until == _FOREVER and life.tail[-1:] != VALUE:
            doomed.append(life.tail)  # a deletion with nothing left under it
    return [tail for tail in reversed(doomed) if tail]


def _life(tail: bytes, stamps: Stamps) -> _Life | None:
    if tail >= FIRST_TIMED_SUFFIX:
        return _Life(decode_suffix(tail[:-1]), tail, _FOREVER)
    lifetime = stamps.get(tail[:-1])
    return None if lifetime is None else _Life(lifetime.added, tail, lifetime.reverted)


_FOREVER = Lifetime(0).reverted
