"""Commits: one lock, one timeline, three durabilities.

A commit takes its timestamp, writes its one engine batch and publishes `upper`, all under the lock.
How it waits for the disk is a choice: `"sync"` has an fsync of its own; `"group"` shares one with
all commits that wait meanwhile: the first becomes leader and syncs for what is written by
then, outside the lock, the others follow; `"async"` does not wait.

Invariants
1. `upper` only grows; every commit's timestamp is at or above the `upper` it found.
2. What a reader needs (range tombstones, stamps) is published before the `upper` that shows it.
3. `durable <= upper`, and everything below `durable` was written before an fsync that returned.
4. A time that a generation begins at is announced: its record is durable before `upper` reaches it.
5. After a failed write or fsync nobody knows what is on disk: the committer is poisoned, and every
   call raises until the store is opened again. (An fsync that fails once may succeed the next
   time without having written anything: fsyncgate, 2018.)
6. What is stored and what is known of it go together: an exception between the two, a signal's for
   one, poisons the committer as well.
7. A commit that is durable returns, whatever happened to the store meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from kvstore.changes.capture import Capture
from kvstore.changes.index import ChangeIndex
from kvstore.clock import Timeline
from kvstore.codec.keys import encode_suffix
from kvstore.engine.api import WriteBatch
from kvstore.errors import (
    ClosedError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    OutOfSpaceError,
    PoisonedError,
    UsageError,
)
from kvstore.forks import own
from kvstore.limits import COMMIT_YIELDS_MAX, GROUP_COMMIT_WAIT_S_MAX
from kvstore.meta import SINCE, UPPER, Meta
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write import WriteSet, stage
from kvstore.recent import RecentCommits
from kvstore.timestamp import Timestamp

Durability: TypeAlias = Literal["sync", "group", "async"]
DURABILITIES = ("sync", "group", "async")

Stage: TypeAlias = "Callable[[WriteBatch, Timestamp], Callable[[], None]]"
"""Adds a commit's entries to the batch; what it returns publishes them to readers."""

Stop: TypeAlias = "Callable[[], bool]"


class Committer:
    """Orders the commits of one store and owns its frontiers."""

    def __init__(
        self,
        versions: Versions,
        index: ChangeIndex,
        timeline: Timeline,
        capture: Capture,
        *,
        upper: int,
        since: int,
        durability: Durability,
        where: str,
    ) -> None:
        self._versions = versions
        self._engine = versions.engine
        self._index = index
        self._timeline = timeline
        self.capture = capture
        self._meta = Meta(self._engine)
        self._durability = require_durability(durability)
        self._where = where
        self.lock = threading.RLock()
        self.recent = RecentCommits()
        self.since = Timestamp(since)
        self.floor = since
        """Reads at or above it are whole; one below it asks `since` and the clears."""
        self.upper = Timestamp(upper)
        self._durable = upper
        # `with` takes the lock itself, here and below: a condition is entered by code in Python,
        # where a signal may come between the lock and the block, and leave it locked.
        self._sync_lock = threading.RLock()
        self._synced = threading.Condition(self._sync_lock)
        self._syncing = False
        self.is_healthy = True
        """Whether `require_healthy` would pass: hot readers look at this instead."""
        self._poison = ""
        self._is_finished = False
        self._is_committing = False
        self._publish_lock = threading.RLock()
        self._published = threading.Condition(self._publish_lock)
        self._watchers = 0
        own(self, where if where.startswith("the ") else f"the store at {where}")

    @property
    def durable(self) -> Timestamp:
        """Everything below it survives a crash."""
        return Timestamp(self._durable)

    @property
    def coming(self) -> int:
        """Up to where entries above `upper` may be stored already: a replica's window. Else 0."""
        return 0

    # -- writing ----------------------------------------------------------------------------

    def commit(
        self,
        writes: WriteSet,
        *,
        durability: Durability | None = None,
        check: Callable[[], None] | None = None,
    ) -> Timestamp:
        """Commit a write set. `check` runs under the lock, before anything is written, and may
        raise to call it off."""
        writes.seal()

        def stage_writes(batch: WriteBatch, timestamp: Timestamp) -> Callable[[], None]:
            stage(writes, timestamp, batch, self._engine.families)
            full = self._index.stage(writes, timestamp, batch)

            def publish() -> None:
                if full:
                    self._guarded(self._index.complete, full)
                if writes.ranges:
                    self._versions.publish_ranges(writes.tombstones(timestamp))
                self.recent.add(timestamp, writes.points.keys(), writes.ranges)

            return publish

        return self.commit_staged(stage_writes, durability=durability, check=check)

    def commit_staged(
        self,
        stage_entries: Stage,
        *,
        durability: Durability | None = None,
        check: Callable[[], None] | None = None,
    ) -> Timestamp:
        """Commit whatever `stage_entries` adds to the batch, at one new timestamp."""
        how = self._durability if durability is None else require_durability(durability)
        with self.lock:
            self.require_healthy()
            if check is not None:
                check()
            self._is_committing = True
            batch = self._engine.batch()
            timestamp = self._timeline.next()
            index, capture = self._index, self.capture
            index.changeset, index.staged = capture.begin_commit(), 0
            publish = stage_entries(batch, timestamp)
            try:  # `poisoning`, without its call
                if capture.is_due:
                    capture.stage(batch)
                self._guarded(self._engine.write, batch)
                publish()
                self.upper = Timestamp(timestamp + 1)
                capture.finish_commit(index.changeset[1], index.staged, self.upper)
            except BaseException as error:
                self._interrupted(error)
                raise
            self._is_committing = False
            if self._watchers:
                self.wake()
            if how == "sync":
                self._sync_upto(self.upper)
        if how == "group":
            self._wait_durable(timestamp + 1)
        return timestamp

    def give_way(self) -> None:
        """Let a commit under way finish before waiting for its lock: pays where the lock is held
        for microseconds, as by transactions.

        A thread that waited for the lock is given it before it has the interpreter. The thread that
        has the interpreter then finds the lock taken and waits too, and from then on the kernel
        hands over every turn: a convoy (Blasgen, Gray, Mitoma and Price, 1979). Eight threads take
        35 us a transaction with this, 88 without. After a failed commit some yield in vain.
        """
        for _ in range(COMMIT_YIELDS_MAX):
            if not self._is_committing:
                return
            time.sleep(0)  # gives the interpreter away, and no time

    def write_meta(
        self, stage_records: Callable[[WriteBatch], None], *, durable: bool = True
    ) -> None:
        """Write records that have no place on the timeline (holds, preparations)."""
        with self.lock:
            self.require_healthy()
            batch = self._engine.batch()
            stage_records(batch)
            with self.poisoning():  # a signal may leave the engine's journal ahead of its memory
                self._guarded(self._engine.write, batch)
                if durable:
                    self._guarded(self._engine.sync)
        if self._watchers:
            self.wake()

    def announce(self, stage_records: Stage) -> Timestamp:
        """Write records that hold from a new time on, above `upper`; then move `upper` there.

        Durable before it returns, and before anybody sees it: no commit before it is at or above
        that time, every commit after it is.
        """
        with self.lock:
            self.require_healthy()
            begins_at = self._timeline.next()
            if begins_at <= self.upper:
                begins_at = self._timeline.next()
            batch = self._engine.batch()
            publish = stage_records(batch, begins_at)
            self._meta.stage_timestamp(batch, UPPER, begins_at)
            with self.poisoning():
                self._guarded(self._engine.write, batch)
                self._sync_upto(self.upper)
                publish()
                self.upper = begins_at
        self.wake()
        return begins_at

    def close_upto_now(self) -> Timestamp:
        """Move `upper` to the present, so that the time until now is complete. Returns it.

        The promise is written down (unsynced: 10 us), so that it outlives this process.
        """
        with self.lock:
            self.require_healthy()
            now = self._timeline.now()
            if now >= self.upper:
                upper = Timestamp(self._timeline.next() + 1)
                self.write_meta(
                    lambda batch: self._meta.stage_timestamp(batch, UPPER, upper),
                    durable=False,
                )
                self.upper = upper
                if self._watchers:  # those that the record has woken may have looked too early
                    self.wake()
            return self.upper

    def sync(self) -> Timestamp:
        """Close the time until now, make all that is written durable, and return `upper`."""
        before = self.upper
        upper = self.close_upto_now()
        with self.lock:
            if self.capture.has_pending:
                with self.poisoning():
                    self.write_meta(self.capture.stage, durable=False)
        if upper == before:  # no time has passed: what lies beside the timeline may still wait
            self.persist()
        self._wait_durable(upper)
        return upper

    def finish(self) -> None:
        """Before closing: write down `upper`, and wait for the disk. Poisoned: nothing."""

        def stage_end(batch: WriteBatch) -> None:
            self._meta.stage_timestamp(batch, UPPER, self.upper)
            self.capture.end(batch, self.upper)

        try:
            if not self._poison:
                self.write_meta(stage_end, durable=False)
                self._sync_upto(self.upper)  # commits that wait for the disk have it too
        finally:
            self._is_finished, self.is_healthy = True, False
            self.wake()

    # -- reading ----------------------------------------------------------------------------

    def readable(self, as_of: int) -> int:
        """`as_of` if it can be read now; an idle store closes the time until now for it.

        Raises `HistoryGoneError` below `since`, `NotYetWrittenError` in the future.
        """
        if as_of >= self.upper:
            self.close_upto_now()
        require_readable(as_of, since=self.since, upper=self.upper)
        return as_of

    def latest(self) -> tuple[int, bytes]:
        """The newest complete timestamp, and its bound in `data`."""
        newest = self.upper - 1
        return newest, encode_suffix(newest)

    def now(self) -> Timestamp:
        """The time now, on this store's timeline."""
        with self.lock:
            return self._timeline.now()

    def move_since(self, since: int) -> None:
        """Give up history below `since`. The caller has asked the holds.

        Whatever is written later survives a crash only if this does; `persist` waits for it.
        """
        with self.lock:
            assert self.since <= since < self.upper
            self.write_meta(
                lambda batch: self._meta.stage_timestamp(batch, SINCE, since), durable=False
            )
            self.since = Timestamp(since)
            self.raise_floor(since)

    def raise_floor(self, timestamp: int) -> None:
        """Have readers below `timestamp` look twice. The caller holds the lock."""
        self.floor = max(self.floor, timestamp)

    def require_writable(self) -> None:
        """Raise `UsageError` where nothing may be committed, else as `require_healthy`."""
        self.require_healthy()

    def require_commits(self) -> None:
        """As `require_writable`, and in a replica too: upkeep is its own, what it holds is not."""
        self.require_writable()

    def require_healthy(self) -> None:
        """Raise `PoisonedError` if an earlier write failed, `ClosedError` after `finish`."""
        if self._is_finished:
            raise ClosedError(self._where)
        if self._poison:
            raise PoisonedError(self._where, self._poison)

    # -- following --------------------------------------------------------------------------

    def wait_published(self, above: int, *, timeout: float | None, stop: Stop) -> None:
        """Return once `upper` is above `above`, once `stop()` says so, or after `timeout` seconds.

        Commits wake those that wait, as does all that changes a record (holds) or closes the
        store: nothing is polled.
        """
        with self._publish_lock:
            self._watchers += 1
            try:
                self._published.wait_for(lambda: self.upper > above or stop(), timeout)
            finally:
                self._watchers -= 1

    def wake(self) -> None:
        """Have those who wait look again."""
        with self._publish_lock:
            self._published.notify_all()

    def persist(self) -> None:
        """Wait until all that is written is on disk, records beside the timeline included. One
        fsync, outside the lock: commits go on."""
        self.require_healthy()
        self._sync_upto(self.upper)

    def make_durable(self) -> Timestamp:
        """Wait until all that is written is durable; returns the `upper` it covers."""
        upper = self.upper
        self._wait_durable(upper)
        return upper

    # -- durability -------------------------------------------------------------------------

    def _wait_durable(self, upper: int) -> None:
        """Return once everything below `upper` is on disk, leading an fsync if nobody does.

        A leader that was interrupted lets another lead; one that says nothing for long is passed
        over: two may sync at once.
        """
        while True:
            leads = False
            try:
                with self._sync_lock:
                    while self._durable < upper and self._syncing:
                        if not self._synced.wait(GROUP_COMMIT_WAIT_S_MAX):
                            break
                    if self._durable >= upper:
                        return
                    self.require_healthy()
                    leads = self._syncing = True
                self._sync_upto(self.upper, leading=True)
                leads = False
            except KVStoreError:
                if self._durable < upper:
                    raise
            finally:
                if leads:
                    with self._sync_lock:
                        self._syncing = False
                        self._synced.notify_all()

    def _sync_upto(self, upper: int, *, leading: bool = False) -> None:
        is_synced = False
        try:
            self._guarded(self._engine.sync)
            is_synced = True
        finally:
            with self._sync_lock:
                if is_synced and not self._poison:
                    self._durable = max(self._durable, upper)
                if leading:
                    self._syncing = False
                self._synced.notify_all()

    @contextmanager
    def poisoning(self) -> Iterator[None]:
        """An exception inside, a signal's too, poisons the committer: what is stored and what is
        known of it may differ. Under the lock."""
        try:
            yield
        except BaseException as error:
            self._interrupted(error)
            raise

    def _show(self, batch: WriteBatch, publish: Callable[[], None], upper: Timestamp) -> None:
        """Write a commit and show it to readers, who must learn of its range tombstones."""
        with self.poisoning():
            self._guarded(self._engine.write, batch)
            publish()
            self.upper = upper

    def _interrupted(self, error: BaseException) -> None:
        if not self._is_finished:
            self._set_poison(self._poison or f"interrupted: {type(error).__name__}")
            self.wake()

    def _set_poison(self, reason: str) -> None:
        self._poison, self.is_healthy = reason, False

    def _guarded(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except KVStoreError as error:
            self._set_poison(error.what if isinstance(error, OutOfSpaceError) else str(error))
            self.wake()
            raise


def require_readable(as_of: int, *, since: int, upper: int) -> None:
    """Raise unless `since <= as_of < upper`."""
    if as_of < since:
        raise HistoryGoneError(as_of=Timestamp(as_of), since=since)
    if as_of >= upper:
        raise NotYetWrittenError(as_of=Timestamp(as_of), upper=upper)


def require_durability(durability: str) -> Durability:
    """Raise `UsageError` on an unknown one."""
    if durability not in DURABILITIES:
        raise UsageError(f"durability={durability!r}", f"pass one of {', '.join(DURABILITIES)}")
    return durability  # type: ignore[return-value]  # just checked
