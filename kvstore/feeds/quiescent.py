"""Quiescent points: states in which no changeset is half done, with proof that no event is missing.

The commits of a changeset are not atomic, so the state at any time may show half of a changeset.
The reader goes from quiescent point to quiescent point. Between two points it compares the change
index with the epochs: epochs must follow each other without a gap, and count as many events as the
index holds. The reader takes its changes from the versions, so it buffers nothing, and changes that
cancel each other never appear.

Invariants
1. The reader yields a point only if all events up to it are in epochs, each with its full count.
2. At a quiescent point no changeset was open.
3. The first epoch of a domain begins at 0. Restored and replicated changes have no domain, and no
   epoch counts them: each of their commits is atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from kvstore.changes.audit import Audit, find_anchor
from kvstore.changes.change import Change
from kvstore.changes.epoch import Epoch
from kvstore.changes.index import ChangeIndex
from kvstore.claims import Pins
from kvstore.commit import Committer
from kvstore.errors import HistoryGoneError
from kvstore.reads import Reads
from kvstore.timestamp import Timestamp


@dataclass(frozen=True, slots=True)
class QuiescentPoint:
    """A time at which no changeset was half done, and the changes since the point before."""

    since: Timestamp
    timestamp: Timestamp
    _changes: Callable[[int, int], Iterator[Change]]

    def changes(self) -> Iterator[Change]:
        """The changes that turn the state at `since` into the state at `timestamp`, by key."""
        return self._changes(self.since, self.timestamp)


class QuiescentReader:
    """Iterates over the quiescent points above `since`. Iterate again for points that came later.

    Raises `EventsMissingError` at the first epoch whose count differs from the index.
    """

    def __init__(
        self,
        index: ChangeIndex,
        committer: Committer,
        epochs: Callable[[], Iterator[Epoch]],
        changes: Callable[[int, int], Iterator[Change]],
        *,
        since: Timestamp,
        reads: Reads,
        pins: Pins,
    ) -> None:
        self._index = index
        self._reads = reads
        self._committer = committer
        self._epochs = epochs
        self._changes = changes
        self._pins = pins
        self.position = since

    def __iter__(self) -> Iterator[QuiescentPoint]:
        """Yield the points. Costs two passes over the stored epochs and the headers of new entries.

        A pin keeps history meanwhile, because the reader would miss events that GC removes.
        """
        pin = self._pins.new()
        try:
            with self._committer.lock:
                self._pins.keep(pin, self._committer.since, kind="pass")
                floor = self._reads.indexed_since
            yield from self._points(floor)
        finally:
            self._pins.let_go(pin, None)

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
        if first is not None and first not in epochs:  # `in` takes the epochs up to `first`
            raise HistoryGoneError(as_of=self.position, since=self._committer.since)
        return epochs
