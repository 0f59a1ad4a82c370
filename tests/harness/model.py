"""A store as a list of commits: slow, plain, and right by inspection.

What a key is at t is answered by one rule: the newest commit at or below t that says something of
the key, leaving out imports that had been reverted by then. All else is asked of that rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.harness.rows import Row, order

Event = tuple[int, bytes | None, bool]  # timestamp, value, whether a range delete made it


@dataclass
class Commit:
    """What one commit did. A batch's puts win over its range deletes."""

    timestamp: int
    points: dict[bytes, bytes | None] = field(default_factory=dict)
    ranges: list[tuple[bytes, bytes]] = field(default_factory=list)
    import_id: int = 0
    reverted: int | None = None

    def say(self, key: bytes) -> Event | None:
        if key in self.points:
            return self.timestamp, self.points[key], False
        if any(start <= key < end for start, end in self.ranges):
            return self.timestamp, None, True
        return None


class Model:
    def __init__(self) -> None:
        self.commits: list[Commit] = []

    # -- writing ----------------------------------------------------------------------------

    def batch(self, timestamp: int, ops: Iterable[tuple[str, bytes, bytes | None]]) -> None:
        """Ops (`put`, `delete`, `delete_range`), in the order they were made."""
        made = Commit(timestamp)
        for op, key, other in ops:
            if op == "delete_range":
                made.ranges.append((key, other))
                made.points = {k: v for k, v in made.points.items() if not key <= k < other}
            else:
                made.points[key] = other if op == "put" else None
        for key, value in list(made.points.items()):
            if value is None and any(start <= key < end for start, end in made.ranges):
                del made.points[key]
        self.commits.append(made)

    def add(self, timestamp: int, import_id: int, rows: dict[bytes, bytes | None]) -> None:
        self.commits.append(Commit(timestamp, dict(rows), import_id=import_id))

    def revert(self, timestamp: int, import_id: int) -> None:
        for commit in self.commits:
            if commit.import_id == import_id:
                commit.reverted = timestamp

    def clear(self, start: bytes, end: bytes) -> None:
        """Nothing is said any more of the keys in `[start, end)`. What is cut from an import is
        gone from it, and from what its revert will say."""
        for commit in self.commits:
            commit.points = {k: v for k, v in commit.points.items() if not start <= k < end}
            cut = [(a, min(b, start)) for a, b in commit.ranges]
            cut += [(max(a, end), b) for a, b in commit.ranges]
            commit.ranges = [(a, b) for a, b in cut if a < b]

    def upto(self, as_of: int) -> Model:
        """The store as if nothing had happened after `as_of`."""
        model = Model()
        for c in self.commits:
            if c.timestamp <= as_of:
                gone = c.reverted if c.reverted is not None and c.reverted <= as_of else None
                model.commits.append(Commit(c.timestamp, c.points, c.ranges, c.import_id, gone))
        return model

    # -- reading ----------------------------------------------------------------------------

    def showing(self, key: bytes, as_of: int) -> tuple[Commit | None, Event | None]:
        for commit in reversed(self.commits):
            gone = commit.reverted is not None and commit.reverted <= as_of
            if commit.timestamp <= as_of and not gone and (said := commit.say(key)):
                return commit, said
        return None, None

    def get(self, key: bytes, as_of: int) -> bytes | None:
        said = self.showing(key, as_of)[1]
        return said[1] if said else None

    def state(self, as_of: int) -> dict[bytes, bytes]:
        keys = sorted({key for commit in self.commits for key in commit.points})
        found = ((key, self.get(key, as_of)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def events(self, key: bytes) -> list[Event]:
        """Everything that happened to `key`, newest first."""
        events = [said for commit in self.commits if (said := commit.say(key))]
        for commit in self.commits:
            if commit.reverted and self.showing(key, commit.reverted - 1)[0] is commit:
                events += [(commit.reverted, self.get(key, commit.reverted), False)]
        return sorted(events, key=lambda event: -event[0])

    def changes(
        self, since: int, upto: int, start: bytes, end: bytes | None, *, latest: bool
    ) -> list[Row]:
        """Changes in `(since, upto]`, as a sorted list."""
        keys = {key for commit in self.commits for key in commit.points}
        state = latest and since == 0
        rows: list[Row] = [] if state else list(self._ranges(since, upto, start, end, latest))
        for key in keys:
            if key < start or (end is not None and key >= end):
                continue
            events = [event for event in self.events(key) if event[0] <= upto]
            for timestamp, value, by_range in events[:1] if latest else events:
                op = "delete" if value is None else "put"
                if timestamp > since and not by_range and not (state and value is None):
                    rows += [(timestamp, op, key, None, value)]
        return sorted(rows, key=order)

    def _ranges(
        self, since: int, upto: int, start: bytes, end: bytes | None, latest: bool
    ) -> Iterator[Row]:
        lines = [(c.timestamp, *r) for c in self.commits for r in c.ranges]
        lines = [line for line in lines if since < line[0] <= upto]
        cuts = {key for _, *ends in lines for key in ends} | {start} | ({end} if end else set())
        inside = [key for key in sorted(cuts) if start <= key and (not end or key <= end)]
        growing: dict[int, tuple[bytes, bytes]] = {}
        for low, high in pairwise(inside):
            over = sorted({t for t, a, b in lines if a <= low < b}, reverse=True)
            for timestamp in over[:1] if latest else over:
                begun, reached = growing.get(timestamp, (low, low))
                if reached != low:
                    yield timestamp, "delete_range", begun, reached, None
                    begun = low
                growing[timestamp] = (begun, high)
        for timestamp, (begun, reached) in growing.items():
            yield timestamp, "delete_range", begun, reached, None
