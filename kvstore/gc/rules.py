"""What of one key nobody can read any more, once history below `since` is given up.

Everything that can show at a key lives for a while: a version from its timestamp on, a row of an
import from the time it was added until it was reverted, a range tombstone from its timestamp on.
A read at t sees the newest of those alive at t. So of what began at or below `since`, a
read at or above `since` can see: the newest; if that is a row that will have been reverted, what
shows after it; and so on until something that lives for ever.

Invariants
1. No read at or above `since`, and no window that starts there, notices that garbage goes.
2. That holds after each single removal in the order given (oldest first), so that a crash
   in between leaves junk at most. Range tombstones go after all of it.
3. What began above `since` is never garbage, nor are rows of imports not added yet.

Source: CockroachDB's rule for one version (garbage if the next newer one, or a covering range
tombstone, is at or below the threshold), extended by lifetimes that end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.codec.keys import FIRST_TIMED_SUFFIX, VALUE, decode_suffix
from kvstore.mvcc.version import Lifetime, Stamps


class _Life(NamedTuple):
    """Something that can show at the key. Sorts by when it began; a range tombstone (no tail)
    before a version of the same time, which wins over it."""

    began: int
    tail: bytes
    ended: int


def garbage(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], *, since: int
) -> list[bytes]:
    """Tails of the stored entries of one key that can go, in the order they must go in.

    `tails` are all the key has, `deletions` the times of the range tombstones over it.
    O(n log n) in them.
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
            doomed.append(life.tail)  # a deletion of nothing
    return [tail for tail in reversed(doomed) if tail]


def _life(tail: bytes, stamps: Stamps) -> _Life | None:
    if tail >= FIRST_TIMED_SUFFIX:
        return _Life(decode_suffix(tail[:-1]), tail, _FOREVER)
    lifetime = stamps.get(tail[:-1])
    return None if lifetime is None else _Life(lifetime.added, tail, lifetime.reverted)


_FOREVER = Lifetime(0).reverted
