"""Holds that backups and replicas take on their source: named, and released at an early failure.

Each step fails in turn, by an error and by an interrupt. A hold that existed before stays, because
the next window needs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import backup
from kvstore.backup import replica, window
from kvstore.backup.replica import StoreSource
from kvstore.backup.shard.shard import Shard
from kvstore.errors import HistoryGoneError, KVStoreError, StorageError
from kvstore.storage.address import public_address

ERRORS = [StorageError("the storage is gone"), KeyboardInterrupt()]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# -- backups ----------------------------------------------------------------------------------

BACKUP_STEPS = {
    "sync": (kvstore.Store, "sync"),
    "find": (window, "find"),
    "looking for commits": (window, "_require_commits"),
    "upload": (Shard, "write_batch"),
    "retention": (Shard, "critical"),
}


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
@pytest.mark.parametrize("step", BACKUP_STEPS)
def test_a_first_backup_that_fails_early_holds_nothing(
    store: kvstore.Store,
    collection: backup.Collection,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
) -> None:
    store.put(b"k", b"v")
    owner, name = BACKUP_STEPS[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(error))
        with pytest.raises(type(error)):
            collection.backup(store)
    assert store.holds.all() == []
    assert not store.gc(before=store.upper - 1).held_back
    collection.backup(store)
    assert [record.kind for record in store.holds.all()] == ["backup"]


@pytest.mark.parametrize("step", BACKUP_STEPS)
def test_an_increment_that_fails_keeps_the_hold_of_its_window(
    store: kvstore.Store, collection: backup.Collection, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store.put(b"k", b"v")
    collection.backup(store)
    store.put(b"k", b"w")
    owner, name = BACKUP_STEPS[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(ERRORS[0]))
        try:
            collection.backup(store)
        except StorageError:
            pass
        else:
            assert step == "retention"  # which increments do not touch
    assert [record.kind for record in store.holds.all()] == ["backup"]
    store.gc(before=store.upper - 1)
    collection.backup(store)
    assert len(collection.list()) >= 2


def test_what_was_recorded_of_a_first_backup_keeps_its_hold(
    store: kvstore.Store, collection: backup.Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.backup.shard.rows import batch_writer

    monkeypatch.setattr(batch_writer, "PART_BYTES_MAX", 2_000)
    monkeypatch.setattr(batch_writer, "ROW_GROUP_ROWS_MAX", 20)
    for number in range(500):
        store.put(b"%05d" % number, b"v" * 50)
    parts = 0

    def stop(rows: int) -> None:
        nonlocal parts
        parts += 1
        if rows > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collection.backup(store, progress=stop)
    assert len(store.holds.all()) == 1
    before = store.upper
    collection.backup(store)
    first = collection.list()[0]
    assert first.upper <= before  # the recorded hold was taken


def test_a_collection_that_cannot_be_reached_leaves_no_hold(
    store: kvstore.Store, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KVStoreError):
        backup.Collection(tmp_path / "file" / "collection").backup(store)
    assert store.holds.all() == []


def test_the_hold_of_a_collection_that_was_removed_is_named_and_can_be_dropped(
    store: kvstore.Store, tmp_path: Path
) -> None:
    at = store.put(b"k", b"1")
    place = tmp_path / "collection"
    backup.Collection(place).backup(store)
    shutil.rmtree(place)
    target = store.put(b"k", b"2")
    report = store.gc(before=target)
    (claim,) = report.held_by
    assert (report.held_back, claim.kind, claim.address) == (True, "backup", str(place))
    assert at <= claim.timestamp < target
    assert "kept for ever" in claim.describe(store.now())
    store.drop_hold(claim.name)
    done = store.gc(before=target)
    assert (done.held_back, done.since) == (False, target)


def test_dropping_the_hold_of_a_live_collection_costs_what_is_said(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"k", b"1")
    collection.backup(store)
    (record,) = store.holds.all()
    dropped = store.drop_hold(record.name)
    assert "full=True" in dropped.cost_of_dropping
    store.put(b"k", b"2")
    store.gc(before=store.now())
    with pytest.raises(HistoryGoneError, match="full=True"):
        collection.backup(store)
    collection.backup(store, full=True)
    assert len(collection.chains()) == 2


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/path?token=secret#secret", "s3://"),
        ("memory://name", "memory://name"),
        ("file:///a/b", "file:///a/b"),
        ("http://[broken", "http://[broken"),
        ("", ""),
    ],
)
def test_an_address_is_shown_without_secrets(url: str, shown: str) -> None:
    assert public_address(url) == shown
    assert "secret" not in public_address(url)


def test_a_path_is_shown_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert public_address("collection") == str(tmp_path / "collection")


# -- replicas ---------------------------------------------------------------------------------

REPLICA_STEPS = {
    "sync": (StoreSource, "upper"),
    "building": (replica, "restore_store"),
    "reading": (replica, "built_from"),
}


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
@pytest.mark.parametrize("step", REPLICA_STEPS)
def test_a_first_copy_that_fails_holds_nothing(
    store: kvstore.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
) -> None:
    store.put(b"k", b"v")
    owner, name = REPLICA_STEPS[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(error))
        with pytest.raises(type(error)):
            backup.replicate(store, tmp_path / "standby")
    assert store.holds.all() == []
    backup.replicate(store, tmp_path / "standby")
    (record,) = store.holds.all()
    assert (record.kind, record.address) == ("replica", str(tmp_path / "standby"))


def test_a_replica_into_a_place_that_is_none_leaves_no_hold(
    store: kvstore.Store, tmp_path: Path
) -> None:
    """The command once ended with exit code 2 and left a durable hold."""
    store.put(b"k", b"v")
    (tmp_path / "file").write_bytes(b"")
    for target in ("file", "file/standby"):
        with pytest.raises(KVStoreError):
            backup.replicate(store, tmp_path / target)
        assert store.holds.all() == []


def test_a_replica_that_lags_keeps_its_hold_where_a_window_fails(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"k", b"v")
    backup.replicate(store, tmp_path / "standby", max_age=timedelta(days=1))
    store.put(b"k", b"w")
    with monkeypatch.context() as patch:
        patch.setattr(replica, "head_of", raising(ERRORS[0]))
        with pytest.raises(StorageError):
            backup.replicate(store, tmp_path / "standby")
    assert len(store.holds.all()) == 1
    store.gc(before=store.upper - 1)
    backup.replicate(store, tmp_path / "standby")
