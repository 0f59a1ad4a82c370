"""The entries that a commit adds to its engine batch, and the records that it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvstore.engine.api import WriteBatch
from kvstore.timestamp import Timestamp

Staged: TypeAlias = "tuple[int, Callable[[], None]]"
"""The events that a commit adds to the change index, and the call that shows the commit to
readers."""

Stage: TypeAlias = "Callable[[WriteBatch, Timestamp, tuple[int, int]], Staged]"
"""Adds a commit's entries, tagged with its changeset, to an engine batch."""


class CommitNote(Protocol):
    """A record that a commit carries, and a check that may call the commit off."""

    def check(self) -> None:
        """Runs under the lock, before every other check."""
        ...

    def stage(self, batch: WriteBatch, timestamp: Timestamp) -> Callable[[], None]:
        """Add the record to the engine batch of the commit; returns what publishes it."""
        ...


def each(calls: Sequence[Callable[[], None]]) -> None:
    """Make the calls, one after the other."""
    for call in calls:
        call()
