"""A reference store for random tests: a list of commits, slow, plain, and right by inspection.

One rule answers every read: the value of a key at `t` comes from the newest commit at or below `t`
that mentions the key, not counting imports that were reverted by then. A test makes each write
both on a store and on a `Model`, and compares what both answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

Row = tuple[int, str, bytes, bytes | None, bytes | None]
"""A change as a row: timestamp, op, key, end key, value."""


def order(row: Row) -> tuple[int, bool, bytes]:
    """The sort key of changes: by time, range deletes before the keys of the same commit."""
    return row[0], row[1] != "delete_range", row[2]


def state_after(state: dict[bytes, bytes], rows: Iterable[Row]) -> dict[bytes, bytes]:
    """The state that `rows` make of `state`, applied in time order."""
    after = dict(state)
    for _, op, key, end, value in sorted(rows, key=order):
        if op == "delete_range":
            assert end is not None
            after = {k: v for k, v in after.items() if not key <= k < end}
        elif op == "delete":
            after.pop(key, None)
        else:
            assert value is not None
            after[key] = value
    return after


Event = tuple[int, bytes | None, bool]
"""One change of a key: timestamp, value, whether a range delete made it."""


@dataclass
class Commit:
    """The writes of one commit. A batch's puts win over its range deletes."""

    timestamp: int
    points: dict[bytes, bytes | None] = field(default_factory=dict)
    ranges: list[tuple[bytes, bytes]] = field(default_factory=list)
    import_id: int = 0
    reverted: int | None = None

    def event(self, key: bytes) -> Event | None:
        """The event of the commit at `key`. None if the commit does not mention the key."""
        if key in self.points:
            return self.timestamp, self.points[key], False
        if any(start <= key < end for start, end in self.ranges):
            return self.timestamp, None, True
        return None


class Model:
    """Every commit of a store, in the order of their timestamps."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.expiring: dict[tuple[bytes, int], tuple[int, int | None]] = {}
        """For each key and timestamp of a put with an expiry: when it is due, and since when that
        is cancelled."""

    # -- writing ----------------------------------------------------------------------------

    def batch(self, timestamp: int, ops: Iterable[tuple[str, bytes, bytes | None]]) -> None:
        """Commit `(op, key, other)` in the order they were made.

        `other` is the value of a `put`, the end key of a `delete_range`, None for a `delete`.
        """
        made = Commit(timestamp)
        for op, key, other in ops:
            if op == "delete_range":
                assert other is not None
                made.ranges.append((key, other))
                made.points = {k: v for k, v in made.points.items() if not key <= k < other}
            else:
                made.points[key] = other if op == "put" else None
        for key, value in list(made.points.items()):
            if value is None and any(start <= key < end for start, end in made.ranges):
                del made.points[key]
        self.commits.append(made)

    def add(self, timestamp: int, import_id: int, rows: dict[bytes, bytes | None]) -> None:
        """Commit an import of `rows`; the value None deletes."""
        self.commits.append(Commit(timestamp, dict(rows), import_id=import_id))

    def revert(self, timestamp: int, import_id: int) -> None:
        """Revert an import at `timestamp`."""
        for commit in self.commits:
            if commit.import_id == import_id:
                commit.reverted = timestamp

    def clear(self, start: bytes, end: bytes) -> None:
        """Remove the keys of `[start, end)` from every commit, imports and their reverts too."""
        for commit in self.commits:
            commit.points = {k: v for k, v in commit.points.items() if not start <= k < end}
            cut = [(a, min(b, start)) for a, b in commit.ranges]
            cut += [(max(a, end), b) for a, b in commit.ranges]
            commit.ranges = [(a, b) for a, b in cut if a < b]

    def expire(self, key: bytes, timestamp: int, due: int) -> None:
        """Have the version that `key` got at `timestamp` expire at `due`."""
        self.expiring[key, timestamp] = due, None

    def persist(self, key: bytes, timestamp: int) -> None:
        """Cancel the expiry of `key` at `timestamp`."""
        written, _, _ = self.newest(key, timestamp)
        due, _ = self.expiring[key, written]
        self.expiring[key, written] = due, timestamp

    def due(self, key: bytes, as_of: int) -> int | None:
        """The time at which `key` expires, as of `as_of`; None if it does not. A value that the
        revert of an import brought back does not."""
        written, value, _ = self.newest(key, as_of)
        due, cancelled = self.expiring.get((key, written), (None, None))
        return due if value is not None and (cancelled is None or as_of < cancelled) else None

    def settle(self, upto: int) -> None:
        """Delete the keys that are due at or below `upto`, each at its time."""
        dues = [(due, key) for (key, _), (due, _) in self.expiring.items() if due <= upto]
        for due, key in sorted(dues):
            if self.due(key, due) == due:
                same = [commit for commit in self.commits if commit.timestamp == due]
                if not same:
                    same = [Commit(due)]
                    self.commits = sorted([*self.commits, *same], key=lambda c: c.timestamp)
                same[0].points[key] = None

    def upto(self, as_of: int) -> Model:
        """The model as it was at `as_of`."""
        model = Model()
        for c in self.commits:
            if c.timestamp <= as_of:
                gone = c.reverted if c.reverted is not None and c.reverted <= as_of else None
                points = dict(c.points)
                model.commits.append(Commit(c.timestamp, points, c.ranges, c.import_id, gone))
        model.expiring = {at: due for at, due in self.expiring.items() if at[1] <= as_of}
        return model

    # -- reading ----------------------------------------------------------------------------

    def showing(self, key: bytes, as_of: int) -> tuple[Commit | None, Event | None]:
        """The commit that decides `key` at `as_of`, and its event."""
        for commit in reversed(self.commits):
            gone = commit.reverted is not None and commit.reverted <= as_of
            if commit.timestamp <= as_of and not gone and (event := commit.event(key)):
                return commit, event
        return None, None

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`; None if it had none."""
        event = self.showing(key, as_of)[1]
        return event[1] if event else None

    def state(self, as_of: int) -> dict[bytes, bytes]:
        """All keys and values at `as_of`."""
        keys = sorted({key for commit in self.commits for key in commit.points})
        found = ((key, self.get(key, as_of)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def events(self, key: bytes) -> list[Event]:
        """All events of `key`, reverts of imports included, newest first."""
        events = [event for commit in self.commits if (event := commit.event(key))]
        for commit in self.commits:
            if commit.reverted and self.showing(key, commit.reverted - 1)[0] is commit:
                events += [(commit.reverted, self.get(key, commit.reverted), False)]
        return sorted(events, key=lambda event: -event[0])

    def newest(self, key: bytes, as_of: int) -> Event:
        """The newest event of `key` at or below `as_of`. A deletion where there is none."""
        return next((e for e in self.events(key) if e[0] <= as_of), (as_of, None, False))

    def changes(
        self, since: int, upto: int, start: bytes, end: bytes | None, *, latest: bool
    ) -> list[Row]:
        """The changes in `(since, upto]`, sorted by `order`.

        With `latest`, each key and each part of a range delete appears once, as its newest change.
        """
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
