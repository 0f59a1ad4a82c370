"""Replicas equal their source version for version, and readers of a replica see each applied
window."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.backup import replica as replication
from kvstore.errors import HistoryGoneError, HoldLostError, UsageError
from kvstore.limits import CHANGE_CHUNK_BYTES, INLINE_VALUE_BYTES
from kvstore.mvcc import WriteSet
from tests.backup.histories import change, same, staged_import, versions
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


@pytest.mark.parametrize("rows_max", [1 << 17, 25], ids=["commits", "files"])
def test_a_standby_equals_its_source_version_for_version_at_every_step(
    store: kvstore.Store,
    standby: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_max: int,
) -> None:
    monkeypatch.setattr(replication, "REPLICA_WINDOW_ROWS", rows_max)
    monkeypatch.setattr(replication, "REPLICA_BATCH_ROWS", 10)
    pick = random.Random(rows_max)
    staged = staged_import(tmp_path / "staging")
    for window in range(7):
        change(store, pick, pick.randrange(40))
        if window == 2:
            bulk.ingest(store, tmp_path / "staging")
        if window == 4:
            store.revert_import(staged.import_id)
        upper = backup.replicate(store, standby)
        assert upper == store.upper
        with kvstore.open(standby) as replica:
            assert replica.upper == upper
            same(store, replica)


@pytest.mark.usual_limits
def test_changes_of_a_standby_come_from_its_own_index(store: kvstore.Store, standby: Path) -> None:
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica, replica.feed("f", start="now") as feed:
        change(store, random.Random(1), 50)
        since = replica.upper - 1
        backup.replicate(store, replica)
        expected = list(store.changes(since, replica.upper - 1, order="time"))
        assert list(replica.changes(since, order="time")) == expected
        rows = [event.key for batch in feed for event in batch.events]
        assert len(rows) == len(expected)


@pytest.mark.usual_limits
def test_a_large_commit_is_cut_into_the_same_entries_as_in_its_source(
    store: kvstore.Store, standby: Path
) -> None:
    backup.replicate(store, standby)
    value = bytes(INLINE_VALUE_BYTES)
    with store.batch() as batch:
        for number in range(CHANGE_CHUNK_BYTES // len(value) + 100):
            batch.put(b"%06d" % number, value)
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        entries = [
            [
                (commit.timestamp, commit.chunk, commit.entry.count)
                for commit in parts_of(each).index.read(since=batch.timestamp - 1, upto=store.upper)
            ]
            for each in (store, replica)
        ]
    assert len(entries[0]) == 2
    assert entries[1] == entries[0]


def test_a_standby_follows_commits_as_they_come(store: kvstore.Store, standby: Path) -> None:
    backup.replicate(store, standby)
    stop = backup.Stop()
    with kvstore.open(standby) as replica:
        follower = threading.Thread(
            target=backup.replicate, args=(store, replica, True), kwargs={"stop": stop}
        )
        follower.start()
        pick = random.Random(2)
        for _ in range(5):
            change(store, pick, 10)
            at = store.put(b"last", b"v")
            replica.wait_beyond(at, timeout=120)
            assert replica.get(b"last", as_of=at) == b"v"
            same(store, replica)
        stop.set()
        follower.join(120)
        assert not follower.is_alive()


def test_a_standby_follows_a_collection_and_then_the_store_itself(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection")
    with pytest.raises(UsageError, match="no backup"):
        backup.replicate(collection, standby)
    pick = random.Random(3)
    for _ in range(3):
        change(store, pick, 30)
        collection.backup(store)
        assert backup.replicate(str(tmp_path / "collection"), standby) == collection.upper
        with kvstore.open(standby) as replica:
            same(store, replica)
        collection.compact()
    change(store, pick, 30)
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        same(store, replica)


def test_a_collection_whose_first_backup_has_not_ended_makes_no_replica(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    store.put(b"k", b"v")
    with pytest.raises(UsageError, match="holds no backup"):
        backup.replicate(collection, standby)
    with pytest.raises(KeyboardInterrupt):
        collection.backup(store, upload=killed)  # type: ignore[arg-type]  # it returns nothing
    with pytest.raises(UsageError, match="holds no backup"):
        backup.replicate(collection, standby)
    assert not standby.exists()
    collection.backup(store)
    assert backup.replicate(collection, standby) == collection.upper


def test_the_source_keeps_what_its_replica_lacks_within_its_budget(
    store: kvstore.Store, standby: Path
) -> None:
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    upto = store.upper - 1
    change(store, random.Random(7), 30)
    store.gc(before=store.upper - 1)
    assert store.since <= upto
    backup.replicate(store, standby, max_age=timedelta(microseconds=1))
    with kvstore.open(standby) as replica:
        same(store, replica)
    change(store, random.Random(8), 30)
    store.sync()
    store.gc(before=store.upper - 1)
    with pytest.raises((HistoryGoneError, HoldLostError)):
        backup.replicate(store, standby)


def test_a_replica_that_lags_behind_an_expired_collection_is_told_the_times(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "backups")
    store.put(b"a", b"1")
    lagging = kvstore.Timestamp(collection.backup(store).upper - 1)
    backup.replicate(collection, standby)
    store.put(b"a", b"2")
    since = kvstore.Timestamp(collection.backup(store).upper - 1)
    collection.expire(before=since)
    with pytest.raises(HistoryGoneError, match="this one lags") as refused:
        backup.replicate(collection, standby)
    assert str(refused.value).startswith(f"history at {lagging} is gone: it is kept from {since} ")


@pytest.mark.parametrize("rows_max", [1 << 17, 5], ids=["commits", "files"])
def test_a_replica_collects_its_own_garbage(
    store: kvstore.Store, standby: Path, monkeypatch: pytest.MonkeyPatch, rows_max: int
) -> None:
    monkeypatch.setattr(replication, "REPLICA_WINDOW_ROWS", rows_max)
    pick = random.Random(10)
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        for _ in range(3):
            change(store, pick, 60)
            backup.replicate(store, replica)
            replica.gc(before=replica.upper - 1)
            assert replica.since == replica.upper - 1
            assert list(replica.scan()) == list(store.scan(as_of=replica.since))
            assert replica.verify().problems == ()


def test_applied_windows_must_follow_each_other(store: kvstore.Store, standby: Path) -> None:
    backup.replicate(store, standby)
    with kvstore.open(standby) as opened:
        replica = opened.replication.replica()
        upper = int(replica.upper)
        writes = WriteSet()
        writes.put(b"a", b"1")
        for commits, to in (
            ([(upper - 1, writes)], upper + 1),
            ([(upper + 1, writes)], upper + 1),
            ([(upper + 1, writes), (upper, writes)], upper + 5),
            ([], upper - 1),
        ):
            with pytest.raises(UsageError, match="do not follow"):
                replica.apply(commits, to)
        replica.apply([(upper, writes)], upper + 10)
        assert opened.get(b"a", as_of=upper) == b"1"
        assert opened.upper == upper + 10


CHILD = """
import random, sys, threading
import kvstore
from kvstore import backup
from kvstore.backup import replica
from tests.backup.histories import change

place, seed, rows_max = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
replica.REPLICA_WINDOW_ROWS = rows_max
store = kvstore.open(place + "/store", durability="async")

def work():
    pick = random.Random(seed)
    while True:
        change(store, pick, 20)
        print("changed", flush=True)

threading.Thread(target=work, daemon=True).start()
backup.replicate(store, place + "/standby", follow=True)
"""


def test_a_killed_replicator_goes_on_where_its_replica_stands(tmp_path: Path) -> None:
    pick = random.Random(9)
    for generation in range(4):
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CHILD,
                str(tmp_path),
                str(generation),
                ["131072", "30"][generation % 2],
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert child.stdout is not None
        for _ in range(pick.randrange(2, 12)):
            assert child.stdout.readline(), "the child ended by itself"
        child.send_signal(signal.SIGKILL)
        child.stdout.read()
        assert child.wait() == -signal.SIGKILL
        with kvstore.open(tmp_path / "store", durability="async") as store:
            if (tmp_path / "standby").exists():
                with kvstore.open(tmp_path / "standby") as replica:
                    upto = replica.upper - 1
                    kept = versions(replica, upto)
                    assert kept == versions(store, upto)
            backup.replicate(store, tmp_path / "standby")
            with kvstore.open(tmp_path / "standby") as replica:
                assert replica.upper == store.upper
                same(store, replica)


def test_a_feed_of_a_replica_that_took_files_is_refused_and_skips_nothing(
    store: kvstore.Store, standby: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change index has no entries of such a window, and begins anew above it."""
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        feed = replica.feed("f", start="now")
        following = replica.feeds.follow(replica.upper - 1, heartbeat=0.001)
        store.put(b"b", b"2")
        backup.replicate(store, replica)
        for batches in (feed.batches(), following):
            assert [event.key for event in next(batches).events] == [b"b"]
        monkeypatch.setattr("kvstore.backup.replica.REPLICA_WINDOW_ROWS", -1)
        store.put(b"c", b"3")
        backup.replicate(store, replica)
        for batches in (feed.batches(), following):
            with pytest.raises(HistoryGoneError, match="take a scan"):
                next(batches)
        again = replica.feed("f", start="now")
        monkeypatch.undo()
        store.put(b"d", b"4")
        backup.replicate(store, replica)
        assert [event.key for batch in again for event in batch.events] == [b"d"]


def test_who_sees_files_that_a_replica_took_does_not_look_for_them_in_its_index(
    store: kvstore.Store, standby: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        since = replica.upper - 1
        monkeypatch.setattr("kvstore.backup.replica.REPLICA_WINDOW_ROWS", -1)
        store.put(b"b", b"2")
        seen: list[list[bytes]] = []
        sync = parts_of(replica).committer.syncs.sync

        def reading() -> None:
            seen.append([change.key for change in replica.changes(since)])
            sync()

        monkeypatch.setattr(parts_of(replica).committer.syncs, "sync", reading)
        backup.replicate(store, replica)
        monkeypatch.undo()
        assert seen[0] == [b"b"]


def test_a_follower_of_a_replica_hears_heartbeats(store: kvstore.Store, standby: Path) -> None:
    """This holds although the time of a replica stands still while its source is away."""
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        following = replica.feeds.follow(replica.upper - 1, heartbeat=0.001)
        assert [(next(following).events, next(following).resolved) for _ in range(2)] == [
            ([], replica.upper - 1)
        ] * 2
