"""Replicas refuse writes until promoted, and follow the history of one source only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.backup import replica as replication
from kvstore.errors import ConflictError, UsageError
from kvstore.feeds.replica import Replica
from tests.backup.histories import change, same, staged_import, versions

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_a_replica_refuses_writes_and_does_not_follow_the_clock_until_promoted(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    staged_import(tmp_path / "staging")
    with kvstore.open(standby) as replica:
        upper = replica.upper
        assert replica.replication.is_replica
        for write in (
            lambda: replica.put(b"a", b"2"),
            lambda: replica.delete_range(b"a", b"b"),
            lambda: replica.put_if(b"a", b"2", b"1"),
            lambda: replica.reshard(4),
            lambda: replica.clear_range(b"a", b"b"),
            lambda: bulk.ingest(replica, tmp_path / "staging"),
        ):
            with pytest.raises(UsageError, match="replica"):
                write()
        with pytest.raises(UsageError, match="replica"), replica.transaction() as txn:
            txn.put(b"a", b"2")
        assert replica.sync() == replica.upper == upper
        assert replica.imports.all() == []
        promoted = replica.replication.promote()
        assert promoted == upper
        assert not replica.replication.is_replica
        assert replica.put(b"a", b"2") >= upper
        assert replica.get(b"a", as_of=upper - 1) == b"1"
        with pytest.raises(UsageError, match="no replica"):
            backup.replicate(store, replica)
    with kvstore.open(standby) as promoted_store:
        assert promoted_store.get(b"a") == b"2"
        promoted_store.put(b"a", b"3")
        assert promoted_store.verify().problems == ()


def test_a_promoted_replica_commits_above_a_source_whose_clock_was_ahead(
    tmp_path: Path, standby: Path
) -> None:
    ahead = kvstore.ManualClock(2_000_000_000_000_000_000)
    with kvstore.open(tmp_path / "ahead", clock=ahead) as store:
        at = store.put(b"a", b"1")
        backup.replicate(store, standby)
    with kvstore.open(standby, clock=kvstore.ManualClock(1_000)) as replica:
        replica.replication.promote()
        assert replica.put(b"a", b"2") > at
        assert replica.get(b"a") == b"2"


def test_a_window_that_was_half_taken_is_removed_by_promotion_and_finished_by_a_retry(
    store: kvstore.Store, standby: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(store, random.Random(5), 30)
    backup.replicate(store, standby)
    change(store, random.Random(6), 60)
    monkeypatch.setattr(replication, "REPLICA_WINDOW_ROWS", 5)

    def lost(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "_end_window", lost)
        with pytest.raises(KeyboardInterrupt):
            backup.replicate(store, standby)
    with kvstore.open_read_only(standby) as reader:
        reader.verify().require_ok()
    with kvstore.open(standby) as replica:
        replica.verify().require_ok()  # the rows of a window that is not complete are no damage
        replica.checkpoint(standby.with_name("copy"))
    with kvstore.open(standby.with_name("copy")) as other:
        upto = other.replication.promote() - 1
        other.put(b"later", b"v")
        assert versions(other, upto) == versions(store, upto)
        assert len(versions(other, other.upper - 1)) == len(versions(other, upto)) + 1
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        same(store, replica)


def test_a_store_is_no_replica_of_itself(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store, pytest.raises(UsageError, match="itself"):
        backup.replicate(store, tmp_path / "store")


def test_a_replica_follows_one_store_only(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    backup.replicate(store, standby)
    with kvstore.open(tmp_path / "other") as other:
        with pytest.raises(UsageError, match="follows store"):
            backup.replicate(other, standby)
        with pytest.raises(UsageError, match="no replica"):
            backup.replicate(store, other)


def test_a_replica_does_not_follow_a_source_put_back_from_an_older_copy(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    older = tmp_path / "older"
    store.checkpoint(older)
    store.put(b"a", b"lost")
    backup.replicate(store, standby)
    store.close()
    with kvstore.open(older) as back:
        back.put(b"b", b"2")
        with pytest.raises(UsageError, match=r"older copy.*promote"):
            backup.replicate(back, standby)
    with kvstore.open(standby) as replica:
        assert replica.get(b"a") == b"lost"


def test_a_replica_does_not_follow_a_chain_begun_by_a_source_put_back(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection")
    store.put(b"a", b"1")
    collection.backup(store)
    backup.replicate(collection, standby)
    older = tmp_path / "older"
    store.checkpoint(older)
    store.put(b"a", b"lost")
    collection.backup(store)
    backup.replicate(collection, standby)
    store.close()
    with kvstore.open(older) as back:
        back.put(b"b", b"2")
        collection.backup(back, full=True)
    with pytest.raises(UsageError, match=r"older copy.*promote"):
        backup.replicate(collection, standby)
    with kvstore.open(standby) as replica:
        assert replica.get(b"a") == b"lost"
        assert replica.get(b"b") is None


def test_a_replica_follows_a_chain_begun_anew_by_the_source_that_it_knows(
    store: kvstore.Store, standby: Path, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection")
    for number in range(3):
        store.put(b"a", b"%d" % number)
        collection.backup(store)
        backup.replicate(collection, standby)
    for number in range(3):
        store.put(b"b", b"%d" % number)
        store.delete(b"a")
        collection.backup(store, full=True)
        collection.compact()
        backup.replicate(collection, standby)
    with kvstore.open(standby) as replica:
        same(store, replica)


@pytest.mark.parametrize("rows_max", [1 << 17, -1], ids=["by commits", "by files"])
def test_a_transaction_over_a_promotion_hears_what_the_replica_took(
    store: kvstore.Store, standby: Path, monkeypatch: pytest.MonkeyPatch, rows_max: int
) -> None:
    monkeypatch.setattr("kvstore.backup.replica.REPLICA_WINDOW_ROWS", rows_max)
    store.put(b"a", b"1")
    backup.replicate(store, standby)
    with kvstore.open(standby) as replica:
        txn = replica.transaction()
        assert txn.get(b"a") == b"1"
        store.put(b"a", b"2")
        backup.replicate(store, replica)
        replica.replication.promote()
        txn.put(b"b", b"of 1")
        with pytest.raises(ConflictError):
            txn.commit()
