"""Collections: windows join, tokens are honoured, scripts take turns."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.backup.rows import exported
from kvstore.errors import (
    HistoryGoneError,
    LockedError,
    NotAStoreError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc import OpenWriteSet
from tests.backup.histories import (
    live_through,
    versions,
)
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_windows_join_without_gap_or_overlap(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    live_through(store, collection, tmp_path / "staging", seed=1)
    infos = collection.list()
    assert infos[0].lower == 0
    assert all(a.upper == b.lower for a, b in pairwise(infos))
    assert collection.upper == infos[-1].upper == store.upper
    assert sum(info.rows for info in infos) == len(versions(store, collection.upper - 1))


def test_an_import_built_before_a_backup_and_added_after_it_is_in_the_next_increment(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    staged = bulk.Import.create(tmp_path / "staging")
    with staged.writer() as writer:
        writer.put(b"b", b"2")
    staged.seal()
    full = collection.backup(store)
    stamp = bulk.ingest(store, tmp_path / "staging")
    increment = collection.backup(store)
    assert full.upper <= stamp < increment.upper
    assert increment.rows == 1


def test_an_idle_store_makes_empty_increments(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    first = collection.backup(store)
    second = collection.backup(store)
    assert (second.rows, second.parts) == (0, 0)
    assert second.lower == first.upper < second.upper


def test_the_source_holds_its_history_for_the_next_window(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    info = collection.backup(store)
    assert [hold.timestamp for hold in store.holds.all()] == [info.upper - 1]


def test_a_collection_takes_one_store(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    with (
        kvstore.open(tmp_path / "other") as other,
        pytest.raises(UsageError, match="holds the backups of store"),
    ):
        collection.backup(other)


def test_scripts_that_back_up_at_once_take_windows_that_join(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    """Each of many threads makes its own backups. No change is lost, and none comes twice."""
    failures: list[BaseException] = []

    def script(number: int) -> None:
        own = backup.Collection(collection.url)
        for turn in range(4):
            store.put(b"%d/%d" % (number, turn), b"v")
            try:
                own.backup(store)
            except LockedError:
                continue  # it lost every race, and appended nothing
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

    threads = [threading.Thread(target=script, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    collection.backup(store)
    infos = collection.list()
    assert all(a.upper == b.lower for a, b in pairwise(infos))
    assert sum(info.rows for info in infos) == 12
    collection.verify("contents", store)


def test_a_directory_of_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear all")
    with pytest.raises(NotAStoreError):
        backup.Collection(tmp_path)


def test_files_that_come_beside_a_collection_do_not_lock_it_up(
    store: kvstore.Store, tmp_path: Path
) -> None:
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    backup.Collection(tmp_path / "disk").backup(store)
    (tmp_path / "disk" / "README").write_text("what this disk is")
    store.put(b"later", b"1")
    assert backup.Collection(tmp_path / "disk").backup(store).rows == 1
    backup.Collection(tmp_path / "disk").restore(tmp_path / "restored")


def test_what_scan_batches_reads_is_fixed_by_the_call(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    first = store.put(b"k", b"1")
    store.put(b"k", b"2")
    collection.backup(store)
    then, newest = collection.scan_batches(first), collection.scan_batches()
    store.put(b"k", b"3")
    collection.backup(store)
    collection.expire(before=collection.upper - 1)
    assert then.read_all().to_pylist() == [{"key": b"k", "value": b"1"}]
    assert newest.read_all().to_pylist() == [{"key": b"k", "value": b"2"}]
    collection.expire(before=collection.upper - 1)  # the open reads have kept their parts until now
    with pytest.raises(HistoryGoneError):
        collection.scan_batches(first)
    with pytest.raises(NotYetWrittenError):
        collection.scan_batches(collection.upper)


def test_a_backup_made_again_with_its_token_is_done_once(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    first = collection.backup(store, token="monday")
    store.put(b"b", b"2")
    assert collection.backup(store, token="monday") == first
    assert collection.backup(store, token="tuesday").lower == first.upper
    assert len(collection.list()) == 2


@pytest.mark.parametrize("token", [5, b"monday", "mon\udcff", "mon\nday", "m" * 1001])
def test_a_token_that_the_state_could_not_tell_is_refused(
    store: kvstore.Store, collection: backup.Collection, token: Any
) -> None:
    """The number of a run is no text. Each later call would find the state damaged."""
    store.put(b"a", b"1")
    with pytest.raises(UsageError, match="token="):
        collection.backup(store, token=token)
    collection.backup(store, token="m" * 1000)
    assert len(collection.list()) == 1
    for call in (collection.backup, collection.follow):
        with pytest.raises(UsageError, match="max_age=5"):
            call(store, max_age=5)  # type: ignore[arg-type, operator]


def test_an_empty_token_is_refused_and_not_that_of_all_backups_without_one(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    with pytest.raises(UsageError, match="token is empty"):
        collection.backup(store, token="")


def test_what_was_never_backed_up_is_not_verified(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    with pytest.raises(UsageError, match="holds no backup"):
        collection.verify()
    with pytest.raises(UsageError, match="holds no backup"):
        collection.verify("contents", store)


def test_memory_collections_work_the_same(store: kvstore.Store, tmp_path: Path) -> None:
    name = f"memory://{store.store_id}"
    collection = backup.Collection(name)
    live_through(store, collection, tmp_path / "staging", seed=3)
    at = backup.Collection(name).restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert versions(restored, at) == versions(store, at)
    with pytest.raises(UsageError, match="ftp"):
        backup.Collection("ftp://somewhere")


def test_two_collections_on_one_place_take_turns(store: kvstore.Store, tmp_path: Path) -> None:
    """Each handle remembers a last state that the other handle has already replaced."""
    pair = [backup.Collection(tmp_path / "backups") for _ in range(2)]
    for number in range(10):
        store.put(b"k%d" % number, b"v")
        assert pair[number % 2].backup(store).rows == 1
    infos = pair[0].list()
    assert infos == pair[1].list()
    assert [a.upper for a in infos[:-1]] == [b.lower for b in infos[1:]]
    pair[0].compact()
    store.put(b"more", b"v")
    assert pair[1].backup(store).rows == 1
    assert len(pair[0].list()) == 2


def test_keys_that_begin_alike_are_sorted_whole(store: kvstore.Store, tmp_path: Path) -> None:
    """The keys include short keys, keys that end with zeros, and many keys with one first word."""
    keys = [b"prefix--%04d" % n for n in range(700, 0, -1)]
    keys += [
        b"a",
        b"a\0",
        b"a\0\0",
        b"",
        b"\0",
        b"\xff" * 8,
        b"\xff" * 7,
        b"abcdefgh",
        b"abcdefgh\0",
    ]
    collection = backup.Collection(tmp_path / "backups")
    collection.backup(store)
    with store.batch() as batch:
        for key in keys:
            batch.put(key, key)
    assert collection.backup(store).rows == len(keys)
    table = collection.scan_batches().read_all()
    assert table.column("key").to_pylist() == sorted(keys) == table.column("value").to_pylist()


@pytest.mark.usual_limits
def test_rows_of_many_chunks_are_backed_up_in_bounded_batches_and_restored(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deletions and repeated keys lie on both sides of where chunks and batches are cut."""
    monkeypatch.setattr("kvstore.backup.rows.ARROW_BYTES_MAX", 1 << 14)
    keys = [b"%05d" % number for number in range(2 * SCAN_CHUNK)]
    for value in (b"old" * 10, b"new" * 10):
        with store.batch() as batch:
            for key in keys:
                batch.put(key, value)
        for key in keys[::97]:
            store.delete(key, durability="async")
        written = store.now()
    upper = store.sync()
    batches = list(exported(store, since=None, upto=upper - 1).rows)
    assert max(rows.column("value").nbytes for rows in batches) < 1 << 15
    collection.backup(store)
    collection.verify("contents", store)
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.scan()) == list(store.scan(as_of=written))
        assert restored.history(keys[97]) == store.history(keys[97])


def test_a_glance_shows_the_keys_of_each_chain(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    assert collection.show().spans == []
    collection.backup(store)
    assert collection.show().spans == []
    store.put(b"b", b"1")
    store.delete_range(b"c", b"d")
    collection.backup(store)
    store.put(b"a" * 100, b"1")
    collection.backup(store)
    (span,) = collection.show().spans
    assert span.start <= b"a" * 100
    assert b"c" in span
    assert span.end is not None
    assert span.end <= b"d\0"
    writes = OpenWriteSet()
    writes.put(b"\xff" * 100, b"1")  # a key above all tables, which no public call writes
    parts_of(store).committer.commit(writes)
    collection.backup(store, full=True)
    assert [found.end for found in collection.show().spans] == [span.end, None]
