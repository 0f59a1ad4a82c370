"""The writes of the latest commits. The cache of newest values is told of them, and memory keeps
them while a transaction is open.

A transaction must learn whether another commit wrote the keys that it has read. The change index
could tell, at the cost of reads; this table answers from memory. While nobody watches, the table is
empty and a commit adds nothing to it.

Invariants
1. While watched it has all keys and spans of the commits above `floor`. A caller whose time lies
   below `floor` asks the change index.
2. It holds at most `RECENT_KEYS_MAX` keys and spans, or one commit. The oldest leave first.
3. The commit lock guards it.
4. Every commit that may change a value is added, whatever wrote it: the cache is exact only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.limits import RECENT_KEYS_MAX
from kvstore.loops.lookup import NewestValues


class Touched(NamedTuple):
    """The keys of a commit, and spans `(start, end)` in which it may have written any key."""

    timestamp: int
    keys: Collection[bytes]
    spans: Sequence[tuple[bytes, bytes | None]]


class RecentCommits:
    """The table of one store."""

    def __init__(self, newest: NewestValues, upper: int) -> None:
        """All commits so far lie below `upper`."""
        self._newest = newest
        newest.note(upper - 1, {}, ())
        self.commits: deque[Touched] = deque()
        self._size = 0
        self.watchers = 0
        self.floor = 0

    def watch(self, since: int) -> None:
        """Keep all commits above `since`, the newest complete time, until `unwatch`."""
        if not self.watchers:
            self.floor = since
        self.watchers += 1

    def unwatch(self) -> None:
        """End one `watch`."""
        self.watchers -= 1
        if not self.watchers:
            self.commits.clear()
            self._size = 0

    def add(
        self,
        timestamp: int,
        points: Mapping[bytes, bytes | None],
        spans: Sequence[tuple[bytes, bytes | None]] = (),
    ) -> None:
        """Note a commit that the engine holds and no reader sees yet. O(points), which are looked
        up in the cache."""
        self._newest.note(timestamp, points, spans)
        if not self.watchers:
            return
        self.commits.append(Touched(timestamp, frozenset(points), tuple(spans)))
        self._size += len(points) + len(spans)
        while self._size > RECENT_KEYS_MAX and len(self.commits) > 1:
            oldest = self.commits.popleft()
            self._size -= len(oldest.keys) + len(oldest.spans)
            self.floor = oldest.timestamp

    def forget(self, upper: int) -> None:
        """Forget all commits, which lie below `upper`. The cache holds no value of them either."""
        self._newest.note(upper - 1, {}, [(b"", None)])
        self.floor = upper - 1
        self.commits.clear()
        self._size = 0

    def since(self, timestamp: int) -> Iterator[Touched] | None:
        """Commits above `timestamp`, newest first; None if some of them have left."""
        if timestamp < self.floor:
            return None
        return self._newest_first(timestamp)

    def _newest_first(self, timestamp: int) -> Iterator[Touched]:
        for commit in reversed(self.commits):
            if commit.timestamp <= timestamp:
                return
            yield commit
