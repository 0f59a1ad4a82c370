"""What the latest commits wrote, kept in memory while somebody has to know.

A transaction must hear whether what it read was written meanwhile. Asking the change index would
cost reads; this table answers from memory. It is empty, and a commit adds nothing to it, while
nobody watches.

Invariants
1. While watched it names all that commits above `floor` wrote; a caller whose time lies below
   `floor` asks the change index.
2. It holds at most `RECENT_KEYS_MAX` keys and spans, or one commit: the oldest leave first.
3. The commit lock guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from kvstore.limits import RECENT_KEYS_MAX


class Touched(NamedTuple):
    """What a commit wrote: keys, and spans `(start, end)` of which any key may be meant."""

    timestamp: int
    keys: Collection[bytes]
    spans: Sequence[tuple[bytes, bytes | None]]


class RecentCommits:
    """The table of one store."""

    def __init__(self) -> None:
        self._commits: deque[Touched] = deque()
        self._size = 0
        self._watchers = 0
        self.floor = 0

    def watch(self, since: int) -> None:
        """Keep all commits above `since`, the newest complete time, until `unwatch`."""
        if not self._watchers:
            self.floor = since
        self._watchers += 1

    def unwatch(self) -> None:
        """End one `watch`."""
        self._watchers -= 1
        if not self._watchers:
            self._commits.clear()
            self._size = 0

    def add(
        self,
        timestamp: int,
        keys: Collection[bytes],
        spans: Sequence[tuple[bytes, bytes | None]] = (),
    ) -> None:
        """Note a commit. Free while nobody watches, else O(keys)."""
        if not self._watchers:
            return
        self._commits.append(Touched(timestamp, frozenset(keys), tuple(spans)))
        self._size += len(keys) + len(spans)
        while self._size > RECENT_KEYS_MAX and len(self._commits) > 1:
            oldest = self._commits.popleft()
            self._size -= len(oldest.keys) + len(oldest.spans)
            self.floor = oldest.timestamp

    def since(self, timestamp: int) -> Iterator[Touched] | None:
        """Commits above `timestamp`, newest first; None if some of them have left."""
        if timestamp < self.floor:
            return None
        return self._newest_first(timestamp)

    def _newest_first(self, timestamp: int) -> Iterator[Touched]:
        for commit in reversed(self._commits):
            if commit.timestamp <= timestamp:
                return
            yield commit
