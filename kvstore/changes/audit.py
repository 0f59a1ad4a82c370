"""The audit: compares change events with the epochs that count them.

The audit is pure: its caller passes in events and epochs, in the order of time. A reader stops at
the first problem; a verification lists all problems.

Invariants
1. The epochs of a domain follow each other without a gap, and the first one begins at 0.
2. An epoch holds as many events as it counts, and at a quiescent epoch no event is left over.
3. Restored and replicated changes have no domain, and no epoch counts them: each of their commits
   is atomic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvstore.changes.epoch import Epoch
from kvstore.errors import EventsMissingError


class Audit:
    """An audit that begins after a quiescent epoch or at the beginning of a domain."""

    def __init__(self, *, after: Epoch | None = None) -> None:
        self._domain = 0 if after is None else after.domain
        self._edge = 0 if after is None else after.end
        self._waiting: dict[tuple[int, int], int] = {}

    def add(self, changeset: tuple[int, int], events: int) -> None:
        """Count `events` of a changeset."""
        if changeset[0]:
            self._waiting[changeset] = self._waiting.get(changeset, 0) + events

    def over(
        self, epochs: Iterable[Epoch], headers: Iterator[tuple[int, int, tuple[int, int]]]
    ) -> Iterator[Epoch]:
        """Yield each epoch after adding the events before its close; at the end add the other
        events. `headers` come from `ChangeIndex.headers`."""
        header = next(headers, None)
        for epoch in epochs:
            while header is not None and header[0] < epoch.closed_at:
                self.add(header[2], header[1])
                header = next(headers, None)
            yield epoch
        while header is not None:
            self.add(header[2], header[1])
            header = next(headers, None)

    def close(self, epoch: Epoch) -> None:
        """Close an epoch whose events are all added. Raises `EventsMissingError` on a mismatch."""
        for where, problem in self.judge(epoch):
            raise EventsMissingError(where, problem)

    def judge(self, epoch: Epoch) -> Iterator[tuple[str, str]]:
        """Close an epoch; yields each mismatch as (where, problem). A caller that takes all of them
        can continue with the next epoch."""
        gap = gap_before(epoch, domain=self._domain, edge=self._edge)
        if gap is not None:
            yield gap
        members = [
            changeset
            for changeset in self._waiting
            if changeset[0] == epoch.domain and epoch.begin <= changeset[1] < epoch.end
        ]
        found = sum(self._waiting.pop(changeset) for changeset in members)
        if found != epoch.events:
            yield (
                f"epoch [{epoch.begin}, {epoch.end}) of domain {epoch.domain:016x}",
                f"it counts {epoch.events} events, {found} are there",
            )
        if epoch.quiescent and self._waiting:
            left = len(self._waiting)
            self._waiting.clear()
            yield f"changes below {epoch.closed_at}", f"{left} changesets are in no epoch"
        self._domain, self._edge = epoch.domain, epoch.end

    def left_over(self, domain: int) -> int:
        """How many changesets are in no epoch and never will be.

        Changesets may still be open in `domain`; changesets that it began after its last epoch are
        not counted.
        """
        edge = self._edge if domain == self._domain else 0
        return sum(owner != domain or serial < edge for owner, serial in self._waiting)


def gap_before(epoch: Epoch, *, domain: int, edge: int) -> tuple[str, str] | None:
    """The problem before an epoch, if the epoch before it ended at `edge` of `domain`."""
    expected = edge if epoch.domain == domain else 0
    if epoch.begin == expected:
        return None
    return (
        f"domain {epoch.domain:016x}",
        f"an epoch begins at {epoch.begin}, the one before ended at {expected}",
    )


class Anchor(NamedTuple):
    """The begin of counting: after a quiescent epoch, or (None) at the beginning of the index."""

    after: Epoch | None

    @property
    def since(self) -> int:
        """All events after this time are counted."""
        return 0 if self.after is None else self.after.closed_at - 1


def find_anchor(epochs: Iterator[Epoch], *, floor: int, upto: int) -> Anchor | None:
    """The last anchor at or below the time `upto`, else the first anchor above it; None: no anchor
    yet.

    Counting from an anchor must see every event. In an index that was trimmed, or begins with a
    restore, the first anchor is therefore the first quiescent epoch above its `floor`.
    """
    found, is_whole = Anchor(None), floor == 0
    for number, epoch in enumerate(epochs):
        is_whole = is_whole and (number > 0 or epoch.begin == 0)
        if epoch.quiescent:
            at = epoch.closed_at - 1
            if is_whole and at > upto:
                break
            found, is_whole = Anchor(epoch), at >= floor
    return found if is_whole else None
