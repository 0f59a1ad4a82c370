"""Two copies of a store have one id: a collection that has backed up both tells of lost commits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import backup
import kvstore
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
