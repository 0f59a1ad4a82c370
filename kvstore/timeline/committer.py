"""Commits: one lock orders the commits of a store and moves its frontiers.

A commit gathers entries of the engine batch and what readers must be told (`stage`, `writes`).
Under the lock it takes a timestamp, adds the change entry, writes the batch and publishes `upper`;
the wait for the disk is outside of the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from kvstore.base.clock import Timeline
from kvstore.base.forks import own
from kvstore.base.meters import Meters
from kvstore.base.timestamp import TimeLike, Timestamp, reached, to_timestamp
from kvstore.changes.epochs import Begun, Capture
from kvstore.changes.index import ChangeIndex, FullEntry
from kvstore.engine.api import Engine, WriteBatch
from kvstore.limits import COMMIT_YIELDS_MAX, MEND_WAIT_S
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.meta import SINCE, UPPER, Meta, Publish, Records, nothing
from kvstore.mvcc.versions import Versions, stored_tombstones
from kvstore.mvcc.write import WriteSet, stage
from kvstore.timeline.durability import (
    Durability,
    DurableMark,
    GroupSync,
    Health,
    Mend,
    require_durability,
)
from kvstore.timeline.expiries import NEVER, Expiries
from kvstore.timeline.frontiers import OPEN, Frontiers, Policy, require_readable
from kvstore.timeline.recent import RecentCommits

# --------------------------------------------------------------------------------------------------
# The entries that a commit adds to its engine batch, and the records that it carries.

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


# --------------------------------------------------------------------------------------------------
# Write sets on their way: entries of an engine batch first, then what readers must be told.
#
# Invariants
# 1. The versions of a write set and its change entries go into one batch: neither is there without
#    the other.
# 2. Nothing is published before its batch is written.


class Writes:
    """Stages and publishes the write sets of one store. The caller holds the commit lock."""

    def __init__(
        self, versions: Versions, index: ChangeIndex, recent: RecentCommits, health: Health
    ) -> None:
        self.versions = versions
        self._engine = versions.engine
        self.index = index
        self._recent = recent
        self._health = health

    def stage(
        self, batch: WriteBatch, writes: WriteSet, timestamp: int, changeset: tuple[int, int]
    ) -> tuple[int, list[FullEntry]]:
        """Add a sealed write set to a batch.

        Returns its events, and the entries that `publish` writes once the batch is written.
        """
        stage(batch, writes, timestamp, self._engine.families)
        full = self.index.stage(batch, writes, timestamp, changeset)
        return len(writes.points) + len(writes.ranges), full

    def publish(self, commits: Sequence[tuple[int, WriteSet]], full: Sequence[FullEntry]) -> None:
        """Tell readers and transactions of write sets that are stored, each with its time."""
        if full:
            self._health.guarded(self.index.complete, full)
        tombstones = []
        for timestamp, writes in commits:
            if writes.ranges:
                tombstones += writes.tombstones(timestamp)
            self._recent.add(timestamp, writes.points, writes.ranges)
        if tombstones:
            self.versions.publish_ranges(tombstones)


# --------------------------------------------------------------------------------------------------
# An event and the writes that belong to it: commits at timestamps of their own, in one batch.
#
# An import is an event of its own: no other event has its timestamp. So an import and the writes
# that belong to it are commits right after each other.
#
# Invariants
# 1. A crash leaves all of them or none, and `upper` passes all of them at once. A reader of the
#    newest state sees all or none.

After: TypeAlias = "Callable[[Timestamp], WriteSet]"
"""Makes the writes that follow an event. It is called under the commit lock, with the time of the
event."""


def commit_together(
    committer: Committer,
    engine: Engine,
    event: Stage,
    after: After,
    *,
    check: Callable[[], None] | None = None,
) -> Timestamp:
    """Commit an event, and right above it the writes of `after`, durably. Returns the time of the
    event.

    `check` runs under the lock, before both, and may raise to call both off.
    """
    with committer.lock:
        committer.require_commits()
        times = committer.next_times(2)
        if check is not None:
            committer.expiries.waiting_for(check)
        stages = (event, committer.stage_of(after(times[0])))
        batch = engine.batch()
        counts: list[Count] = []
        publishing: list[Callable[[], None]] = []
        for timestamp, stage in zip(times, stages, strict=True):
            begun = committer.capture.begin_commit(timestamp)
            events, publish = stage(batch, timestamp, begun[0])
            counts.append((begun, events, timestamp + 1))
            publishing.append(publish)
        upper = Timestamp(times[-1] + 1)
        committer.write_commits(batch, partial(each, publishing), upper, counts)
        committer.syncs.sync()
    return times[0]


# --------------------------------------------------------------------------------------------------
# The engine of commit: it orders the commits of one store and moves its frontiers.
#
# A commit takes its timestamp, writes its one engine batch and publishes `upper`, all under the
# lock. The store's own commits, and the commits that a replica takes from its source, go through
# the same middle, `write_commits`. The policy says which of them a store takes; `durability` how a
# commit waits for the disk; `health` what a failure does; `frontiers` what readers see.
#
# Invariants
# 1. A commit's timestamp is at or above the `upper` it found, and below the `upper` it publishes.
# 2. A commit reads the clock once, and looks once whether the store is still healthy.
# 3. A time that a generation begins at is announced: its record is durable before `upper` reaches
#    it.
# 4. A commit that is called off before its write leaves the store as it was.
# 5. `upper` passes no due time of `expiries` before the deletes of that time are written. A commit
#    makes its checks after them. While no key waits for its expiry, this costs nothing.

Count: TypeAlias = "tuple[Begun, int, int]"
"""A commit that was begun, the events it adds to the change index, and the `upper` above it."""


class Committer:
    """Orders the commits of one store. `where` names the store in errors. `mark` tells other
    processes how far it is durable.

    Every entry that is stored when the committer is made lies below `upper` and is durable.
    """

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
        policy: Policy = OPEN,
        mark: DurableMark | None = None,
    ) -> None:
        self._engine = versions.engine
        self._timeline = timeline
        self.capture = capture
        self._meta = Meta(self._engine)
        self.durability = require_durability(durability)
        self.policy = policy
        self.lock = threading.RLock()
        self.recent = RecentCommits(versions.newest, upper)
        self.frontiers = Frontiers(since=since, upper=upper)
        self.health = Health(self.frontiers, where)
        self.meters = Meters(where)
        self.syncs = GroupSync(self._engine, self.frontiers, self.health, self.meters, mark=mark)
        self._mark = mark
        self._writes = Writes(versions, index, self.recent, self.health)
        self.expiries = Expiries(versions, self.frontiers, timeline, self.apply)
        self._is_committing = False
        self.where = where
        own(self, where)

    def fork_parts(self) -> Iterable[object]:
        """Further objects that a forked child must not use. Readers refer to them directly."""
        return self.frontiers, self.health

    # -- commits ----------------------------------------------------------------------------

    def commit(
        self,
        writes: WriteSet,
        *,
        durability: Durability | None = None,
        check: Callable[[], None] | None = None,
        note: CommitNote | None = None,
    ) -> Timestamp:
        """Commit a write set. `check` runs under the lock first, and may raise to call the commit
        off. `note` adds a record to the commit."""
        writes.seal()
        if note is not None:
            check = note.check if check is None else partial(each, (note.check, check))
        stage = partial(self._stage_writes, writes, note)
        return self.commit_staged(
            stage, durability=durability, check=check, writes=writes, mends=note is None
        )

    def stage_of(self, writes: WriteSet) -> Stage:
        """The stage that adds a write set to the batch of a commit."""
        writes.seal()
        return partial(self._stage_writes, writes, None)

    def _stage_writes(
        self,
        writes: WriteSet,
        note: CommitNote | None,
        batch: WriteBatch,
        timestamp: Timestamp,
        tag: tuple[int, int],
    ) -> Staged:
        due = None if writes.expiring is None else writes.schedule(timestamp)
        events, full = self._writes.stage(batch, writes, timestamp, tag)
        publish = partial(self._writes.publish, ((timestamp, writes),), full)
        if due is not None:
            self.expiries.begin()
            publish = partial(each, (publish, partial(self.expiries.add, due)))
        if note is not None:
            publish = partial(each, (publish, note.stage(batch, timestamp)))
        return events, publish

    def commit_staged(
        self,
        stage_entries: Stage,
        *,
        durability: Durability | None = None,
        check: Callable[[], None] | None = None,
        writes: WriteSet | None = None,
        mends: bool = False,
    ) -> Timestamp:
        """Commit the entries that `stage_entries` adds to the batch, at one new timestamp. All of
        its versions are in `writes`, if this is given. `mends` tells that nothing else changes with
        the commit, so that an interrupt of it is mended."""
        how = self.durability if durability is None else require_durability(durability)
        if self.expiries.next_at != NEVER:
            self.catch_up()
        with self.lock:
            reserved = None
            if not self.frontiers.is_healthy or self.policy.commits is not None:
                self.require_commits()
                reserved = self._next()
            if check is not None:
                check() if reserved is None else self.expiries.waiting_for(check)
            self._is_committing = True
            batch = self._engine.batch()
            timestamp = self._timeline.next() if reserved is None else reserved
            begun = self.capture.begin_commit(timestamp)
            events, publish = stage_entries(batch, timestamp, begun[0])
            upper = Timestamp(timestamp + 1)
            points = None if writes is None or writes.ranges else writes.points
            mend = self._mend if mends else None
            self.write_commits(batch, publish, upper, ((begun, events, upper),), points, mend)
            self._is_committing = False
            if how == "sync":
                self.syncs.sync()
        if how == "group":
            self.syncs.wait(upper)
        return timestamp

    def apply(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None:
        """Write commits that have times of their own, oldest first, in one engine batch, and
        complete the time below `upper`. The policy is not asked: a replica drives it."""
        with self.lock:
            self.health.require()
            batch = self._engine.batch()
            counts: list[Count] = []
            full: list[FullEntry] = []
            for timestamp, writes in commits:
                writes.seal()
                begun = self.capture.begin_commit(timestamp)
                events, entries = self._writes.stage(batch, writes, timestamp, begun[0])
                counts.append((begun, events, timestamp + 1))
                full += entries
            self._meta.stage_timestamp(batch, UPPER, upper)
            publish = partial(self._writes.publish, commits, full)
            mend = self._mend if self.policy.commits is None else None  # no replica
            self.write_commits(batch, publish, Timestamp(upper), counts, mend=mend)

    def write_commits(
        self,
        batch: WriteBatch,
        publish: Callable[[], None],
        upper: Timestamp,
        counts: Iterable[Count] = (),
        points: Mapping[bytes, bytes | None] | None = None,
        mend: Mend | None = None,
    ) -> None:
        """Write the staged commits of `batch`, show them and count them: the middle of every
        commit. `points` is as in `Engine.write`, and `mend` as in `Health.interrupted`. The caller
        holds the lock. Hot."""
        try:  # `health.poisoning`, without its object
            if self.capture.is_due:
                self.capture.stage(batch)
            self.health.guarded(self._engine.write, batch, points)
            publish()
            self.frontiers.advance(upper)
            meters = self.meters
            for begun, events, above in counts:
                self.capture.finish_commit(begun, events, above)
                meters.commits += 1
                meters.changes += events
        except BaseException as error:
            self.health.interrupted(error, mend)
            raise

    def mend_by(self, reload: Callable[[], None]) -> Mend:
        """The mend of records that are beside the timeline, which `reload` takes as they are
        stored. It is called under the lock."""
        return partial(self._mend, reload)

    def _mend(self, reload: Callable[[], None] | None = None) -> bool:
        """Bring memory to what is stored, after an interrupt of a commit that may be there or not,
        or of records that `reload` takes as they are stored.

        All that such a commit changes in memory is made anew from the engine: `upper` and the range
        tombstones, and the cache and the table of recent commits begin empty. The domain of
        changesets ends, as it does after a crash, because nobody knows whether the commit was
        counted. An open changeset would be cut by that, so then the store stays poisoned, and so
        does a store whose engine cannot tell what it has. O(range tombstones, and the commits since
        the last written epoch).
        """
        if not self.lock.acquire(timeout=MEND_WAIT_S):
            return False
        try:
            if not self.health.is_torn:
                return not self.health.poison
            is_commit = reload is None
            if (is_commit and self.capture.open) or not self._engine.look_again():
                self.health.give_up()
                return False
            versions, frontiers = self._writes.versions, self.frontiers
            stored = max(self._meta.timestamp(UPPER), self._writes.index.last() + 1)
            upper = Timestamp(max(frontiers.upper, stored))
            versions.publish_fragments(Fragments.of(stored_tombstones(self._engine)))
            self.recent.forget(upper)
            if reload is not None:
                reload()
            else:
                self.capture.begin_anew(
                    self._engine, self._writes.index, since=frontiers.since, upper=upper
                )
            if upper > frontiers.upper:
                frontiers.advance(upper)
            self.expiries.look()
            self._is_committing = False
            self.health.mended()
            return True
        finally:
            self.lock.release()

    def give_way(self) -> None:
        """Let a commit under way finish before waiting for its lock. This pays where the lock is
        held for microseconds, as by transactions.

        A thread that waited for the lock is given it before it has the interpreter. The thread that
        has the interpreter then finds the lock taken and waits too, and from then on the kernel
        hands over every turn: a convoy (Blasgen, Gray, Mitoma and Price, 1979). Eight threads take
        35 us a transaction with this, 88 without. After a failed commit some yield in vain.
        """
        for _ in range(COMMIT_YIELDS_MAX):
            if not self._is_committing:
                return
            time.sleep(0)  # gives the interpreter away, and no time

    def _next(self) -> Timestamp:
        """A timestamp above all earlier ones, after the deletes that are due at or below it. The
        caller holds the lock."""
        timestamp = self._timeline.next()
        while timestamp >= self.expiries.next_at:
            self.expiries.write_step(timestamp)
            timestamp = self._timeline.next()
        return timestamp

    def next_times(self, count: int) -> list[Timestamp]:
        """As `_next`, for commits that go together: no delete is due between them."""
        while True:
            first = self._next()
            times = [first, *(self._timeline.next() for _ in range(count - 1))]
            if times[-1] < self.expiries.next_at:
                return times

    # -- records and time -------------------------------------------------------------------

    def write_meta(
        self,
        stage: Records,
        show: Publish = nothing,
        *,
        durable: bool = True,
        mend: Mend | None = None,
    ) -> None:
        """Write records that have no place on the timeline (holds, preparations), and show them.
        `mend` is as in `Health.interrupted`."""
        with self.lock:
            self.health.require()
            self.policy.require_records()
            batch = self._engine.batch()
            stage(batch)
            with self.health.poisoning(mend):  # a signal may leave the stored bytes ahead of memory
                self.health.guarded(self._engine.write, batch)
                if durable:
                    self.health.guarded(self._engine.sync)
                show()
        self.frontiers.wake()

    def announce(
        self,
        stage_records: Callable[[WriteBatch, Timestamp], Callable[[], None]],
        reload: Callable[[], None] | None = None,
    ) -> Timestamp:
        """Write records that hold from a new time on, above `upper`; then move `upper` there.

        `stage_records` returns what publishes them, and `reload` takes them as they are stored,
        after an interrupt. They are durable before anybody sees them:
        every earlier commit lies below that time, and every later commit at or above it.
        """
        self.catch_up()
        with self.lock:
            self.require_commits()
            begins_at = self._next()
            if begins_at <= self.frontiers.upper:
                begins_at = self._next()
            batch = self._engine.batch()
            publish = stage_records(batch, begins_at)
            self._meta.stage_timestamp(batch, UPPER, begins_at)
            with self.health.poisoning(None if reload is None else self.mend_by(reload)):
                self.health.guarded(self._engine.write, batch)
                self.syncs.sync()
                publish()
                self.frontiers.advance(begins_at)
        return begins_at

    def close_upto_now(self, at_least: int = 0) -> Timestamp:
        """Move `upper` to the present, so that the time until now is complete. Returns it. It also
        completes `at_least`, which lies less than a microsecond ahead: see `readable`.

        A store whose time does not follow the clock returns its `upper` as it is. The promise is
        written down (unsynced: 10 us), so that it outlives this process.
        """
        if not self.policy.follows_clock:
            return self.frontiers.upper
        self.catch_up()
        with self.lock:
            self.health.require()
            if max(self._timeline.now(), at_least) >= self.frontiers.upper:
                self._timeline.rise_to(at_least - 1)
                upper = Timestamp(self._next() + 1)
                stage = partial(self._stage_upper, upper)
                show = partial(self.frontiers.advance, upper)
                self.write_meta(stage, show, durable=False, mend=self._mend)
            return self.frontiers.upper

    def catch_up(self) -> None:
        """Raise as `Health.require`, and write the due deletes. Others get the lock in between."""
        while self.is_behind(waits=True):
            time.sleep(0)  # a thread that waits for the lock takes it

    def is_behind(self, *, waits: bool = False) -> bool:
        """As `catch_up`, one step at most, and no waiting for the lock. Whether more is due."""
        if self.frontiers.is_sound and not self._timeline.has_passed(self.expiries.next_at):
            return False  # one look at the clock: hot while a key waits
        self.health.require()
        taken = self.lock.acquire(blocking=waits)
        try:
            if taken and self.expiries.is_held:
                return False  # this thread checks a commit
            if taken and self.has_due:
                self.health.require()
                self.expiries.write_step(self._timeline.now())
        finally:
            if taken:
                self.lock.release()
        return self.has_due

    @property
    def has_due(self) -> bool:
        """Whether deletes are due. Hot callers look at `frontiers.is_healthy` first."""
        return self._timeline.has_passed(self.expiries.next_at)

    def sync(self) -> Timestamp:
        """Close the time until now, make everything written durable, and return `upper`."""
        if self.policy.records is not None:  # nothing was written
            return self.frontiers.upper
        before = self.frontiers.upper
        upper = self.close_upto_now()
        with self.lock:
            if self.capture.has_pending:
                with self.health.poisoning(self._mend):
                    self.write_meta(self.capture.stage, durable=False, mend=self._mend)
        if upper == before:  # no time has passed: records beside the timeline may still wait
            self.persist()
        self.syncs.wait(upper)
        return upper

    def is_following(self) -> bool:
        """Whether commits come from elsewhere: from a source, or from the process that writes."""
        return self.policy.source is not None or self.policy.is_live

    def adopt(self, policy: Policy) -> None:
        """Follow `policy` from now on. The caller holds the lock.

        A store that begins to follow the clock commits above its newest entry.
        """
        if policy.follows_clock:
            self._timeline.rise_to(self.frontiers.upper - 1)
        self.policy = policy
        if policy.commits is None:
            self.expiries.look()

    def finish(self) -> None:
        """Before closing: write down `upper`, and wait for the disk. A poisoned store and one that
        is only read write nothing."""

        def stage_end(batch: WriteBatch) -> None:
            self._stage_upper(self.frontiers.upper, batch)
            self.capture.end(batch, self.frontiers.upper)

        try:
            if not self.health.poison and self.policy.records is None:
                self.write_meta(stage_end, durable=False)
                self.syncs.sync()  # this fsync also serves the commits that wait for the disk
        finally:
            self.health.finish()
            if self._mark is not None:
                self._mark.close()

    def _stage_upper(self, upper: int, batch: WriteBatch) -> None:
        self._meta.stage_timestamp(batch, UPPER, upper)

    # -- frontiers --------------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """History below it may be gone."""
        return self.frontiers.since

    @property
    def upper(self) -> Timestamp:
        """The first time that is not complete."""
        return self.frontiers.upper

    @property
    def durable(self) -> Timestamp:
        """Everything below it survives a crash."""
        return Timestamp(self.syncs.durable)

    def readable(self, as_of: int) -> int:
        """`as_of` if it can be read now; an idle store closes the time until now for it.

        The present in microseconds lies ahead of the present (`kvstore.base.timestamp.reached`). A
        store that follows the clock completes it, so that a later read at the time finds the same
        state. Another store reads its newest complete time instead.

        Raises `HistoryGoneError` below `since`, `NotYetWrittenError` in the future.
        """
        if as_of >= self.frontiers.upper:
            self.close_upto_now()
            newest = reached(as_of, self.frontiers.upper - 1)
            if newest != as_of and self.policy.follows_clock:
                self.close_upto_now(as_of)
            else:
                as_of = newest
        require_readable(as_of, since=self.frontiers.since, upper=self.frontiers.upper)
        return as_of

    def now(self) -> Timestamp:
        """The time now, on this store's timeline."""
        return self._timeline.now()

    def to_time(self, value: TimeLike, *, name: str) -> Timestamp:
        """A time as a caller gave it, as `to_timestamp`. Words count from the time now; in a store
        whose time does not follow the clock, from its newest complete time."""
        frontiers = self.frontiers
        now = self.now if self.policy.follows_clock else lambda: frontiers.upper - 1
        return to_timestamp(value, name=name, now=now)

    def move_since(self, since: int) -> None:
        """Give up history below `since`. The caller has asked the holds.

        Later writes survive a crash only if this one does. `persist` waits for the disk.
        """
        with self.lock:
            assert self.frontiers.since <= since < self.frontiers.upper
            self.write_meta(
                lambda batch: self._meta.stage_timestamp(batch, SINCE, since),
                partial(self.frontiers.move_since, since),
                durable=False,
                mend=self.mend_by(lambda: self.frontiers.move_since(self._meta.timestamp(SINCE))),
            )

    # -- durability and health --------------------------------------------------------------

    def persist(self) -> None:
        """Wait until everything written is on disk, records beside the timeline included. One
        fsync, outside the lock: commits continue."""
        self.health.require()
        self.syncs.sync()

    def make_durable(self) -> Timestamp:
        """Wait until everything written is durable; returns the `upper` that this covers."""
        upper = self.frontiers.upper
        self.syncs.wait(upper)
        return upper

    def require_writable(self) -> None:
        """Raise as `Health.require`, and `UsageError` where no record may be written."""
        self.health.require()
        self.policy.require_records()

    def require_commits(self) -> None:
        """Raise as `Health.require`, and `UsageError` where nothing may be committed."""
        self.health.require()
        self.policy.require_commits()
