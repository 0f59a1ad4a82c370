"""The audit: change events held against the epochs that count them.

Pure: it is told both, in the order of time. Readers stop at the first problem; a verification
lists them all and goes on.

Invariants
1. Epochs of a domain follow each other without a gap; its first one begins at 0.
2. Each holds as many events as it counts, and at a quiescent one none is left over.
3. Changes without a domain (restored, replicated) are not counted; they are atomic commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvstore.changes.epoch import Epoch
from kvstore.errors import EventsMissingError


class Audit:
    """Begins after a quiescent epoch, or at the beginning of a domain."""

    def __init__(self, *, after: Epoch | None = None) -> None:
        self._domain = 0 if after is None else after.domain
        self._edge = 0 if after is None else after.end
        self._waiting: dict[tuple[int, int], int] = {}

    def add(self, changeset: tuple[int, int], events: int) -> None:
        """Events of a changeset were seen."""
        if changeset[0]:
            self._waiting[changeset] = self._waiting.get(changeset, 0) + events

    def over(
        self, epochs: Iterable[Epoch], headers: Iterator[tuple[int, int, tuple[int, int]]]
    ) -> Iterator[Epoch]:
        """Each epoch, once the events before its close are added; the rest at the end. `headers`
        are those of `ChangeIndex.headers`."""
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
        """All its events have been added. Raises `EventsMissingError` where it does not fit."""
        for where, problem in self.judge(epoch):
            raise EventsMissingError(where, problem)

    def judge(self, epoch: Epoch) -> Iterator[tuple[str, str]]:
        """Close an epoch; yields what does not fit, as (where, problem). Take all of them: then
        the audit goes on behind it."""
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
        """How many changesets are in no epoch and never will be: all but those that `domain`, in
        which changesets may still be open, began after its last epoch."""
        edge = self._edge if domain == self._domain else 0
        return sum(owner != domain or serial < edge for owner, serial in self._waiting)


def gap_before(epoch: Epoch, *, domain: int, edge: int) -> tuple[str, str] | None:
    """What is missing before an epoch, where the one before ended at `edge` of `domain`."""
    expected = edge if epoch.domain == domain else 0
    if epoch.begin == expected:
        return None
    return (
        f"domain {epoch.domain:016x}",
        f"an epoch begins at {epoch.begin}, the one before ended at {expected}",
    )


class Anchor(NamedTuple):
    """Where counting begins: after a quiescent epoch, or (None) at the beginning of everything."""

    after: Epoch | None

    @property
    def since(self) -> int:
        """The time after which all events are to be counted."""
        return 0 if self.after is None else self.after.closed_at - 1


def find_anchor(epochs: Iterator[Epoch], *, floor: int, upto: int) -> Anchor | None:
    """The last anchor at or below the time `upto`, or the first one above it that will do.

    Counting from there must see every event. Where the index was trimmed, or begins with a
    restore, that is the first quiescent epoch above its `floor`. None: there is no anchor yet.
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
