"""Expiries: deletes that wait on the timeline for their time.

A key that was put with an expiry is deleted by an ordinary commit at exactly its due time, if the
version that carried the expiry is still its newest one. An index entry of a table is deleted only
if its row is. Nothing else is special: reads at any time, changes, backups and replicas meet an
ordinary delete.

The due deletes are written by the call that first moves `upper` beyond a due time, or that reads
the present after it. There is no timer. A store that was closed meanwhile catches up at its first
such call, with the due times as timestamps.

Invariants
1. `upper` passes no due time before the deletes of that time are written. An exception is a due
   time that had passed when its records came, by an import or while the clock ran ahead. The
   deletes of such a time are written at `upper`: each step has a commit, 1 ns above the last one.
2. `next_at` is at or below the due time of every `waiting` record that is alive. A store that takes
   no commits of its own schedules nothing: `next_at` is `NEVER`.
3. The commit that deletes a key also deletes its records. So work that was done is never
   found again, and a crash between two steps leaves the rest waiting.
4. A step deletes at most `EXPIRY_STEP_KEYS` keys, and further keys with the due time of the last
   one. This bounds memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from datetime import timedelta
from typing import Final, Protocol, TypeAlias

from kvstore.clock import Timeline
from kvstore.commit.frontiers import Frontiers
from kvstore.errors import UsageError
from kvstore.limits import EXPIRY_READ_BYTES, EXPIRY_STEP_KEYS
from kvstore.mvcc.expiry import (
    Due,
    WaitingKey,
    carried_key,
    decode_due,
    decode_waiting,
    waiting_from,
    waiting_key,
)
from kvstore.mvcc.lookup import SearchBounds
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write import OpenWriteSet, WriteSet
from kvstore.timestamp import TIMESTAMP_MAX, TimeLike, ahead_of, to_timestamp

NEVER: Final = TIMESTAMP_MAX + 1

Expires: TypeAlias = "timedelta | TimeLike"
"""The time at which a key expires, as callers pass it: a time, or a timedelta or a text such as
`"+1h"` from now."""

Commits: TypeAlias = "list[tuple[int, WriteSet]]"


def sent_expiry(expires: Expires) -> int:
    """An expiry as a client sends it: a time, or a number below zero. Such a number counts
    nanoseconds from the time at which the store takes it, which a client does not know."""
    ahead = ahead_of(expires)
    if ahead is None:
        return to_timestamp(expires, name="expires")
    if ahead <= 0:
        raise _not_ahead(expires)
    return -ahead


def received_expiry(sent: int) -> Expires:
    """The expiry that a client has sent."""
    return timedelta(microseconds=-sent // 1000) if sent < 0 else sent


class Applies(Protocol):
    """Writes commits that have times of their own, and completes the time below `upper`."""

    def __call__(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None: ...


class Expiries:
    """The expiries of one store. The caller of each method that writes holds the commit lock."""

    def __init__(
        self, versions: Versions, frontiers: Frontiers, timeline: Timeline, apply: Applies
    ) -> None:
        self._versions, self._frontiers, self._timeline = versions, frontiers, timeline
        self._apply = apply
        self._from = 0
        """No `waiting` record below this time is alive."""
        self.next_at = NEVER
        """No key is due before this time."""
        self.on_first: Callable[[], None] = lambda: None
        """Called before the first commit with an expiry becomes visible."""

    def due(self, expires: Expires) -> int:
        """The time at which a key expires, as a caller gave it: a time, or a timedelta from now.
        Raises `UsageError` unless it lies ahead."""
        now, ahead = self._timeline.now(), ahead_of(expires)
        if ahead is not None:
            due = now + ahead
        else:
            due = to_timestamp(expires, name="expires", now=self._timeline.now)
        if not now < due < TIMESTAMP_MAX:
            raise _not_ahead(expires)
        return due

    # -- the schedule -----------------------------------------------------------------------

    def look(self) -> None:
        """Find the next due time among the stored records: after opening, after an import, and when
        the store begins to take commits. Costs a step for each record that GC has yet to remove."""
        self._from = 0
        _, following = self._waiting(upto=-1)
        self._show(following)

    def note_records(self) -> None:
        """Note that an import brings records, whose due times are not known."""
        self.begin()
        self._from = 0
        self._show(0)

    def begin(self) -> None:
        """Prepare for a commit that has expiries."""
        if self.next_at == NEVER:
            self.on_first()

    def add(self, due: int) -> None:
        """Note the least due time of a commit that is written."""
        if due < self.next_at:
            self._show(due)

    def first(self, since: int) -> int:
        """The first due time at or above `since` of the records that show; `NEVER` if there is
        none. A seek."""
        at = self._frontiers.upper - 1
        chunk = next(iter(self._versions.scan(waiting_from(since), at, limit=1)), None)
        return NEVER if chunk is None else decode_waiting(chunk[0][0]).due.time

    # -- due deletes ------------------------------------------------------------------------

    def write_step(self, upto: int) -> None:
        """Write the first of the deletes that are due at or below `upto`, in time order."""
        rows, following = self._waiting(upto)
        commits = self._commits(rows)
        del rows  # a step of one due time may have millions
        if commits:
            last, _ = commits[-1]
            self._timeline.rise_to(last)
            # The changeset of the caller, if one is open, has nothing to do with it.
            Context().run(self._apply, commits, last + 1)
        self._from = min(following, upto + 1)
        self._show(following)

    def missed(self) -> WaitingKey | None:
        """The first record that is due before `next_at`, None if all is well. For verification."""
        first = next(self._records(since=0), None)
        return first if first is not None and first.due.time < self.next_at else None

    def _waiting(self, upto: int) -> tuple[list[WaitingKey], int]:
        """The records of one step, which are due at or below `upto`, and the due time of the first
        record behind them."""
        rows: list[WaitingKey] = []
        for row in self._records(self._from):
            is_full = len(rows) >= EXPIRY_STEP_KEYS and row.due.time != rows[-1].due.time
            if row.due.time > upto or is_full:
                return rows, row.due.time
            rows.append(row)
        return rows, NEVER

    def _records(self, since: int) -> Iterator[WaitingKey]:
        at = self._frontiers.upper - 1
        for keys, rows in self._versions.scan(waiting_from(since), at):
            yield from map(decode_waiting, keys, rows)

    def _commits(self, rows: Sequence[WaitingKey]) -> Commits:
        """The deletes of `rows`, and the removal of their records, each commit at its time."""
        at: int = self._frontiers.upper
        commits: Commits = []
        size = EXPIRY_STEP_KEYS
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            for row, (is_latest, expires) in zip(some, self._carried(some), strict=True):
                at = max(at, row.due.time)
                if not commits or commits[-1][0] != at:
                    commits.append((at, OpenWriteSet("the deletes that are due")))
                gone = [waiting_key(row.due, row.key)]
                if is_latest:
                    gone.append(carried_key(row.key))
                if expires:
                    gone.append(row.key)
                commits[-1][1].delete_rows(gone)
        return commits

    def _carried(self, rows: Sequence[WaitingKey]) -> Iterable[tuple[bool, bool]]:
        """For each of `rows`: whether it is the latest expiry of its key, and whether the key
        expires by it."""
        at = self._frontiers.upper - 1
        carried, _ = self._versions_of([carried_key(row.key) for row in rows], at)
        _, waiting = self._versions_of([waiting_key(row.due, row.key) for row in rows], at)
        _, newest = self._versions_of([row.key for row in rows], at)
        led = leading = newest
        if any(row.row for row in rows):  # an entry expires if its row does
            leads = [row.row or row.key for row in rows]
            _, leading = self._versions_of(leads, at)
            records = [waiting_key(row.due, key) for row, key in zip(rows, leads, strict=True)]
            _, led = self._versions_of(records, at)
        for row, due, *times in zip(rows, carried, waiting, newest, leading, led, strict=True):
            is_latest = due is not None and decode_due(due, row.key) == row.due
            yield is_latest, len(set(times)) == 1

    def _versions_of(self, keys: list[bytes], at: int) -> tuple[list[bytes | None], list[int]]:
        """The value of each key as of `at`, with its time: None and -1 where the key is absent."""
        times = array("q", [at]) * len(keys)
        bounds = SearchBounds(bytes_max=EXPIRY_READ_BYTES)
        found = self._versions.get_timed(keys, times, bounds)
        if found is not None:
            return found.values, found.times.tolist()
        half = len(keys) // 2  # a single key has no bound
        first, second = self._versions_of(keys[:half], at), self._versions_of(keys[half:], at)
        return first[0] + second[0], first[1] + second[1]

    # -- the expiries of single keys ---------------------------------------------------------

    def have_passed(self, keys: list[bytes], at: int, now: int) -> list[bool]:
        """Whether each of `keys`, as it is as of `at`, expires at or below `now`. Two look-ups a
        key, and a third one for a key that expires."""
        carried, recorded = self._versions_of([carried_key(key) for key in keys], at)
        _, written = self._versions_of(keys, at)
        found = [False] * len(keys)
        for place, value in enumerate(carried):
            if value is not None and recorded[place] == written[place]:
                due = self.of(keys[place], at)
                found[place] = due is not None and due.time <= now
        return found

    def of(self, key: bytes, at: int) -> Due | None:
        """The time at which `key` expires, as of `at`; None if it does not, or is absent."""
        times = array("q", [at, at])
        found = self._versions.get_timed([carried_key(key), key], times)
        assert found is not None, "no bound was given"
        carried, written = found.values[0], found.times[1]
        if carried is None or found.times[0] != written:
            return None
        due = decode_due(carried, key)
        waiting = self._versions.get_timed([waiting_key(due, key)], times[:1])
        assert waiting is not None, "no bound was given"
        return due if waiting.times[0] == written else None

    def _show(self, next_at: int) -> None:
        self.next_at = next_at
        self._frontiers.note_waiting(awaits_expiry=next_at != NEVER)


def _not_ahead(expires: Expires) -> UsageError:
    return UsageError(
        f"expires={expires!r} does not lie ahead of now",
        "pass a later time; to remove the key now, delete it",
    )
