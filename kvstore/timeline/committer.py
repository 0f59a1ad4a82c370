"""Commits: one lock orders the commits of a store and moves its frontiers.

`Committer.commit` is the whole of a commit, in the order of its steps: the lock, the time, the
checks, the engine batch, the write, what readers are told, `upper`, the fsync. `commit_event`
commits what is no write set, such as an import, and `apply` commits that have times of their own.
Both take the same steps, with `written` in the middle.

Invariants
1. A commit's timestamp is at or above the `upper` it found, and below the `upper` it publishes.
2. A commit reads the clock once, and looks once whether the store is still healthy.
3. The versions of a write set, its change entries and the note of its request go into one engine
   batch: none is there without the others. A large write set goes in pieces, which count as one
   batch (`kvstore.timeline.pieces`). Nothing is shown before its batch is written.
4. A commit that is called off before its write leaves the store as it was. From the write on, an
   exception poisons the store, unless what memory has can be made anew from the engine (`_mend`).
5. A time that a generation begins at is announced: its record is durable before `upper` reaches
   it.
6. `upper` passes no due time of `expiries` before the deletes of that time are written. A commit
   makes its checks after them. While no key waits for its expiry, this costs nothing.

The policy says which commits a store takes; `kvstore.timeline.durability` how a commit waits for
the disk and what a failure does; `kvstore.timeline.frontiers` what readers see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias

from kvstore.base.clock import Timeline
from kvstore.base.forks import own
from kvstore.base.meters import Meters
from kvstore.base.timestamp import TimeLike, Timestamp, reached, to_timestamp
from kvstore.changes.epochs import Begun, Capture
from kvstore.changes.index import ChangeIndex, FullEntry
from kvstore.engine.api import WriteBatch
from kvstore.errors import UsageError
from kvstore.limits import COMMIT_PIECE_BYTES, COMMIT_YIELDS_MAX, MEND_WAIT_S
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.meta import SINCE, UPPER, Meta, Publish, Records, nothing
from kvstore.mvcc.versions import Versions, stored_tombstones
from kvstore.mvcc.write_set import WriteSet, stage_tombstones
from kvstore.timeline.durability import (
    DURABILITIES,
    DURABILITY,
    Durability,
    DurableMark,
    GroupSync,
    Health,
    Mend,
)
from kvstore.timeline.expiries import NEVER, Expiries
from kvstore.timeline.frontiers import OPEN, Frontiers, Policy, require_readable
from kvstore.timeline.pieces import CommitPieces
from kvstore.timeline.recent import RecentCommits
from kvstore.timeline.request_notes import RequestNotes, RequestToken

StageEvent: TypeAlias = "Callable[[WriteBatch, Timestamp, tuple[int, int]], Callable[[], None]]"
"""Adds the entries of an event, tagged with its changeset, to an engine batch. Returns the call
that shows the event to readers."""

After: TypeAlias = "Callable[[Timestamp], WriteSet]"
"""Makes the writes that follow an event. It is called under the commit lock, with the time of the
event."""

BegunCommit: TypeAlias = "tuple[Begun, int, int]"
"""A commit that was begun, the events it adds to the change index, and the `upper` above it."""


TIME_COMPLETED: Final = (
    "the check of a commit has committed to the store, or completed the time of the commit",
    "in a check, write nothing and read without a time",
)
"""The refusal of a commit whose time was taken before its check, and is complete after it."""


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
        self._engine, self._versions, self._index = versions.engine, versions, index
        self._timeline = timeline
        self.capture = capture
        self._meta = Meta(self._engine)
        self.durability = DURABILITY.check("durability", durability)
        self.policy = policy
        self.lock = threading.RLock()
        self.recent = RecentCommits(versions.newest, upper)
        self.frontiers = Frontiers(since=since, upper=upper)
        self.health = Health(self.frontiers, where)
        self.meters = Meters(where)
        self.syncs = GroupSync(self._engine, self.frontiers, self.health, self.meters, mark=mark)
        self._mark = mark
        self.pieces = CommitPieces(self._engine, index, self.health)
        self.expiries = Expiries(versions, self.frontiers, timeline, self.apply)
        self.requests = RequestNotes(self._meta)
        self.is_committing = False
        """Whether a commit is between its checks and its end: see `give_way`."""
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
        token: RequestToken | None = None,
    ) -> Timestamp:
        """Commit a write set at one new timestamp, and wait for the disk as `durability` says.

        `check` runs under the lock: it may raise to call the commit off, and may add to `writes`.
        `token` names the request that the commit carries out: a repetition of the request raises
        `RepeatedError` before the check, and the commit has a note of it.
        """
        how = self.durability if durability is None else durability
        if how not in DURABILITIES:
            DURABILITY.check("durability", how)
        writes.seal()
        if self.expiries.next_at != NEVER:
            self.catch_up()
        with self.lock:
            self.pieces.require_none()
            # The time and the checks. While a key waits for its expiry the time comes first,
            # because the deletes that are due below it must be there when the checks read.
            taken = None
            if not self.frontiers.is_healthy or self.policy.commits is not None:
                self.require_commits()
                taken = self._next()
            if token is not None:
                self.requests.require_new(token)
            if check is not None:
                try:
                    self.expiries.is_held = taken is not None
                    check()
                finally:
                    self.expiries.is_held = False
            self.is_committing = True
            batch = self._engine.batch()
            timestamp = self._timeline.next() if taken is None else taken
            if timestamp < self.frontiers.upper:
                raise UsageError(*TIME_COMPLETED)
            upper = Timestamp(timestamp + 1)

            # The batch: versions, records of expiries, change entries, the note of a request.
            begun = self.capture.begin_commit(timestamp)
            due = None
            if writes.expiring is not None:
                due = writes.schedule(timestamp)
                self.expiries.begin()
            pieces, full = None, []
            if writes.size > COMMIT_PIECE_BYTES:
                pieces = self.pieces.begin(writes, timestamp, begun[0])
                stage_tombstones(batch, writes.tombstones(timestamp), self._engine.families)
            else:
                full = self._index.stage_commit(batch, writes, timestamp, begun[0])
            leaving = [] if token is None else self.requests.stage(batch, token, timestamp)
            events = len(writes.points) + len(writes.ranges)

            # The write, and what follows from it: see invariant 4.
            try:
                if self.capture.is_due:
                    self.capture.stage(batch)
                if pieces is not None:
                    self.pieces.write_pieces(pieces, batch)
                else:
                    points = None if writes.ranges else writes.points
                    self.health.guarded(self._engine.write, batch, points)
                if full:
                    self.health.guarded(self._index.complete, full)
                if writes.ranges:
                    self._versions.publish_ranges(writes.tombstones(timestamp))
                self.recent.add(timestamp, writes.points, writes.ranges)
                if due is not None:
                    self.expiries.add(due)
                if token is not None:
                    self.requests.show(token, timestamp, leaving)
                self.frontiers.advance(upper)
                self.capture.finish_commit(begun, events, upper)
                self.meters.commits += 1
                self.meters.changes += events
            except BaseException as error:
                mend = partial(self._mend, counts=((begun, events, upper),))
                self.health.interrupted(error, mend)
                raise
            self.is_committing = False
            if how == "sync":
                self.syncs.sync()
        if how == "group":
            self.syncs.wait(upper)
        return timestamp

    def commit_event(
        self,
        stage_event: StageEvent,
        *,
        events: int,
        reload: Callable[[], None],
        check: Callable[[], None] | None = None,
        after: After | None = None,
    ) -> Timestamp:
        """Commit what is no write set (an import, a revert, a clear), durably. Returns its time.

        No other event has its timestamp. So the writes that `after` makes are a commit of their
        own, right above it in the same batch: a crash leaves both or neither, and `upper` passes
        both at once. `events` is what it adds to the change index. `reload` takes the records
        of such events as they are stored, after an interrupt. `check` runs under the lock, before
        both, and may raise to call both off.
        """
        with self.lock:
            self.pieces.require_none()
            taken, count = None, 1 if after is None else 2
            if not self.frontiers.is_healthy or self.policy.commits is not None:
                self.require_commits()
                taken = self._next_times(count)
            if check is not None:
                try:
                    self.expiries.is_held = taken is not None
                    check()
                finally:
                    self.expiries.is_held = False
            times = [self._timeline.next() for _ in range(count)] if taken is None else taken
            if times[0] < self.frontiers.upper:
                raise UsageError(*TIME_COMPLETED)
            following = [] if after is None else [(times[1], after(times[0]))]
            batch = self._engine.batch()
            begun = self.capture.begin_commit(times[0])
            show = stage_event(batch, times[0], begun[0])
            counts, full = self._stage_commits(batch, following)
            counts.insert(0, (begun, events, times[0] + 1))
            mend = partial(self._mend, reload, counts=counts)
            with self.written(batch, Timestamp(times[-1] + 1), counts, mend):
                show()
                self._show_commits(following, full)
            self.syncs.sync()
        return times[0]

    def apply(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None:
        """Write commits that have times of their own, oldest first, in one engine batch, and
        complete the time below `upper`. The policy is not asked: a replica drives it."""
        with self.lock:
            self.health.require()
            self.pieces.require_none()
            batch = self._engine.batch()
            counts, full = self._stage_commits(batch, commits)
            self._meta.stage_timestamp(batch, UPPER, upper)
            is_ours = self.policy.commits is None  # no replica
            mend = partial(self._mend, counts=counts) if is_ours else None
            with self.written(batch, Timestamp(upper), counts, mend):
                self._show_commits(commits, full)

    @contextmanager
    def written(
        self,
        batch: WriteBatch,
        upper: Timestamp,
        counts: Iterable[BegunCommit] = (),
        mend: Mend | None = None,
    ) -> Iterator[None]:
        """Write the staged commits of `batch`; then the block shows them to readers; then move
        `upper` and count them. `mend` is as in `Health.interrupted`. The caller holds the lock."""
        try:
            if self.capture.is_due:
                self.capture.stage(batch)
            self.health.guarded(self._engine.write, batch)
            yield
            self.frontiers.advance(upper)
            for begun, events, above in counts:
                self.capture.finish_commit(begun, events, above)
                self.meters.commits += 1
                self.meters.changes += events
        except BaseException as error:
            self.health.interrupted(error, mend)
            raise

    def _stage_commits(
        self, batch: WriteBatch, commits: Sequence[tuple[int, WriteSet]]
    ) -> tuple[list[BegunCommit], list[FullEntry]]:
        """Add commits to a batch. Returns their counts, and the full forms of their entries in the
        change index, which are written after the batch."""
        counts: list[BegunCommit] = []
        full: list[FullEntry] = []
        for timestamp, writes in commits:
            writes.seal()
            begun = self.capture.begin_commit(timestamp)
            full += self._index.stage_commit(batch, writes, timestamp, begun[0])
            counts.append((begun, len(writes.points) + len(writes.ranges), timestamp + 1))
        return counts, full

    def _show_commits(
        self, commits: Sequence[tuple[int, WriteSet]], full: Sequence[FullEntry]
    ) -> None:
        """Tell readers and transactions of commits that are written."""
        if full:
            self.health.guarded(self._index.complete, full)
        tombstones = []
        for timestamp, writes in commits:
            tombstones += writes.tombstones(timestamp)
            self.recent.add(timestamp, writes.points, writes.ranges)
        if tombstones:
            self._versions.publish_ranges(tombstones)

    def mend_by(self, reload: Callable[[], None]) -> Mend:
        """The mend of records that are beside the timeline, which `reload` takes as they are
        stored. It is called under the lock."""
        return partial(self._mend, reload, is_commit=False)

    def mend_memory(self, settle: Callable[[], None]) -> Mend:
        """The mend of a change in memory alone: `settle` takes it back, or makes it anew. It is
        called under the lock."""
        return partial(self._mended_by, settle)

    def _mend(
        self,
        reload: Callable[[], None] | None = None,
        *,
        counts: Sequence[BegunCommit] = (),
        is_commit: bool = True,
    ) -> bool:
        """Bring memory to what is stored, after an interrupt of commits that may be there or not,
        or of records. `reload` takes the records as they are stored; `counts` are the commits.

        All that a commit changes in memory is made anew from the engine: `upper`, the range
        tombstones and the notes of requests, and the cache and the table of recent commits begin
        empty. The domain of changesets ends, as it does after a crash, because nobody knows whether
        the commit was counted. That would cut an open changeset, so while one is open, the commits
        are counted once more. A commit of no changeset cannot be: it may have closed an epoch by
        half. Then the store stays poisoned, and so does a store whose engine cannot tell what it
        has. O(range tombstones, and the commits since the last written epoch).
        """
        return self._mended_by(partial(self._settle, reload, counts, is_commit))

    def _mended_by(self, settle: Callable[[], object]) -> bool:
        """Bring memory in order by `settle`, which returns False if it cannot."""
        if not self.lock.acquire(timeout=MEND_WAIT_S):
            return False
        try:
            if not self.health.is_torn:
                return not self.health.poison
            if settle() is False:
                self.health.give_up()
                return False
            self.health.mended()
            return True
        finally:
            self.lock.release()

    def _settle(
        self, reload: Callable[[], None] | None, counts: Sequence[BegunCommit], is_commit: bool
    ) -> bool:
        """See `_mend`."""
        if not self._engine.look_again():
            return False
        self.pieces.remove()
        capture, is_counted = self.capture, False
        if is_commit and capture.open:
            is_counted = bool(counts) and capture.recount(counts, self._index)
            if not is_counted:
                return False
        versions, frontiers = self._versions, self.frontiers
        stored = max(self._meta.timestamp(UPPER), self._index.last() + 1)
        upper = Timestamp(max(frontiers.upper, stored))
        versions.publish_fragments(Fragments.of(stored_tombstones(self._engine)))
        self.recent.forget(upper)
        self.requests.reload()
        if reload is not None:
            reload()
        if is_commit and not is_counted:
            capture.begin_anew(self._engine, self._index, since=frontiers.since, upper=upper)
        if upper > frontiers.upper:
            frontiers.advance(upper)
        self.expiries.look()
        self.is_committing = False
        return True

    def give_way(self) -> None:
        """Let a commit under way finish before waiting for its lock. This pays where the lock is
        held for microseconds, as by transactions.

        A thread that waited for the lock is given it before it has the interpreter. The thread that
        has the interpreter then finds the lock taken and waits too, and from then on the kernel
        hands over every turn: a convoy (Blasgen, Gray, Mitoma and Price, 1979). Eight threads take
        35 us a transaction with this, 88 without. After a failed commit some yield in vain.
        """
        for _ in range(COMMIT_YIELDS_MAX):
            if not self.is_committing:
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

    def _next_times(self, count: int) -> list[Timestamp]:
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
            self.pieces.require_none()
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
            self.pieces.require_none()
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
        """Write all deletes that are due. Other threads get the lock between two steps. Raises as
        `Health.require`."""
        while self.write_due(waits=True):
            time.sleep(0)  # a thread that waits for the lock takes it

    def write_due(self, *, waits: bool) -> bool:
        """Write the deletes that are due, one step at most; returns whether more are due. If
        another thread has the lock, this call `waits` for it, or writes nothing. Raises as
        `Health.require`."""
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
            self.sync_all()
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

        A time that was rounded up to microseconds may lie ahead of the clock
        (`kvstore.base.timestamp.reached`). A store that follows the clock closes the time up to it,
        so that a later read at the time finds the same state. Any other store reads its newest
        complete time instead.

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

    def show_upto(self, upper: Timestamp) -> None:
        """Show the commits of another process below `upper`. The time here is at or above theirs
        from now on, also where the clock of that process was ahead. The caller holds `lock`."""
        self._timeline.rise_to(upper - 1)
        self.frontiers.advance(upper)

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

    def sync_all(self) -> None:
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
