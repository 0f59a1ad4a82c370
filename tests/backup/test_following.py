"""Continuous backups: nothing is lost, nothing comes twice, and batches stay few."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import kvstore
from kvstore import backup
from kvstore.backup import FollowStatus
from kvstore.backup.shard import MemoryBlob, MemoryConsensus, Storage
from kvstore.base.clock import ManualClock
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.errors import HistoryHeldError, UsageError
from kvstore.limits import MERGE_FAN_IN
from kvstore.storage import patience as patience_module
from kvstore.storage.patience import Patience
from tests.backup.children import follow_until_killed
from tests.backup.histories import change
from tests.harness.bounds import bounds
from tests.harness.forks import STATUS, reap
from tests.harness.seeds import seeded
from tests.harness.storage_faults import FaultRates, FaultyBlob, FaultyConsensus, Weather

SOON = timedelta(milliseconds=1)
WAIT_S = 120
"""Far more than any wait of a test takes: a bound for a machine that hangs."""


def test_each_commit_is_backed_up_once_and_an_idle_store_not_at_all(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    told: list[backup.BackupInfo] = []
    store.put(b"a", b"1")
    with collection.follow(store, every=SOON, progress=told.append) as follower:
        for number in range(5):
            at = store.put(b"k%d" % number, b"v")
            assert follower.wait_until(at, WAIT_S)
            assert follower.status().upper > at
        status = follower.status()
        assert (status.behind_seconds, status.failures, status.last_error) == (0.0, 0, "")
        assert status.windows <= 1 + 5
    assert sum(info.rows for info in told) == 6
    assert collection.upper == told[-1].upper
    collection.verify("contents", store)
    follower.close()


def test_time_that_passes_without_a_commit_makes_no_window(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    """Else two followers of one store would wake each other for ever."""
    other = backup.Collection(tmp_path / "other")
    with (
        collection.follow(store, every=SOON) as follower,
        other.follow(store, every=SOON) as second,
    ):
        followers = (follower, second)
        at = store.put(b"a", b"1")
        for each in followers:
            assert each.wait_until(at, WAIT_S)
        windows = [each.status().windows for each in followers]
        for _ in range(5):
            upper = store.sync()
            for each in followers:
                assert each.wait_until(upper - 1, WAIT_S)
                assert each.status().behind_seconds == 0
        assert [each.status().windows for each in followers] == windows
        behind = store.metrics()["kvstore_backup_behind_seconds"].values
        assert set(behind.values()) == {0.0}
    collection.verify("contents", store)


def test_a_backup_of_an_idle_store_is_never_behind_its_budget(
    collection: backup.Collection, tmp_path: Path
) -> None:
    hour = 3600 * NS_PER_SECOND
    clock = ManualClock(1_700_000_000 * NS_PER_SECOND)
    budget, keep = timedelta(hours=12), timedelta(hours=1)
    with (
        kvstore.open(tmp_path / "idle", durability="async", clock=clock) as store,
        collection.follow(store, every=SOON, max_age=budget) as follower,
    ):
        assert follower.wait_until(store.put(b"a", b"1"), WAIT_S)
        clock.advance(60 * hour)
        assert store.gc(keep=keep).lost_holds == ()
        with pytest.raises(HistoryHeldError):
            store.clear_range(b"x", b"y")
        assert follower.wait_until(store.put(b"a", b"2"), WAIT_S)
        follower.close()
        clock.advance(60 * hour)
        store.put(b"a", b"3")  # for twelve hours from now on
        clock.advance(11 * hour)
        assert store.gc(keep=keep).lost_holds == ()
        clock.advance(2 * hour)
        assert len(store.gc(keep=keep).lost_holds) == 1


def test_batches_stay_few_while_windows_come(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    pick = random.Random(3)
    with collection.follow(store, every=SOON) as follower:
        for _ in range(40):
            change(store, pick, 3)
            assert follower.wait_until(store.upper - 1, WAIT_S)
        while len(collection.list()) > 12:
            assert follower.wait_until(store.put(b"more", b"windows"), WAIT_S)
        assert follower.status().windows >= 40
    collection.verify("contents", store)


class HeldBlob(MemoryBlob):
    """A memory in which merges write when they may: the small ones, and the large one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = Gate(), Gate()
        self.in_vain: list[str] = []

    def delete(self, name: str) -> int | None:
        # The large thread deletes nothing but its own output, where the merge was refused.
        if threading.current_thread().name == "kvstore-follow-large":
            self.in_vain.append(name)
        return super().delete(name)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        if len(data) >= 100_000:
            self.large.pass_through()
        elif threading.current_thread().name == "kvstore-follow-merges":
            self.small.pass_through()
        super().put(name, data, durable=durable)


def pause() -> None:
    """Leave the interpreter to the threads of a follower: a loop without a pause holds them up."""
    threading.Event().wait(0.01)


class Gate:
    """Holds who comes until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)


def test_batches_stay_few_while_a_large_merge_runs(store: kvstore.Store) -> None:
    """Even if no small merge ended for so long that their tier has become a large one."""
    blob = HeldBlob()
    collection = backup.Collection("held", storage=Storage(blob, MemoryConsensus()))
    pick = random.Random(9)

    def window(rows: int) -> None:
        with store.batch() as batch:
            for _ in range(rows):
                batch.put(pick.randbytes(8), pick.randbytes(80))
        assert follower.wait_until(store.upper - 1, WAIT_S)

    with (
        bounds(SMALL_MERGE_ROWS_MAX=400),
        collection.follow(store, every=SOON) as follower,
    ):
        try:
            while not blob.large.reached.is_set():
                window(500)
            before = len(collection.list())
            for _ in range(60):
                window(1)
            assert len(collection.list()) == before + 60
            blob.small.opened.set()
            window(1)
            deadline = time.monotonic() + WAIT_S
            while len(collection.list()) > before + 12:
                assert time.monotonic() < deadline, "no small merge ran beside the large one"
                pause()
        finally:
            blob.small.opened.set()
            blob.large.opened.set()
    collection.verify("contents", store)


def test_a_large_merge_waits_for_the_small_one_whose_tier_it_takes_in(
    store: kvstore.Store,
) -> None:
    """Else the small merge would take its inputs away, and the large one would be in vain."""
    blob = HeldBlob()
    collection = backup.Collection("held", storage=Storage(blob, MemoryConsensus()))
    pick = random.Random(10)

    def window(rows: int) -> None:
        with store.batch() as batch:
            for _ in range(rows):
                batch.put(pick.randbytes(8), pick.randbytes(80))
        assert follower.wait_until(store.upper - 1, WAIT_S)

    with (
        bounds(SMALL_MERGE_ROWS_MAX=400),
        collection.follow(store, every=SOON) as follower,
    ):
        try:
            while not blob.small.reached.is_set():
                window(1)
            for _ in range(MERGE_FAN_IN):  # these and the small batches are one large tier
                window(500)
            is_early = blob.large.reached.wait(0.2)
            blob.small.opened.set()
            blob.large.opened.set()
            deadline = time.monotonic() + WAIT_S
            while all(each.rows < 500 * MERGE_FAN_IN for each in collection.list()):
                window(1)
                assert time.monotonic() < deadline, "no large merge ended"
        finally:
            blob.small.opened.set()
            blob.large.opened.set()
    assert (is_early, blob.in_vain) == (False, [])
    collection.verify("contents", store)


def test_a_bucket_that_fails_in_turn_loses_nothing(store: kvstore.Store) -> None:
    weather = Weather(seeded("KVSTORE_WEATHER_SEED").randrange(1 << 30), FaultRates(stale=0.0))
    storage = Storage(
        FaultyBlob(MemoryBlob(), weather), FaultyConsensus(MemoryConsensus(), weather)
    )
    collection = backup.Collection("faulty", storage=storage)
    pick = random.Random(5)
    with collection.follow(store, every=SOON) as follower:
        for _ in range(15):
            change(store, pick, 5)
            assert follower.wait_until(store.upper - 1, WAIT_S)
    backup.Collection("faulty", storage=storage).verify("contents", store)


ABSENT = FaultRates(refused=1.0, lost_reply=0.0, torn=0.0, delayed=0.0, stale=0.0)
LOSSY = FaultRates(refused=0.05, lost_reply=0.2, torn=0.1, delayed=0.2, stale=0.0)
CLEAR = FaultRates(refused=0.0, lost_reply=0.0, torn=0.0, delayed=0.0, stale=0.0)


@pytest.fixture
def fair_threads() -> Iterator[None]:
    """A thread that is never idle gives the interpreter up ten times as often as by default. Else a
    follower beside it gets a few of its steps done in a second, and rounds take minutes."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 10)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("fair_threads")
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_writer_at_full_speed_beside_a_bucket_that_is_absent_and_lossy_in_turn(
    store: kvstore.Store, rounds: int
) -> None:
    """At each moment the recovery point that is told can be restored, and the store keeps the
    history after it."""
    pick = seeded("KVSTORE_SEASONS_SEED")
    weather = Weather(pick.randrange(1 << 30), CLEAR)
    # Patience counts looks at its clock, so an absent bucket ends each attempt without a wait.
    patience = Patience(40, pause=lambda _: None, monotonic=itertools.count().__next__)
    place = Storage(MemoryBlob(patience=patience), MemoryConsensus())
    faulty = Storage(FaultyBlob(place.blob, weather), FaultyConsensus(place.consensus, weather))
    seen = backup.Collection("seasons", storage=place)

    def write_until(is_done: Callable[[FollowStatus], bool]) -> FollowStatus:
        while True:
            change(store, pick, 1)
            status = follower.status()
            follower.require()
            # The hold has moved before the follower tells its window, so GC may be ahead of that.
            assert store.since <= seen.upper
            if is_done(status):
                return status

    with (
        bounds(FOLLOW_PAUSE_S=0.001, FOLLOW_PAUSE_S_MAX=0.01),
        backup.Collection("seasons", storage=faulty).follow(store, every=SOON) as follower,
    ):
        for _ in range(rounds):
            for season in (CLEAR, ABSENT, LOSSY):
                weather.turn(season)
                last = follower.status()
                if season is ABSENT:
                    status = write_until(
                        lambda now, last=last: (
                            now.failures > last.failures + 1 and "refused" in now.last_error
                        )
                    )
                    assert status.behind_seconds > 0
                else:
                    status = write_until(lambda now, last=last: now.windows > last.windows + 1)
                assert seen.upper >= status.upper
                assert len(seen.list()) <= 40
        weather.turn(CLEAR)
        assert follower.wait_until(store.put(b"last", b"1"), WAIT_S)
    weather.calm()
    seen.verify("contents", store)
    assert seen.drill(seen.upper - 1, "contents", store).compared > 0
    assert weather.faults > 0


def test_a_follower_tells_the_recovery_point_before_the_bucket_answers(
    store: kvstore.Store,
) -> None:
    weather = Weather(1, CLEAR)
    patience = Patience(40, pause=lambda _: None, monotonic=itertools.count().__next__)
    place = Storage(MemoryBlob(patience=patience), MemoryConsensus())
    faulty = Storage(FaultyBlob(place.blob, weather), FaultyConsensus(place.consensus, weather))
    collection = backup.Collection("absent", storage=faulty)
    store.put(b"a", b"1")
    upper = collection.backup(store).upper
    store.put(b"a", b"2")
    weather.turn(ABSENT)
    with collection.follow(store, every=SOON) as follower:
        while not follower.status().failures:
            follower.require()
        status = follower.status()
        assert status.upper == upper
        failures = store.metrics()["kvstore_background_failures_total"]
        assert failures.values["backup",] >= 1
        assert 0 < status.behind_seconds < WAIT_S
        weather.turn(CLEAR)
        assert follower.wait_until(store.put(b"a", b"3"), WAIT_S)


@pytest.mark.parametrize("is_synced", [False, True], ids=["closed", "synced"])
def test_a_follower_of_an_unchanged_store_is_not_behind_before_the_bucket_answers(
    tmp_path: Path, is_synced: bool
) -> None:
    weather = Weather(1, CLEAR)
    patience = Patience(40, pause=lambda _: None, monotonic=itertools.count().__next__)
    place = Storage(MemoryBlob(patience=patience), MemoryConsensus())
    faulty = Storage(FaultyBlob(place.blob, weather), FaultyConsensus(place.consensus, weather))
    collection = backup.Collection("absent", storage=faulty)
    with kvstore.open(tmp_path / "unchanged") as store:
        with collection.follow(store, every=SOON) as follower:
            assert follower.wait_until(store.put(b"a", b"1"), WAIT_S)
        if is_synced:
            store.sync()
    weather.turn(ABSENT)
    with (
        kvstore.open(tmp_path / "unchanged") as store,
        collection.follow(store, every=SOON) as follower,
    ):
        while not follower.status().failures:
            follower.require()
            pause()
        status = follower.status()
        assert (status.windows, status.behind_seconds) == (0, 0.0)
        store.put(b"a", b"2")
        assert follower.status().behind_seconds > 0


def test_a_follower_that_is_stopped_waits_for_no_bucket(store: kvstore.Store) -> None:
    weather = Weather(1, CLEAR)
    patience = Patience(1e9, pause=lambda _: pause(), monotonic=itertools.count().__next__)
    place = Storage(MemoryBlob(patience=patience), MemoryConsensus())
    faulty = Storage(FaultyBlob(place.blob, weather), FaultyConsensus(place.consensus, weather))
    collection = backup.Collection("absent", storage=faulty)
    with collection.follow(store, every=SOON) as follower:
        assert follower.wait_until(store.put(b"a", b"1"), WAIT_S)
        weather.turn(ABSENT)
        store.put(b"a", b"2")
        while not weather.faults:
            follower.require()
            pause()
    assert "refused" in follower.status().last_error
    weather.turn(CLEAR)
    with collection.follow(store, every=SOON) as follower:
        assert follower.wait_until(store.upper - 1, WAIT_S)
    collection.verify("contents", store)


def test_closing_a_follower_ends_its_pause_between_two_tries(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of a storage that nobody has given another one: here it lasts for days."""
    for name in ("_PAUSE_S_MIN", "_PAUSE_S_MAX"):
        monkeypatch.setattr(patience_module, name, 1e6)
    pauses, closed = threading.Event(), threading.Event()
    days = itertools.count(step=10_000_000)
    patience = Patience(1e12, tell=lambda _: pauses.set(), monotonic=days.__next__)
    place = Storage(MemoryBlob(patience=patience), MemoryConsensus())
    weather = Weather(1, CLEAR)
    faulty = Storage(FaultyBlob(place.blob, weather), FaultyConsensus(place.consensus, weather))
    collection = backup.Collection("absent", storage=faulty)
    store.put(b"a", b"1")
    weather.turn(ABSENT)
    follower = collection.follow(store, every=SOON)
    assert pauses.wait(WAIT_S)
    pause()

    def close() -> None:
        follower.close()
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert closed.wait(WAIT_S)
    assert "refused" in follower.status().last_error


def test_a_failure_that_does_not_pass_ends_the_follower_and_is_raised(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "other") as other:
        other.put(b"a", b"1")
        collection.backup(other)
    with (
        pytest.raises(UsageError, match="holds the backups of store"),
        collection.follow(store, every=SOON) as follower,
    ):
        follower.wait_until(store.put(b"a", b"1"), WAIT_S)
    with pytest.raises(UsageError):
        collection.follow(store, every=timedelta(seconds=-1))


def test_a_follower_that_is_killed_goes_on_where_it_stood(tmp_path: Path, spawn: Any) -> None:
    pick = seeded("KVSTORE_FOLLOW_SEED")
    for _ in range(3):
        receiver, sender = spawn.Pipe(duplex=False)
        child = spawn.Process(
            target=follow_until_killed, args=(tmp_path, pick.randrange(1 << 30), sender)
        )
        child.start()
        sender.close()
        for _ in range(pick.randrange(1, 12)):
            assert receiver.poll(WAIT_S)
            upper = receiver.recv()
        receiver.poll(pick.random() / 50)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        collection = backup.Collection(tmp_path / "collection")
        assert collection.upper >= upper
    with kvstore.open(tmp_path / "store") as store:
        with collection.follow(store, every=SOON) as follower:
            assert follower.wait_until(store.put(b"last", b"1"), WAIT_S)
        collection.verify("contents", store)
        assert collection.scrub().is_sound
        assert len(store.holds.all()) == 1


def test_a_script_follows_a_store_that_another_process_has_open(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.close()
    with (
        kvstore.open(tmp_path / "store", control=True) as owner,
        kvstore.connect(tmp_path / "store") as client,
        collection.follow(client, every=SOON) as follower,
    ):
        for number in range(3):
            at = owner.put(b"k%d" % number, b"v")
            assert follower.wait_until(at, WAIT_S)
        windows = follower.status().windows
        assert follower.wait_until(owner.sync() - 1, WAIT_S)
        assert follower.status().windows == windows
        collection.verify("contents", owner)


def test_a_script_follows_a_store_over_the_end_of_its_owner(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    """An owner that ends while the follower waits for commits ends no follower."""
    store.close()
    with ExitStack() as owning, bounds(FOLLOW_PAUSE_S=0.001, FOLLOW_PAUSE_S_MAX=0.01):
        owner = owning.enter_context(kvstore.open(tmp_path / "store", control=True))
        client = kvstore.connect(tmp_path / "store", patience=0)
        with client, collection.follow(client, every=SOON) as follower:
            at = owner.put(b"before", b"v")
            assert follower.wait_until(at, WAIT_S)
            owning.close()
            # The first failure may be a connection that the owner ended in the middle of a call.
            while "no process listens" not in (status := follower.status()).last_error:
                follower.require()
                pause()
            assert status.failures
            assert status.upper > at
            assert status.behind_seconds > 0
            owner = owning.enter_context(kvstore.open(tmp_path / "store", control=True))
            assert follower.wait_until(owner.put(b"after", b"v"), WAIT_S)
        collection.verify("contents", owner)


def test_a_follower_that_ends_by_itself_is_told_in_the_log(
    store: kvstore.Store, collection: backup.Collection, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: backup.BackupInfo) -> None:
        raise RuntimeError("no more of this")

    store.put(b"a", b"1")
    follower = collection.follow(store, progress=refuse)
    follower.wait()
    assert follower.status().last_error == "RuntimeError: no more of this"
    with pytest.raises(RuntimeError):
        follower.require()
    assert f"a follower has ended (the recovery point is {collection.upper})" in caplog.text


def test_a_follower_of_long_intervals_backs_up_once(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    at = store.put(b"a", b"1")
    with collection.follow(store, timedelta.max, max_age=timedelta.max) as follower:
        assert follower.wait_until(at, WAIT_S)
    assert follower.status().failures == 0
    assert store.path is not None
    store.close()
    kvstore.open(store.path).close()


def test_progress_may_close_the_follower(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    made: Queue[backup.Follower] = Queue()
    store.put(b"a", b"1")
    with collection.follow(store, progress=lambda _: made.get().close()) as follower:
        made.put(follower)
        follower.wait()
    assert follower.status().last_error == ""


def test_a_path_is_no_store(store: kvstore.Store, collection: backup.Collection) -> None:
    given: Any = str(store.path)
    for call in (collection.follow, collection.backup):
        with pytest.raises(UsageError, match="a Store or a Client is needed, not str"):
            call(given)


def test_a_forked_child_leaves_the_block_of_a_follower(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    parent, status = os.getpid(), 1
    try:
        with collection.follow(store, every=SOON):
            child = os.fork()
        status = STATUS
    finally:
        if os.getpid() != parent:
            os._exit(status)
    assert reap(child) == STATUS
