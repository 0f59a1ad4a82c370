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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias

from kvstore.base.clock import Timeline
from kvstore.base.timestamp import (
    TIMESTAMP_MAX,
    TimeLike,
    Timestamp,
    ahead_of,
    counts_from_now,
    is_beyond,
    is_count,
    to_timestamp,
)
from kvstore.errors import Argument, UsageError
from kvstore.limits import EXPIRY_STEP_KEYS
from kvstore.mvcc.expiry_records import (
    Due,
    WaitingKey,
    carried_key,
    decode_due,
    decode_waiting,
    dues_at,
    versions_of,
    waiting_from,
    waiting_key,
)
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write_set import OpenWriteSet, WriteSet
from kvstore.timeline.frontiers import Frontiers

NEVER: Final = TIMESTAMP_MAX + 1

Expires: TypeAlias = "timedelta | TimeLike"
"""The time at which a key expires, as callers pass it: a time, or a timedelta or a text such as
`"+1h"` from now. A number is nanoseconds since 1970: 60 seconds are `"+60s"` or
`timedelta(seconds=60)`."""

Commits: TypeAlias = "list[tuple[int, WriteSet]]"


def sent_expiry(expires: Expires) -> int:
    """An expiry as a client sends it: a time, or a number below zero. Such a number counts
    nanoseconds from the time at which the store takes it, which a client does not know."""
    ahead = ahead_of(expires)
    if ahead is None and not counts_from_now(expires):
        return _time_of(expires, None)
    if ahead is None:
        raise _not_ahead(expires)
    if ahead <= 0:
        raise _not_ahead(expires)
    _require_on_timeline(ahead, expires)  # the store, which knows its now, looks again
    return -ahead


def received_expiry(sent: int) -> Expires:
    """The expiry that a client has sent."""
    return timedelta(microseconds=-sent // 1000) if sent < 0 else sent


Applies: TypeAlias = "Callable[[Sequence[tuple[int, WriteSet]], int], None]"
"""Writes commits that have times of their own, and completes the time below its second argument."""


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
        self.is_held = False
        """Whether a commit that has taken its time is being checked, under the lock. A delete that
        becomes due meanwhile has a later time, so a read that the check makes must not write it."""
        self.on_first: Callable[[], None] = lambda: None
        """Called before the first commit with an expiry becomes visible."""

    def due(self, expires: Expires) -> int:
        """The time at which a key expires, as a caller gave it: a time, or a timedelta from now.
        Raises `UsageError` unless it lies ahead."""
        now, ahead = self._timeline.now(), ahead_of(expires)
        due = now + ahead if ahead is not None else _time_of(expires, self._timeline.now)
        if due <= now:
            raise _not_ahead(expires)
        _require_on_timeline(due, expires)
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
        """Note the least due time of a commit that is written. It may lie below the last step, if
        the clock has stepped back."""
        if due < self._from:
            self._from = due
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

    def passed(self) -> tuple[int, bool]:
        """How many keys and rows of tables have expired by the clock and still show, because no
        call has deleted them yet; and whether that many were counted and more may follow. Looks at
        one step of deletes. For a handle that only reads."""
        now = self._timeline.now()
        rows, following = self._waiting(now)
        gone = zip(rows, self._carried(rows), strict=True)
        return sum(expires and not row.row for row, (_, expires) in gone), following <= now

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
        at = [self._frontiers.upper - 1] * len(rows)
        find = partial(versions_of, self._versions, at=at)
        carried, _ = find(carried_key(row.key) for row in rows)
        _, waiting = find(waiting_key(row.due, row.key) for row in rows)
        _, newest = find(row.key for row in rows)
        led = leading = newest
        if any(row.row for row in rows):  # an entry expires if its row does
            leads = [row.row or row.key for row in rows]
            _, leading = find(leads)
            _, led = find(waiting_key(row.due, key) for row, key in zip(rows, leads, strict=True))
        for row, due, *times in zip(rows, carried, waiting, newest, leading, led, strict=True):
            is_latest = due is not None and decode_due(due, row.key) == row.due
            yield is_latest, len(set(times)) == 1

    # -- the expiries of single keys ---------------------------------------------------------

    def have_passed(self, keys: list[bytes], at: int, now: int) -> list[bool]:
        """Whether each of `keys`, as it is as of `at`, expires at or below `now`. A look-up a key,
        and three more for a key that expires."""
        dues = dues_at(self._versions, keys, at)
        return [due is not None and due.time <= now for due in dues]

    def of(self, key: bytes, at: int) -> Due | None:
        """The time at which `key` expires, as of `at`; None if it does not, or is absent."""
        return dues_at(self._versions, [key], at)[0]

    def _show(self, next_at: int) -> None:
        self.next_at = next_at
        self._frontiers.note_waiting(awaits_expiry=next_at != NEVER)


def _time_of(expires: Expires, now: Callable[[], int] | None) -> int:
    try:
        return to_timestamp(expires, name="expires", now=now)
    except UsageError as error:
        if is_beyond(expires):
            raise _behind_the_last(expires) from error
        length = _as_length(expires)
        if length:
            raise error.at(remedy=length) from error
        if not isinstance(expires, str):
            raise
        remedy = f'write "+1h", or {error.remedy.partition(" ")[2]}'
        raise error.at(remedy=remedy) from error


def _require_on_timeline(due: int, expires: Expires) -> None:
    if due >= TIMESTAMP_MAX:
        raise _behind_the_last(expires)


def _behind_the_last(expires: Expires) -> UsageError:
    return UsageError(
        (
            Argument("expires", str(expires)),
            f" lies behind the last time, {Timestamp(TIMESTAMP_MAX - 1)}",
        ),
        "pass an earlier time, or none: then it stays",
    )


def _not_ahead(expires: Expires) -> UsageError:
    remedy = "pass a later time; to remove the key now, delete it"
    return UsageError(
        (Argument("expires", str(expires)), " does not lie ahead of now"),
        _as_length(expires) or remedy,
    )


def _as_length(expires: object) -> str:
    """What to write instead of a number that counts seconds from now, as `expires=60` in other
    stores. Empty for all else."""
    is_seconds = isinstance(expires, float) or (
        is_count(expires) and float(str(expires)) <= _SECONDS_MOST
    )
    if not is_seconds:
        return ""
    text = "" if isinstance(expires, float) else f'"+{expires}s" or '
    return (
        f"a number is nanoseconds since 1970; {expires} seconds from now are {text}"
        f"timedelta(seconds={expires})"
    )


_SECONDS_MOST: Final = 10**9
"""More seconds, some thirty years, are a time since 1970 rather than a length."""
