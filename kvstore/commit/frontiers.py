"""Frontiers: the times between which a store is read, and waiting for them to move.

                  since              floor                 upper
    history is gone | readers look twice | reads are whole | commits may still come   time ->

Readers look at the plain attributes and take no lock. The committer moves them under its lock.

Invariants
1. `upper` only grows. Range tombstones and stamps of imports, which a reader needs beside the
   entries, are published before the `upper` that shows the entries.
2. `since <= floor`, and both only grow. GC and clears raise `floor` before they remove anything.
3. A thread in `wait` is woken by every move of `upper` and by every `wake`: nothing polls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from kvstore.errors import HistoryGoneError, NotYetWrittenError
from kvstore.timestamp import Timestamp

IsStopping: TypeAlias = "Callable[[], bool]"


class Frontiers:
    """The frontiers of one store, and whether reads are allowed."""

    def __init__(self, *, since: int, upper: int) -> None:
        self.since = Timestamp(since)
        self.floor = since
        """Reads at or above it are whole. A read below it asks `since` and the clears again."""
        self.upper = Timestamp(upper)
        self.is_healthy = True
        """Whether the store is sound and no key waits for its expiry. Hot callers look at this
        alone."""
        self.is_sound = True
        """Whether `Health.require` would pass."""
        self._awaits_expiry = False
        # `with` takes the lock itself. A condition is entered by code in Python, where a signal
        # may come between the lock and the block, and leave the lock taken.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._waiting = 0

    def advance(self, upper: Timestamp) -> None:
        """Show everything below `upper`. Hot: once per commit."""
        self.upper = upper
        if self._waiting:
            self.wake()

    def note_health(self, *, is_sound: bool) -> None:
        """Note whether the store is sound."""
        self.is_sound = is_sound
        self.is_healthy = is_sound and not self._awaits_expiry

    def note_waiting(self, *, awaits_expiry: bool) -> None:
        """Note whether a key waits for its expiry."""
        self._awaits_expiry = awaits_expiry
        self.is_healthy = self.is_sound and not awaits_expiry

    def raise_floor(self, timestamp: int) -> None:
        """Have readers below `timestamp` look twice."""
        self.floor = max(self.floor, timestamp)

    def move_since(self, since: int) -> None:
        """Give up history below `since`."""
        self.since = Timestamp(since)
        self.raise_floor(since)

    def wait(self, above: int, *, timeout: float | None, stop: IsStopping) -> None:
        """Return once `upper` is above `above`, once `stop()` is true, or after `timeout` seconds.

        `stop` is asked again after each `wake`.
        """
        with self._lock:
            self._waiting += 1
            try:
                self._moved.wait_for(lambda: self.upper > above or stop(), timeout)
            finally:
                self._waiting -= 1

    def wake(self) -> None:
        """Have every waiting thread look again."""
        if self._waiting:
            with self._lock:
                self._moved.notify_all()


def require_readable(as_of: int, *, since: int, upper: int) -> None:
    """Raise unless `since <= as_of < upper`."""
    if as_of < since:
        raise HistoryGoneError(as_of=Timestamp(as_of), since=since)
    if as_of >= upper:
        raise NotYetWrittenError(as_of=Timestamp(as_of), upper=upper)
