"""Reading by changesets: states in which none is half done, and proof that nothing is missing.

A changeset's commits are not atomic, so a state taken anywhere may show half of one. The reader
goes from quiescent point to quiescent point. Between them it holds the change index against the
epochs: they must follow each other without a gap, and count as many events as there are. What it
hands out is read from the versions, so nothing is buffered and changes that cancel each other
never appear.

Invariants
1. A point is handed out only if all events up to it are in epochs, each with its whole count.
2. The state at a point is one the store was in while no changeset was open.
3. A domain's first epoch begins at 0. Changes without a domain (restored, replicated) are not
   counted; they are atomic commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from kvstore.changes.change import Change
from kvstore.changes.epoch import Epoch
from kvstore.changes.index import ChangeIndex
from kvstore.commit import Committer
from kvstore.errors import EventsMissingError, HistoryGoneError
from kvstore.timestamp import Timestamp


class Audit:
    """Holds events against epochs. Pure: it is told both, in the order of time."""

    def __init__(self, *, after: Epoch | None = None) -> None:
        """Begin after an epoch that was quiescent, or at the beginning of a domain."""
        self._domain = 0 if after is None else after.domain
        self._edge = 0 if after is None else after.end
        self._waiting: dict[tuple[int, int], int] = {}

    def add(self, changeset: tuple[int, int], events: int) -> None:
        """Events of a changeset were seen."""
        if changeset[0]:
            self._waiting[changeset] = self._waiting.get(changeset, 0) + events

    def close(self, epoch: Epoch) -> None:
        """All its events have been added. Raises `EventsMissingError` where it does not fit."""
        expected = self._edge if epoch.domain == self._domain else 0
        if epoch.begin != expected:
            raise EventsMissingError(
                f"domain {epoch.domain:016x}",
                f"an epoch begins at {epoch.begin}, the one before ended at {expected}",
            )
        members = [
            changeset
            for changeset in self._waiting
            if changeset[0] == epoch.domain and epoch.begin <= changeset[1] < epoch.end
        ]
        found = sum(self._waiting.pop(changeset) for changeset in members)
        if found != epoch.events:
            raise EventsMissingError(
                f"epoch [{epoch.begin}, {epoch.end}) of domain {epoch.domain:016x}",
                f"it counts {epoch.events} events, {found} are there",
            )
        if epoch.quiescent and self._waiting:
            raise EventsMissingError(
                f"changes below {epoch.closed_at}",
                f"{len(self._waiting)} changesets are in no epoch",
            )
        self._domain, self._edge = epoch.domain, epoch.end


@dataclass(frozen=True, slots=True)
class QuiescentPoint:
    """A time at which no changeset was half done, and the way there from the point before."""

    since: Timestamp
    timestamp: Timestamp
    _changes: Callable[[int, int], Iterator[Change]]

    def changes(self) -> Iterator[Change]:
        """What to do to the state at `since` to have the state at `timestamp`, by key."""
        return self._changes(self.since, self.timestamp)


class QuiescentReader:
    """Iterates over the quiescent points above `since`; iterate again for those that came later.

    Raises `EventsMissingError` at the first epoch that does not fit what the index holds.
    """

    def __init__(
        self,
        index: ChangeIndex,
        committer: Committer,
        epochs: Callable[[], Iterator[Epoch]],
        changes: Callable[[int, int], Iterator[Change]],
        *,
        since: Timestamp,
        index_floor: int,
    ) -> None:
        self._index = index
        self._index_floor = index_floor
        self._committer = committer
        self._epochs = epochs
        self._changes = changes
        self.position = since

    def __iter__(self) -> Iterator[QuiescentPoint]:
        """Costs two passes over the epochs that are kept, and the headers of what is new."""
        durable = self._committer.make_durable()
        anchor = self._anchor(durable)
        audit = Audit(after=anchor)
        low = 0 if anchor is None else anchor.closed_at - 1
        headers = self._index.headers(since=low, upto=durable - 1)
        header = next(headers, None)
        for epoch in self._after(anchor, durable):
            while header is not None and header[0] < epoch.closed_at:
                audit.add(header[2], header[1])
                header = next(headers, None)
            audit.close(epoch)
            reached = Timestamp(epoch.closed_at - 1)
            if epoch.quiescent and reached > self.position:
                since, self.position = self.position, reached
                yield QuiescentPoint(since, reached, self._changes)

    def _complete(self, durable: int) -> Iterator[Epoch]:
        """The epochs whose events are all durable, oldest first."""
        return takewhile(lambda epoch: epoch.closed_at <= durable, self._epochs())

    def _anchor(self, durable: int) -> Epoch | None:
        """The epoch to count from: the last quiescent one at or below the position.

        Counting from there must see every event. Where the index was trimmed, or begins with a
        restore, that is the first quiescent one above its floor. None: from the beginning.
        """
        floor = max(self._committer.since, self._index_floor)
        anchor, is_whole = None, floor == 0
        for number, epoch in enumerate(self._complete(durable)):
            is_whole = is_whole and (number > 0 or epoch.begin == 0)
            if epoch.quiescent:
                at = epoch.closed_at - 1
                if is_whole and at > self.position:
                    break
                anchor, is_whole = epoch, at >= floor
        return anchor

    def _after(self, anchor: Epoch | None, durable: int) -> Iterator[Epoch]:
        """The epochs that follow `anchor`. Raises `HistoryGoneError` if it was trimmed since."""
        epochs = self._complete(durable)
        if anchor is not None and anchor not in epochs:  # which takes all up to it
            raise HistoryGoneError(as_of=self.position, since=self._committer.since)
        return epochs
