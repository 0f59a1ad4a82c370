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

from kvstore.changes.audit import Audit, find_anchor
from kvstore.changes.change import Change
from kvstore.changes.epoch import Epoch
from kvstore.changes.index import ChangeIndex
from kvstore.commit import Committer
from kvstore.errors import HistoryGoneError
from kvstore.holds import Holds
from kvstore.timestamp import Timestamp


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
        holds: Holds,
    ) -> None:
        self._index = index
        self._index_floor = index_floor
        self._committer = committer
        self._epochs = epochs
        self._changes = changes
        self._holds = holds
        self.position = since

    def __iter__(self) -> Iterator[QuiescentPoint]:
        """Costs two passes over the epochs that are kept, and the headers of what is new. History
        stays meanwhile: events that GC takes would be missed."""
        pin = self._holds.new_pin()
        try:
            with self._committer.lock:
                since = self._committer.since
                self._holds.pin(since, pin, kind="pass")
            yield from self._points(max(since, self._index_floor))
        finally:
            self._holds.let_go(pin, None)

    def _points(self, floor: int) -> Iterator[QuiescentPoint]:
        durable = self._committer.make_durable()
        anchor = find_anchor(self._complete(durable), floor=floor, upto=self.position)
        if anchor is None:
            return
        audit = Audit(after=anchor.after)
        headers = self._index.headers(since=anchor.since, upto=durable - 1)
        for epoch in audit.over(self._after(anchor.after, durable), headers):
            audit.close(epoch)
            reached = Timestamp(epoch.closed_at - 1)
            if epoch.quiescent and reached > self.position:
                since, self.position = self.position, reached
                yield QuiescentPoint(since, reached, self._changes)

    def _complete(self, durable: int) -> Iterator[Epoch]:
        """The epochs whose events are all durable, oldest first."""
        return takewhile(lambda epoch: epoch.closed_at <= durable, self._epochs())

    def _after(self, first: Epoch | None, durable: int) -> Iterator[Epoch]:
        """The epochs that follow `first`. Raises `HistoryGoneError` if it was trimmed since."""
        epochs = self._complete(durable)
        if first is not None and first not in epochs:  # which takes all up to it
            raise HistoryGoneError(as_of=self.position, since=self._committer.since)
        return epochs
