"""Two copies of a store have one id: a collection that has backed up both, and a replica that has
followed both, tell of lost commits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.backup import replica as replica_module
from kvstore.backup.replica import CollectionSource
from kvstore.errors import UsageError
from tests.backup.test_chains import state_of


def test_a_commit_that_the_backup_of_a_copy_passed_over_is_told(tmp_path: Path) -> None:
    collection = backup.Collection(tmp_path / "backups")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"k", b"1")
        store.checkpoint(tmp_path / "copy")
        collection.backup(store)
        passed = store.put(b"passed", b"2")
        with kvstore.open(tmp_path / "copy") as copy:
            assert collection.backup(copy).rows == 0
        for _ in range(2):
            with pytest.raises(UsageError, match="another copy of the store") as refused:
                collection.backup(store)
        assert str(passed) in str(refused.value)
        collection.backup(store, full=True)
        assert dict(store.scan()) == state_of(collection)
        store.put(b"k", b"3")
        assert collection.backup(store).rows == 1


WRITES: list[Callable[[kvstore.Store], object]] = [
    lambda s: s.delete_range(b"nothing", b"there"),
    lambda s: s.put_many({}),
    lambda s: s.hold("h"),
    lambda s: s.revert_range(b"a", b"b", to=s.upper - 1),
]


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_commits_without_rows_in_the_backup_are_not_missed(tmp_path: Path, number: int) -> None:
    collection = backup.Collection(tmp_path / "backups")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        collection.backup(store)
        store.put(b"b", b"2")
        WRITES[number](store)
        for _ in range(3):
            collection.backup(store)
        collection.compact()
        collection.backup(store)


def test_a_chain_that_gave_up_its_newest_commits_continues(tmp_path: Path) -> None:
    collection = backup.Collection(tmp_path / "backups")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        store.put(b"b", b"2")
        gone = store.delete(b"b")
        upper = collection.backup(store).upper
        collection.backup(store)
        collection.expire(before=upper - 1)
        collection.compact()
        batches = backup.Collection(tmp_path / "backups").list()
        assert sum(batch.rows for batch in batches) == 1, "the delete is still in the backups"
        assert store.replication.has_commit(gone), "the store has the commit, and the chain not"
        collection.backup(store)
        assert state_of(collection) == {b"a": b"1"}


def _copied_in_turn(path: Path) -> tuple[kvstore.Store, kvstore.Timestamp]:
    """A store whose replica has followed its checkpoint past a commit, and this commit."""
    store = kvstore.open(path / "store")
    store.put_many({b"%03d" % row: b"1" for row in range(100)})
    store.checkpoint(path / "copy")
    backup.replicate(store, path / "replica")
    passed = store.put(b"passed", b"2")
    with kvstore.open(path / "copy") as copy:
        backup.replicate(copy, path / "replica")
    return store, passed


def test_a_replica_that_followed_another_copy_past_a_commit_is_refused(tmp_path: Path) -> None:
    store, passed = _copied_in_turn(tmp_path)
    with store:
        for _ in range(2):
            with pytest.raises(UsageError, match="another copy of the store") as refused:
                backup.replicate(store, tmp_path / "replica")
            assert str(passed) in str(refused.value)
            store.put(b"later", b"3")
        backup.replicate(store, tmp_path / "whole")
        with kvstore.open_read_only(tmp_path / "whole") as replica:
            assert dict(replica.scan()) == dict(store.scan())


def test_a_replica_that_followed_another_copy_is_refused_by_the_backups(tmp_path: Path) -> None:
    store, passed = _copied_in_turn(tmp_path)
    collection = backup.Collection(tmp_path / "backups")
    with store:
        collection.backup(store)
        store.put(b"later", b"3")
        collection.backup(store)
    with pytest.raises(UsageError, match="another copy of the store") as refused:
        backup.replicate(collection, tmp_path / "replica")
    assert str(passed) in str(refused.value)


@pytest.mark.parametrize("number", range(len(WRITES)))
@pytest.mark.parametrize("is_large", [False, True])
def test_a_replica_of_one_copy_continues(
    tmp_path: Path, number: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(replica_module, "REPLICA_WINDOW_ROWS", 0)
    collection = backup.Collection(tmp_path / "backups")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        backup.replicate(store, tmp_path / "replica")
        for _ in range(2):
            store.put(b"b", b"2")
            WRITES[number](store)
            collection.backup(store)
            backup.replicate(store, tmp_path / "replica")
            backup.replicate(collection, tmp_path / "replica")
        with kvstore.open_read_only(tmp_path / "replica") as replica:
            assert dict(replica.scan()) == dict(store.scan())


def test_a_replica_that_gave_up_its_newest_commits_continues(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        store.put(b"b", b"1")
        store.delete(b"b")
        upper = backup.replicate(store, tmp_path / "replica")
        with kvstore.open(tmp_path / "replica") as replica:
            replica.gc(upper - 1)
        assert backup.replicate(store, tmp_path / "replica") > upper


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("is_backup", [False, True])
def test_a_source_that_was_put_back_behind_files_of_its_replica_is_refused(
    tmp_path: Path, is_large: bool, is_backup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change index of the replica has no commit of such a window."""
    collection = backup.Collection(tmp_path / "backups")

    def replicate(store: kvstore.Store) -> None:
        if is_backup:
            collection.backup(store, full=True)
        backup.replicate(collection if is_backup else store, tmp_path / "replica")

    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        if is_large:
            replicate(store)
            monkeypatch.setattr(replica_module, "REPLICA_WINDOW_ROWS", 0)
        store.checkpoint(tmp_path / "copy")
        lost = store.put(b"b", b"lost")
        replicate(store)
    with kvstore.open(tmp_path / "copy") as copy:
        copy.put(b"c", b"new")
        with pytest.raises(UsageError, match="put back") as refused:
            replicate(copy)
        assert str(lost) in str(refused.value)


@pytest.mark.parametrize("is_copy", [False, True])
def test_another_collection_that_comes_to_the_place_of_a_followed_one_is_refused(
    tmp_path: Path, is_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = partial(CollectionSource, poll_seconds=0.01)
    monkeypatch.setattr(replica_module, "CollectionSource", often)
    collection = backup.Collection(tmp_path / "backups")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        store.checkpoint(tmp_path / "copy")
        collection.backup(store)
    backup.replicate(collection, tmp_path / "replica")
    stop, told = backup.Stop(), []
    with kvstore.open(tmp_path / ("copy" if is_copy else "other")) as other:
        other.put(b"passed", b"2")
        with kvstore.open(tmp_path / "store") as store:
            store.put(b"b", b"3")
            collection.backup(store)

        def replace(upper: kvstore.Timestamp) -> None:
            told.append(upper)
            if len(told) > 1:
                stop.set()
            elif not is_copy:
                (tmp_path / "backups").rename(tmp_path / "moved")
            backup.Collection(tmp_path / "backups").backup(other, full=True)

        with kvstore.open(tmp_path / "replica") as replica:
            match = "another copy" if is_copy else "follows store"
            with pytest.raises(UsageError, match=match):
                backup.replicate(collection, replica, True, stop=stop, progress=replace)
            assert dict(replica.scan()) == {b"a": b"1", b"b": b"3"}
