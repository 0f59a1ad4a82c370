"""Frontiers: between which times a store is read. Policies: which writes it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from kvstore.base.timestamp import Timestamp
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError

# --------------------------------------------------------------------------------------------------
# Frontiers: the times between which a store is read, and waiting for them to move.
#
#                   since              floor                 upper
#     history is gone | readers look twice | reads are whole | commits may still come   time ->
#
# Readers look at the plain attributes and take no lock. The committer moves them under its lock.
#
# Invariants
# 1. `upper` only grows. Range tombstones and stamps of imports, which a reader needs beside the
#    entries, are published before the `upper` that shows the entries.
# 2. `since <= floor`, and both only grow. GC and clears raise `floor` before they remove anything.
# 3. A thread in `wait` is woken by every move of `upper` and by every `wake`: nothing polls.

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


# --------------------------------------------------------------------------------------------------
# Policies: which writes a store takes, and whether its time follows the clock.
#
#     policy       own commits   records   upper follows
#     open         taken         taken     the clock
#     read only    refused       refused   nothing: it stands still
#     live         refused       refused   the process that writes the store
#     following    refused       taken     the source, window by window
#
# A record lies beside the timeline: a hold, a frontier, the state of an import. A store that
# follows another store, its source, takes the commits of the source at their times
# (`kvstore.feeds.replica`). It takes no commits of its own until a promotion replaces its policy by
# `OPEN`.
#
# Invariants
# 1. A policy is a value. The committer replaces it under the commit lock and never changes it.
# 2. A refused write reaches no engine, so a refusal never poisons the reads.
# 3. A store that refuses records refuses commits as well.


class Refusal(NamedTuple):
    """Why a write is refused, and what the caller can do."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The calls that a store refuses, and the source of its time.

    `source` is the id of the store that this one follows. Entries above `upper` may be stored
    already up to the time `coming`; 0 says that there are none. If `is_live`, another process
    writes the store, and its GC does not know the pins of this one.
    """

    commits: Refusal | None = None
    records: Refusal | None = None
    follows_clock: bool = True
    source: str | None = None
    coming: int = 0
    is_live: bool = False

    def require_commits(self) -> None:
        """Raise `UsageError` unless the store takes commits of its own."""
        if self.commits is not None:
            raise UsageError(*self.commits)

    def require_records(self) -> None:
        """Raise `UsageError` unless the store takes records."""
        if self.records is not None:
            raise UsageError(*self.records)


OPEN: Final = Policy()
"""Every write is taken."""


def read_only_policy(where: str, *, coming: int = 0, is_live: bool = False) -> Policy:
    """The policy of a store that is only read: a checkpoint, or a store that others have open."""
    refusal = Refusal(f"{where} was opened to be read only", "open it with kvstore.open to write")
    return Policy(
        commits=refusal, records=refusal, follows_clock=False, coming=coming, is_live=is_live
    )


def replica_policy(where: str, source: str, *, coming: int = 0) -> Policy:
    """The policy of a replica of the store `source`, until it is promoted."""
    refusal = Refusal(
        f"{where} is a replica of store {source}", "write to its source, or promote it"
    )
    return Policy(commits=refusal, follows_clock=False, source=source, coming=coming)
