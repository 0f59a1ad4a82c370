"""Continuous backups: window after window while a store is written, and merges beside them.

    windows    wait for a commit -> one backup (`backup.window`) -> pause for `every`
    merges     wait for a window -> merge the batches of the small tiers -> look again
    large      wait for a window -> merge the batches of the large tiers -> look again

Each backup survives a kill at any step, and so does each merge. So a follower that was killed
needs no state of its own: the next one continues from the collection.

Invariants
1. Without a commit there is no window, also where others complete the time of the store: another
   follower, a replica, GC. The position of the follower is durable in the collection, and the
   hold of the collection tells it before the bucket answers.
2. A failure that may pass ends no follower: it is logged with the recovery point, and tried again
   after a pause. Every other failure ends the follower: it is logged too, and raised to its
   owner.
3. Merges run in two threads of their own, one tier at a time, and never delay a window by a lock.
   A small merge never waits for a large one (`TierMerges`), so batches stay few beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
from typing_extensions import Self

from kvstore.backup.chains import Chains
from kvstore.backup.shard import Shard, Storage
from kvstore.backup.shard.slot_compaction import merge_slot
from kvstore.backup.shard.state.trace import ShardBatch, Slot, part_of_slot
from kvstore.backup.window import BackupInfo, Request, back_up, reached
from kvstore.base.arguments import AGE, WAIT
from kvstore.base.background import Failures
from kvstore.base.clock import WallClock
from kvstore.base.forks import own
from kvstore.base.timestamp import NS_PER_SECOND, AgeLike, Timestamp
from kvstore.errors import ForkedError, KVStoreError, RetryableError, StorageError
from kvstore.limits import (
    CONTROL_POLL_S,
    FOLLOW_PAUSE_S,
    FOLLOW_PAUSE_S_MAX,
    SMALL_MERGE_BYTES_MAX,
    SMALL_MERGE_ROWS_MAX,
)
from kvstore.remote.control import StoreOrClient, as_store, client_of, present
from kvstore.storage.wrapped import until_stopped
from kvstore.store import Store

_PASSING: Final = (RetryableError, StorageError)

OnWindow: TypeAlias = "Callable[[BackupInfo], None]"
"""Called with each backup of a follower; an exception from it ends the follower."""

FOLLOW_EVERY: Final = timedelta(seconds=1)


class Requested(NamedTuple):
    """The arguments of each backup that a follower makes: see `backup.window.Request`."""

    address: str
    is_lasting: bool
    max_age: timedelta | None

    def of(self, store: Store) -> Request:
        """The request of one backup."""
        return Request(store, self.address, self.is_lasting, max_age=self.max_age)


class FollowStatus(NamedTuple):
    """The state of a follower.

    A disaster now would lose the commits from `upper` on: they span `behind_seconds`, 0 where the
    collection has all commits. Where the owner of the store does not answer, they may reach until
    now. `upper` is the start of 1970 before the first backup of all. `failures` counts the failures
    of backups and merges, and `last_error` is the newest failure of a backup.
    """

    upper: Timestamp
    behind_seconds: float
    windows: int
    failures: int
    last_error: str


class Follower:
    """Backs up a store until it is closed, for a `with` statement. `Collection.follow` makes it."""

    def __init__(
        self,
        chains: Callable[[Storage], Chains],
        place: Storage,
        store: StoreOrClient,
        request: Requested,
        every: AgeLike,
        clock: WallClock,
        progress: OnWindow | None,
    ) -> None:
        """`chains` makes a handle on the collection at `place`, for one thread."""
        self._request = request
        store = present(store)
        self._client = client_of(store)
        self._store = store if isinstance(store, Store) else None
        age = AGE.check("every", every)
        self._every_s = min(age.total_seconds(), threading.TIMEOUT_MAX)
        self._clock = clock
        self._progress = progress
        self._failures = Failures("kvstore.backup", clock)
        self._merge_failures = Failures("kvstore.backup", clock)
        if self._store is not None:
            for each in (self._failures, self._merge_failures):
                self._store.upkeep.watch("backup", each)
        self._stop = threading.Event()
        blob = until_stopped(place.blob, self._stop)
        self._chains = partial(chains, place._replace(blob=blob))
        self._merges = TierMerges(self._stop.is_set)
        self._moved = threading.Condition()
        self._upper = self._windows = 0
        self._whole_upto = 0
        """The collection has every commit below this time, which may lie above its upper."""
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=work, name=f"kvstore-follow-{name}", daemon=True)
            for name, work in (
                ("windows", self._follow),
                ("merges", partial(self._merge, is_large=False)),
                ("large", partial(self._merge, is_large=True)),
            )
        ]
        own(self, "the follower of a store")
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the follower. Raises the failure that has ended it, unless the block has failed."""
        with suppress(ForkedError):  # in a child the threads are the parent's
            self.close()
            if kind is None:
                self.require()

    def stop(self) -> None:
        """Have the follower end after the window under way, and do not wait for that."""
        self._stop.set()
        if self._store is not None and self._client is None:
            self._store.replication.wake()
        with self._moved:
            self._moved.notify_all()

    def wait(self) -> None:
        """Wait until the follower has ended: after `stop`, or after a failure."""
        for thread in self._threads:
            if thread is not threading.current_thread():  # `progress` may close the follower
                thread.join()

    def close(self) -> None:
        """End after the window under way, which is given up where the storage does not answer.
        Commits that came since are left to the next backup: wait for them by `wait_until`. Closing
        twice does nothing more."""
        self.stop()
        self.wait()

    def require(self) -> None:
        """Raise the failure that has ended the follower, if there is one."""
        if self._error is not None:
            raise self._error

    def status(self) -> FollowStatus:
        """How far the collection has come, and what has failed."""
        figures = self._failures.figures("backup")
        behind = 0.0
        if self._has_more():
            whole_upto = max(self._upper, self._whole_upto)
            behind = max(self._clock.wall_ns() - whole_upto, 0) / NS_PER_SECOND
        return FollowStatus(
            Timestamp(self._upper),
            behind,
            self._windows,
            figures["backup_failures"] + self._merge_failures.count,
            figures["backup_last_error"],
        )

    def wait_until(self, commit: int, timeout: float | None = None) -> bool:
        """Wait until the collection has the commit at that time; False after `timeout` seconds.

        Raises the failure that has ended the follower.
        """
        with self._moved:
            done = self._moved.wait_for(
                lambda: self._whole_upto > commit or self._error is not None or self._stop.is_set(),
                WAIT.check("timeout", timeout),
            )
        self.require()
        return done and self._whole_upto > commit

    # -- windows ----------------------------------------------------------------------------

    def _follow(self) -> None:
        chains = self._chains()
        while not self._stop.is_set():
            try:
                with as_store(self._client or self._given()) as source:
                    done = self._window(chains, source)
            except _PASSING as error:
                self._note(error)
                continue
            except BaseException as error:  # noqa: BLE001  # `require` raises it
                self._end(error)
                return
            self._failures.succeeded()
            give_memory_back()
            with self._moved:
                if done is not None:
                    self._upper = int(done.upper)
                    self._windows += 1
                self._whole_upto = max(self._whole_upto, self._upper)
                self._moved.notify_all()
            try:
                if done is not None and self._progress is not None:
                    self._progress(done)
                self._wait_for_commits()
            except BaseException as error:  # noqa: BLE001
                self._end(error)
                return

    def _window(self, chains: Chains, source: Store) -> BackupInfo | None:
        """Make a backup; None where the collection has every commit of `source`. The first call
        always makes one, because a backup looks whether the collection is sound."""
        self._upper = self._upper or reached(source, self._request.address)
        self._whole_upto = max(self._whole_upto, self._upper)
        known, upper = self._upper, int(source.upper)
        if known and not source.replication.may_have_commits(known - 1, upper - 1):
            self._whole_upto = upper
            if self._windows:
                return None
        return back_up(chains, self._request.of(source))

    def _given(self) -> Store:
        assert self._store is not None, "a follower without a client has a store"
        return self._store

    def _has_more(self) -> bool:
        """Whether the store may have commits that the collection lacks."""
        try:
            return (self._client or self._given()).upper > self._whole_upto
        except _PASSING:
            return True

    def _note(self, error: KVStoreError, what: str = "a backup") -> None:
        self._failures.note(f"{what} (the recovery point is {Timestamp(self._upper)})", error)
        self._stop.wait(self._failures.delay_s(FOLLOW_PAUSE_S, FOLLOW_PAUSE_S_MAX))

    def _end(self, error: BaseException) -> None:
        point = Timestamp(self._upper)
        self._failures.note(f"a follower has ended (the recovery point is {point}): it", error)
        with self._moved:
            self._error = error
            self._stop.set()
            self._moved.notify_all()

    def _wait_for_commits(self) -> None:
        self._stop.wait(self._every_s)
        if self._client is None:
            self._given().wait_beyond(self._whole_upto, stop=self._stop.is_set)
            return
        while not self._stop.is_set():
            try:
                if self._client.upper > self._whole_upto:
                    return
            except _PASSING as error:  # another process may open the store
                self._note(error, "asking the owner for commits")
            self._stop.wait(CONTROL_POLL_S)

    # -- merges -----------------------------------------------------------------------------

    def _merge(self, *, is_large: bool) -> None:
        """Merge whenever a window was appended. A failure is tried again with the next one."""
        chains, seen = self._chains(), 0
        while not self._stop.is_set():
            seen = self._window_after(seen)
            try:
                shard = chains.newest()
                if shard is not None and is_large:
                    self._merges.merge_large(shard)
                elif shard is not None:
                    shard.expire_lapsed()
                    self._merges.merge_small(shard)
                    shard.collect_if_due()
                self._merge_failures.succeeded()
            except BaseException as error:  # noqa: BLE001  # it must not end in silence
                self._merge_failures.note("a merge of backups", error)
                self._stop.wait(self._merge_failures.delay_s(FOLLOW_PAUSE_S, FOLLOW_PAUSE_S_MAX))

    def _window_after(self, seen: int) -> int:
        """Wait for another window; returns how many there are."""
        with self._moved:
            self._moved.wait_for(lambda: self._windows > seen or self._stop.is_set())
            return self._windows


# --------------------------------------------------------------------------------------------------
# Merges of a follower: one thread merges small tiers, another the large ones.
#
# A merge is large if small ones must not wait for it. Where small merges come late, the next tier
# that is due takes in their batches and is a large one. Its small batches are then merged by
# themselves: otherwise they would wait for the large merge under way, and each window brings more.
#
# Invariants
# 1. A small merge never takes a batch that the large merge under way reads, because that merge
#    would lose its inputs.
# 2. A small merge waits for no large one. A large merge waits for a small one that is in its way.

_NOWHERE: Final = (0, 0)


class TierMerges:
    """The merges that are due in a collection, done by one small and one large thread."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        """`is_stopped` is asked before each merge."""
        self._is_stopped = is_stopped
        self._moved = threading.Condition()
        self._small = _NOWHERE
        self._large: Slot | None = None
        """The tier that the large thread merges, or `_NOWHERE` while it pauses after a failure."""

    def merge_small(self, shard: Shard) -> None:
        """Merge the small tiers, and the small batches of tiers for which the large thread has no
        time now."""
        for slot in shard.refresh().slots:
            if is_small(_batches_of(shard, slot)):
                self._merge_taken(shard, self._take_whole(slot))
            else:
                while self._merge_taken(shard, self._take_part(shard, slot)):
                    pass

    def merge_large(self, shard: Shard) -> None:
        """Merge the large tiers."""
        slots = shard.refresh().slots
        self._large = None  # the pause after a failure is over
        for slot in slots:
            if self._is_stopped():
                return
            if is_small(_batches_of(shard, slot)):
                continue
            with self._moved:
                while _overlap(self._small, slot):
                    self._moved.wait()
                self._large = slot
            try:
                _merge(shard, slot)
            except BaseException:
                self._large = _NOWHERE
                raise
            self._large = None

    def _merge_taken(self, shard: Shard, slot: Slot | None) -> bool:
        """Merge a slot taken from the large thread, and give it back. Returns whether the result
        took the place of batches: a merge that was refused would be refused again at once."""
        if slot is None:
            return False
        try:
            return _merge(shard, slot)
        finally:
            with self._moved:
                self._small = _NOWHERE
                self._moved.notify_all()

    def _take_whole(self, slot: Slot) -> Slot | None:
        """Take a small tier from the large thread, unless it has grown into the tier that the large
        thread merges."""
        with self._moved:
            if self._is_stopped() or _overlap(slot, self._large or _NOWHERE):
                return None
            self._small = slot
            return slot

    def _take_part(self, shard: Shard, slot: Slot) -> Slot | None:
        """Take small batches of `slot` from the large thread, unless it merges the slot next."""
        batches = _batches_of(shard, slot)
        with self._moved:
            if self._large is None or self._is_stopped():
                return None
            newer = [batch for batch in batches if batch.lower >= self._large[1]]
            part = part_of_slot(newer, is_small)
            self._small = part or _NOWHERE
            return part


def _overlap(one: Slot, other: Slot) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def is_small(batches: Sequence[ShardBatch]) -> bool:
    """Whether a merge of `batches` is so short that other small merges may wait for it."""
    return (
        sum(batch.size for batch in batches) <= SMALL_MERGE_BYTES_MAX
        and sum(batch.rows for batch in batches) <= SMALL_MERGE_ROWS_MAX
    )


def _batches_of(shard: Shard, slot: Slot) -> list[ShardBatch]:
    return [b for b in shard.state.batches if slot[0] <= b.lower and b.upper <= slot[1]]


def _merge(shard: Shard, slot: Slot) -> bool:
    outcome = merge_slot(shard.log, slot)
    give_memory_back()
    return outcome.applied


def give_memory_back() -> None:
    """Return the memory of rows that are written to the system. Arrow's allocator would keep it for
    the next rows: hundreds of megabytes, in a service that has other uses for them."""
    pa.default_memory_pool().release_unused()
