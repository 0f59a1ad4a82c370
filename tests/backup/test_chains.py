"""Chains: a broken chain is an error, and a chain that another script began or took over is
continued."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.backup.rows import exported
from kvstore.backup.shard import BatchDesc, Shard
from kvstore.backup.window import Attempt, Uploaded, upload_here
from kvstore.base.meters import OnProgress
from kvstore.errors import FencedError, HistoryGoneError, UsageError
from kvstore.limits import INLINE_VALUE_BYTES
from tests.backup.histories import Crash, live_through, upload_and_be_killed

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def state_of(collection: backup.Collection, as_of: int | None = None) -> dict[bytes, bytes]:
    rows = collection.scan_batches(as_of).read_all()
    return dict(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def test_a_first_backup_takes_no_instant_from_another_that_was_faster(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    """Both write the first window of a chain. GC comes between, so the later one has less."""
    store.put(b"k", b"first")
    slow_has_read, fast_is_done = threading.Event(), threading.Event()
    told: list[HistoryGoneError] = []

    def fast(*window: Any) -> Any:
        found = upload_here(*window)
        for hold in store.holds.all():
            store.holds.drop(hold.name)
        store.put(b"k", b"second")
        store.gc(before=store.sync() - 1)
        other.start()
        slow_has_read.wait()
        return found

    def slow(*window: Any) -> Any:
        found = upload_here(*window)
        slow_has_read.set()
        fast_is_done.wait()
        return found

    def back_up_slowly() -> None:
        with pytest.raises(HistoryGoneError, match="the chain is broken") as error:
            collection.backup(store, upload=slow)  # type: ignore[arg-type]  # it names no argument
        told.append(error.value)

    other = threading.Thread(target=back_up_slowly)
    first = collection.backup(store, upload=fast)  # type: ignore[arg-type]  # it names no argument
    fast_is_done.set()
    other.join()
    assert collection.verify().backups == 1
    newest = first.upper - 1
    assert [error.as_of for error in told] == [newest]
    assert state_of(collection, kvstore.Timestamp(newest)) == {b"k": b"first"}


def test_a_broken_chain_says_so_and_a_new_full_keeps_the_old_window(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=12)
    for hold in store.holds.all():
        store.holds.drop(hold.name)
    store.put(b"k00", b"after")
    store.gc(before=store.sync() - 1)
    with pytest.raises(
        HistoryGoneError, match=r"history at \d{4}-.* kept from \d{4}-.* on; .*full=True"
    ):
        collection.backup(store)
    store.put(b"k01", b"later")
    info = collection.backup(store, full=True)
    assert info.lower == 0
    assert collection.show().chains == 2
    collection.restore(tmp_path / "old", as_of=instants[50])
    with kvstore.open(tmp_path / "old") as restored:
        assert dict(restored.scan())
    at = collection.restore(tmp_path / "new")
    with kvstore.open(tmp_path / "new") as restored:
        assert dict(restored.scan()) == dict(store.scan(as_of=at))
    collection.expire(before=collection.upper - 1)
    assert collection.show().chains == 1


def test_a_clear_of_what_was_not_backed_up_breaks_the_chain(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    store.put(b"b", bytes(INLINE_VALUE_BYTES + 1))
    for hold in store.holds.all():
        store.holds.drop(hold.name)
    store.clear_range(b"b", b"c")
    with pytest.raises(HistoryGoneError, match="full=True"):
        collection.backup(store)
    collection.backup(store, full=True)
    assert state_of(collection) == {b"a": b"1"}


@pytest.mark.parametrize("idle_since", [False, True])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_source_put_back_from_an_older_copy_is_told_from_itself(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    idle_since: bool,
    compacted: bool,
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    older = tmp_path / "older"
    store.checkpoint(older)
    store.put(b"a", b"lost")
    upto = collection.backup(store).upper - 1
    if idle_since:
        collection.backup(store)
    if compacted:
        collection.compact()
    store.close()
    with kvstore.open(older) as back:
        back.put(b"b", b"2")
        for _ in range(2):
            with pytest.raises(UsageError, match=r"older copy.*full=True"):
                collection.backup(back)
            back.gc(before=back.sync() - 1)  # a hold keeps the history that the copy knew of
        assert state_of(collection, upto) == {b"a": b"lost"}
        collection.backup(back, full=True)
        back.put(b"c", b"3")
        collection.backup(back)
        assert state_of(collection) == dict(back.scan())


def test_a_store_knows_all_its_commits_until_gc_has_passed_them(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    """Commits of every kind, in any number of streams. Otherwise a sound source would be
    refused."""
    own: list[int] = [store.put(b"a", b"1")]
    for streams in (1, 3, 2):
        store.reshard(streams)
        staged = bulk.Import.create(tmp_path / f"in-{streams}")
        with staged.writer() as writer:
            writer.put(b"b", b"1")
        staged.seal()
        own.append(bulk.ingest(store, staged.staging))
        own.append(store.revert_import(staged.import_id))
        with store.batch() as batch:
            batch.put(b"c", bytes(INLINE_VALUE_BYTES + 1))
            batch.delete_range(b"d", b"e")
        assert batch.timestamp is not None
        own.append(batch.timestamp)
        own.append(store.delete(b"nothing"))
    store.clear_range(b"a", b"c")
    store.sync()
    assert [at for at in own if not store.replication.has_commit(at)] == []
    assert store.replication.has_commit(own[-1] + 1) is False
    assert store.replication.has_commit(0) is None
    collection.backup(store)
    at = collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert restored.replication.has_commit(at) is None
        assert restored.replication.has_commit(restored.put(b"a", b"2"))
    store.gc(before=at)
    assert {store.replication.has_commit(each) for each in own} == {None}


def test_an_upload_of_commits_that_its_source_has_lost_is_not_finished(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    older = tmp_path / "older"
    store.checkpoint(older)
    upload_and_be_killed(store, collection)
    store.close()
    with kvstore.open(older) as back, pytest.raises(UsageError, match="older copy"):
        collection.backup(back)


@pytest.mark.usual_limits
def test_a_full_backup_that_failed_twice_begins_one_chain_only(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    """The first failure comes during the upload, the second one between the begun window and the
    changes that came since."""
    pick = random.Random(1)

    def write(rows: int) -> None:
        for number in range(rows):
            store.put(b"k%03d" % number, pick.randbytes(100))

    def failing_upload(
        store: kvstore.Store, shard: Shard, attempt: Attempt, progress: OnProgress | None
    ) -> Uploaded:
        if not attempt.parts and shard.upper:
            raise Crash  # behind the window that was begun
        if attempt.parts:
            return upload_here(store, shard, attempt, progress)
        rows = pa.concat_batches(exported(store, since=None, upto=attempt.upper - 1).rows)
        desc = BatchDesc(attempt.lower, attempt.upper)
        attempt.record(*shard.write_batch(desc, [rows.slice(0, 20)]).parts, rows.slice(19, 1))
        raise Crash

    write(200)
    collection.backup(store)
    write(200)
    for _ in range(2):
        with pytest.raises(Crash):
            collection.backup(store, full=True, token="t", upload=failing_upload)
        write(100)
    collection.backup(store, full=True, token="t")
    _, (begun, rest) = collection.chains()
    assert begun.upper == rest.lower
    assert collection.backup(store, full=True, token="t").upper == rest.upper
    assert collection.verify("contents", store).rows


def test_a_backup_whose_hold_is_taken_over_takes_it_back_and_goes_on_with_the_upload(
    store: kvstore.Store, collection: backup.Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    uploaded = upload_and_be_killed(store, collection)
    (name,) = (hold.name for hold in store.holds.all())
    sync = type(store).sync
    others: list[object] = []

    def taken(opened: kvstore.Store) -> kvstore.Timestamp:
        if not others:
            others.append(opened.hold(name))
        return sync(opened)

    monkeypatch.setattr(type(store), "sync", taken)
    store.put(b"c", b"1")
    assert collection.backup(store).rows == 2
    assert uploaded.parts[0].name in {p.name for b in collection.batches() for p in b.parts}
    collection.verify("contents", store)


def test_a_backup_whose_task_was_given_to_another_stops_at_once(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    """The error that `progress` raises ends the backup, although the other task has taken the hold
    as well."""
    store.put(b"a", b"1")
    told: list[int] = []

    def lost(rows: int) -> None:
        told.append(rows)
        store.hold(store.holds.all()[0].name)
        raise FencedError("task t")

    with pytest.raises(FencedError, match="task t"):
        collection.backup(store, progress=lost)
    assert len(told) == 1


def test_a_new_chain_without_a_backup_yet_hides_nothing_of_the_old(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    upper = collection.upper
    store.put(b"a", b"2")

    def crash(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "write_batch", crash)
        with pytest.raises(Crash):
            collection.backup(store, full=True)
    assert collection.upper == upper
    assert collection.show().chains == 1
    collection.verify("contents", store)
    collection.compact()
    collection.expire(keep=timedelta(0))
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert restored.get(b"a") == b"1"
    assert collection.backup(store, full=True).lower == 0
    assert collection.show().chains == 2
    collection.verify("contents", store)
