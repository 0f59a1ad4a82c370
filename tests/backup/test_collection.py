"""Collections: windows join, instants restore exactly, damage is found, one writer at a time."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

import backup
import bulk
import kvstore
from backup.chains import Chains
from backup.export import exported
from backup.progress import Attempt
from backup.shard import BatchDesc, Progress, Shard
from backup.shard.file_consensus import FileConsensus
from backup.shard.log import StateLog
from backup.upload import Uploaded, upload_here
from kvstore.errors import (
    CorruptionError,
    FencedError,
    HistoryGoneError,
    LockedError,
    NotAStoreError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.limits import LEASE_NS, ROLLUP_EVERY, SCAN_CHUNK
from tests.backup.histories import upload_and_be_killed

pytestmark = pytest.mark.usefixtures("each_engine")

Instants = list[kvstore.Timestamp]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def collection(tmp_path: Path) -> backup.Collection:
    return backup.Collection(tmp_path / "collection")


def live_through(
    store: kvstore.Store, collection: backup.Collection, staging: Path, *, seed: int
) -> Instants:
    """Four windows of every kind of change, a backup after each; returns instants in between."""
    pick = random.Random(seed)
    instants: Instants = []
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for number in range(0, 60, 3):
            writer.put(b"k%02d" % number, b"import")
    staged.seal()
    for window in range(4):
        if window == 1:
            bulk.ingest(store, staging)
        if window == 3:
            store.revert_import(staged.import_id)
        for _ in range(40):
            key = b"k%02d" % pick.randrange(60)
            action = pick.random()
            if action < 0.6:
                store.put(key, pick.randbytes(4))
            elif action < 0.8:
                store.delete(key)
            else:
                store.delete_range(key, b"k%02d" % (int(key[1:]) + pick.randrange(1, 20)))
            instants.append(kvstore.Timestamp(store.upper - 1))
        collection.backup(store)
    return instants


def versions(store: kvstore.Store, upto: int) -> list[kvstore.Change]:
    return list(store.versions(since=None, upto=upto))


def state_of(collection: backup.Collection, as_of: int | None = None) -> dict[bytes, bytes]:
    rows = collection.scan_batches(as_of).read_all()
    return dict(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def test_windows_join_without_gap_or_overlap(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    live_through(store, collection, tmp_path / "staging", seed=1)
    infos = collection.list()
    assert infos[0].lower == 0
    assert all(a.upper == b.lower for a, b in pairwise(infos))
    assert collection.upper == infos[-1].upper == store.upper
    assert sum(info.rows for info in infos) == len(versions(store, collection.upper - 1))


@pytest.mark.parametrize("seed", range(3))
def test_any_instant_restores_version_for_version(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path, seed: int
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=seed)
    for number, at in enumerate([*random.Random(seed).sample(instants, 4), None]):
        instant = collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert versions(restored, instant) == versions(store, instant)
            assert dict(restored.scan()) == dict(store.scan(as_of=instant))
            later = restored.put(b"new", b"life")
            assert later > instant
            assert list(restored.changes(instant)) == [
                kvstore.Change(later, "put", b"new", None, b"life")
            ]


def test_a_prefix_restores_alone_with_ranges_cut_to_it(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    live_through(store, collection, tmp_path / "staging", seed=5)
    at = collection.restore(tmp_path / "restored", prefix=b"k2")
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.changes(0, at)) == list(store.changes(0, at, prefix=b"k2"))


def test_state_only_restores_what_was_alive(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=6)
    collection.restore(tmp_path / "restored", as_of=instants[70], history=False)
    with kvstore.open(tmp_path / "restored") as restored:
        assert restored.since == instants[70]
        assert dict(restored.scan()) == dict(store.scan(as_of=instants[70]))
        with pytest.raises(HistoryGoneError):
            restored.get(b"k00", as_of=instants[69])


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
    assert [hold.timestamp for hold in store.holds()] == [info.upper - 1]


def test_only_the_window_can_be_restored(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no backup"):
        collection.restore(tmp_path / "restored")
    store.put(b"a", b"1")
    info = collection.backup(store)
    with pytest.raises(NotYetWrittenError):
        collection.restore(tmp_path / "restored", as_of=info.upper)
    assert not (tmp_path / "restored").exists()
    (tmp_path / "restored").mkdir()
    with pytest.raises(UsageError, match="exists"):
        collection.restore(tmp_path / "restored")


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
    """Each of many threads makes its own backups; nothing is lost, nothing is twice."""
    failures: list[BaseException] = []

    def script(number: int) -> None:
        own = backup.Collection(collection.url)
        for turn in range(4):
            store.put(b"%d/%d" % (number, turn), b"v")
            try:
                own.backup(store)
            except LockedError:
                continue  # lost every race: says so, and did nothing
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


def test_a_backup_made_again_with_its_token_is_done_once(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    first = collection.backup(store, token="monday")
    store.put(b"b", b"2")
    assert collection.backup(store, token="monday") == first
    assert collection.backup(store, token="tuesday").lower == first.upper
    assert len(collection.list()) == 2


# -- in other places --------------------------------------------------------------------------


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


def test_two_restores_to_one_place_do_not_take_it_from_each_other(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    target = tmp_path / "restored"

    def second(_rows: int) -> None:
        with pytest.raises(LockedError, match="another restore"):
            collection.restore(target)

    collection.restore(target, progress=second)
    with kvstore.open(target) as restored:
        assert list(restored.scan()) == [(b"a", b"1")]
    assert not list(tmp_path.glob(".restored*"))


def test_a_restore_removes_what_a_killed_one_left_at_its_own_place_only(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    own, other = (tmp_path / f".{name}.restoring-0123" for name in ("r[1]*", "r1x"))
    for left in (own, other):
        left.mkdir()
    collection.restore(tmp_path / "r[1]*")
    assert not own.exists()
    assert other.exists()


def test_a_restore_to_what_is_there_is_refused_before_it_begins(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"")
    rows: list[int] = []
    for name in ("dangling", "empty", "file"):
        with pytest.raises(UsageError, match="exists"):
            collection.restore(tmp_path / name, progress=rows.append)
    assert rows == []

    def make(_rows: int) -> None:
        (tmp_path / "meanwhile").mkdir(exist_ok=True)

    with pytest.raises(UsageError, match="exists"):
        collection.restore(tmp_path / "meanwhile", progress=make)
    assert list((tmp_path / "meanwhile").iterdir()) == []


def test_a_live_store_takes_the_state_as_one_import(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=7)
    with kvstore.open(tmp_path / "target") as target:
        target.put(b"k00", b"before")
        target.put(b"other", b"stays")
        stamp = collection.restore_into(target, as_of=instants[100])
        expected = dict(store.scan(as_of=instants[100]))
        assert dict(target.scan(prefix=b"k")) == {b"k00": b"before"} | expected
        assert target.get(b"other") == b"stays"
        assert {change.timestamp for change in target.changes(stamp - 1)} == {stamp}
        assert not list((tmp_path / "target" / "ingest").iterdir())


def test_rows_are_read_without_restoring(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=8)
    for at in (instants[90], None):
        table = collection.scan_batches(as_of=at, prefix=b"k").read_all()
        rows = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
        assert list(rows) == list(store.scan(prefix=b"k", as_of=at or collection.upper - 1))


def test_memory_collections_work_the_same(store: kvstore.Store, tmp_path: Path) -> None:
    collection = backup.Collection(f"memory://{tmp_path.name}")
    live_through(store, collection, tmp_path / "staging", seed=3)
    at = backup.Collection(f"memory://{tmp_path.name}").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert versions(restored, at) == versions(store, at)
    with pytest.raises(UsageError, match="ftp"):
        backup.Collection("ftp://somewhere")


# -- compaction and retention -----------------------------------------------------------------


def test_compaction_keeps_every_instant(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=10)
    collection.compact()
    assert len(collection.list()) == 1
    for number, at in enumerate(instants[::40]):
        collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert versions(restored, at) == versions(store, at)
    store.put(b"later", b"1")
    collection.backup(store)
    collection.verify("contents", store)


def test_long_work_tells_how_far_it_has_come(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    for _ in range(2):
        for number in range(5):
            store.put(b"k%d" % number, b"")
        collection.backup(store)
    told: list[int] = []

    def rows() -> list[int]:
        found, told[:] = told.copy(), []
        assert found == sorted(found)
        return [min(found), max(found)]

    collection.verify(progress=told.append)
    assert rows() == [5, 10]
    collection.verify("contents", store, progress=told.append)
    assert rows() == [5, 20]
    collection.restore(tmp_path / "whole", progress=told.append)
    assert rows() == [0, 10]
    collection.restore(tmp_path / "state", history=False, progress=told.append)
    assert rows() == [0, 5]
    collection.restore_into(store, progress=told.append)
    assert rows() == [0, 5]
    collection.compact(progress=told.append)
    assert rows() == [0, 10]
    upper = collection.show().upper
    collection.expire(upper, progress=told.append)
    assert rows() == [0, 5]


def test_work_that_its_progress_calls_off_changes_nothing(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=8)

    def call_off(rows: int) -> None:
        if rows:
            raise KeyboardInterrupt

    before = collection.list(), store.upper
    for work in (
        partial(collection.restore, tmp_path / "restored"),
        partial(collection.restore_into, store),
        partial(collection.verify, "contents", store),
        collection.compact,
    ):
        with pytest.raises(KeyboardInterrupt):
            work(progress=call_off)
    assert (collection.list(), store.upper) == before
    assert list(tmp_path.glob("*restor*")) == []
    with pytest.raises(KeyboardInterrupt):
        collection.expire(instants[50], progress=call_off)
    assert collection.expire(instants[50]) == instants[50]
    assert collection.scrub().orphans == ()
    collection.verify("contents", store)


def test_expired_instants_are_gone_and_later_ones_stay(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=11)
    before = collection.show()
    assert collection.expire(before=instants[100]) == collection.since == instants[100]
    assert collection.show().bytes < before.bytes
    with pytest.raises(HistoryGoneError):
        collection.restore(tmp_path / "restored", as_of=instants[99])
    for number, at in enumerate((instants[100], instants[130], None)):
        instant = collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert restored.since == instants[100]
            assert dict(restored.scan()) == dict(store.scan(as_of=instant))
            window = list(restored.changes(instants[100], instant))
            assert window == list(store.changes(instants[100], instant))
    collection.verify("contents", store)
    with pytest.raises(UsageError):
        collection.expire()


def test_a_broken_chain_says_so_and_a_new_full_keeps_the_old_window(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=12)
    for hold in store.holds():
        store._holds.drop(hold.name)
    store.put(b"k00", b"after")
    store.gc(before=store.sync() - 1)
    with pytest.raises(HistoryGoneError, match="full=True"):
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
            back.gc(before=back.sync() - 1)  # held at what the copy knew of
        assert state_of(collection, upto) == {b"a": b"lost"}
        collection.backup(back, full=True)
        back.put(b"c", b"3")
        collection.backup(back)
        assert state_of(collection) == dict(back.scan())


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


def test_a_full_backup_that_failed_twice_begins_one_chain_only(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    """First while it uploads, then between the window it had begun and what came since."""
    pick = random.Random(1)

    def write(rows: int) -> None:
        for number in range(rows):
            store.put(b"k%03d" % number, pick.randbytes(100))

    def failing_upload(
        store: kvstore.Store, shard: Shard, attempt: Attempt, progress: Progress | None
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


class Crash(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", ["finalise", "write_rollup", "forget"])
def test_a_chain_whose_removal_was_cut_short_is_removed_by_the_next_expiry(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    store.put(b"a", b"2")
    collection.backup(store, full=True)
    owner = {"finalise": Shard, "write_rollup": StateLog, "forget": Chains}[call]

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, crash)
        with pytest.raises(Crash):
            collection.expire(before=collection.upper - 1)
    assert collection.restore(tmp_path / "restored") == collection.upper - 1
    collection.expire(before=collection.upper - 1)
    chains = {
        path.relative_to(tmp_path / "collection" / "blob").parts[0]
        for path in parts_of(tmp_path / "collection")
    }
    assert len(chains) == 1
    collection.backup(store)
    collection.verify("contents", store)


def test_a_backup_whose_hold_is_taken_over_takes_it_back_and_goes_on_with_the_upload(
    store: kvstore.Store, collection: backup.Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    uploaded = upload_and_be_killed(store, collection)
    (name,) = (hold.name for hold in store.holds())
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
    """Though that one has taken the hold as well: what `progress` raises calls the backup off."""
    store.put(b"a", b"1")
    told: list[int] = []

    def lost(rows: int) -> None:
        told.append(rows)
        store.hold(store.holds()[0].name)
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


# -- encryption -------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("0f" * 32)
    return path


def test_encrypted_collections_need_their_key_and_show_nothing(
    store: kvstore.Store, tmp_path: Path, key_file: Path
) -> None:
    marker = b"find me if you can, find me if you can"
    for name, opened in {
        "passphrase": {"passphrase": "correct horse"},
        "key-file": {"key_file": key_file},
    }.items():
        url = tmp_path / name
        collection = backup.Collection(url, **opened)  # type: ignore[arg-type]
        store.put(b"secret-key", marker)
        collection.backup(store)
        store.put(b"secret-key", b"2")
        collection.backup(store)
        collection.compact()
        collection.verify()
        stored = b"".join(path.read_bytes() for path in url.rglob("*") if path.is_file())
        assert marker not in stored
        assert b"secret-key" not in stored
        assert store.store_id.encode() not in stored
        collection.restore(tmp_path / f"restored-{name}", as_of=collection.since or None)
        with pytest.raises(UsageError, match="is encrypted"):
            backup.Collection(url)
    with pytest.raises(UsageError, match="does not open"):
        backup.Collection(tmp_path / "passphrase", "wrong")
    with pytest.raises(UsageError, match="a passphrase"):
        backup.Collection(tmp_path / "passphrase", key_file=key_file)


def test_a_collection_in_the_clear_takes_no_key(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    with pytest.raises(UsageError, match="not encrypted"):
        backup.Collection(collection.url, "passphrase")


def test_looking_for_an_encrypted_collection_makes_none(
    store: kvstore.Store, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "mistyped", "passphrase")
    assert collection.list() == []
    assert collection.source is None
    assert not (tmp_path / "mistyped").exists()
    other = backup.Collection(tmp_path / "mistyped", "passphrase")
    store.put(b"a", b"1")
    other.backup(store)
    assert len(collection.list()) == 1  # by the key that the other made
    with pytest.raises(UsageError, match="does not open"):
        backup.Collection(tmp_path / "mistyped", "other")


def test_a_collection_begun_in_the_clear_beside_is_not_encrypted(
    store: kvstore.Store, tmp_path: Path
) -> None:
    sealed = backup.Collection(tmp_path / "both", "passphrase")
    backup.Collection(tmp_path / "both").backup(store)
    with pytest.raises(UsageError, match="not encrypted"):
        sealed.backup(store)
    assert len(backup.Collection(tmp_path / "both").list()) == 1


def test_an_empty_passphrase_encrypts_nothing(store: kvstore.Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="passphrase is empty"):
        backup.Collection(tmp_path / "sealed", "").backup(store)
    assert not (tmp_path / "sealed").exists()


def test_a_passphrase_may_be_any_bytes_of_the_environment(
    store: kvstore.Store, tmp_path: Path
) -> None:
    backup.Collection(tmp_path / "sealed", "p\udcff").backup(store)
    assert backup.Collection(tmp_path / "sealed", "p\udcff").verify().backups == 1


def test_a_key_record_that_is_damaged_is_a_wrong_key_or_corruption(
    store: kvstore.Store, tmp_path: Path
) -> None:
    backup.Collection(tmp_path / "sealed", "passphrase").backup(store)
    record = tmp_path / "sealed" / "blob" / "encryption.json"
    whole = record.read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        bytes(len(whole)),
        b"[]",
        whole.replace(b'"kdf"', b'"kdg"'),
        whole.replace(b'"n": 32768', b'"n": 32769'),
        whole.replace(b'"salt": "', b'"salt": "x'),
    ):
        record.write_bytes(damaged)
        with pytest.raises(CorruptionError):
            backup.Collection(tmp_path / "sealed", "passphrase")
    record.unlink()
    with pytest.raises(CorruptionError, match="holds the key"):
        backup.Collection(tmp_path / "sealed", "passphrase")
    record.write_bytes(whole.replace(b'"r": 8', b'"r": 9'))
    with pytest.raises(UsageError, match="does not open"):
        backup.Collection(tmp_path / "sealed", "passphrase")


def test_damaged_ciphertext_is_refused(store: kvstore.Store, tmp_path: Path) -> None:
    collection = backup.Collection(tmp_path / "sealed", "passphrase")
    store.put(b"a", bytes(100_000))
    collection.backup(store)
    for part in (tmp_path / "sealed").rglob("*.parquet"):
        flip_a_bit(part)
    with pytest.raises(CorruptionError):
        collection.verify()
    with pytest.raises(CorruptionError):
        collection.restore(tmp_path / "restored")


# -- damage -----------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    path.write_bytes(damaged)


@pytest.fixture
def backed_up(store: kvstore.Store, collection: backup.Collection, tmp_path: Path) -> Path:
    live_through(store, collection, tmp_path / "staging", seed=9)
    assert collection.verify().backups == 4
    return tmp_path / "collection"


def parts_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*.parquet"))


def test_a_flipped_bit_in_any_part_is_named_by_verify_and_refused_by_restore(
    backed_up: Path, collection: backup.Collection, tmp_path: Path
) -> None:
    for part in parts_of(backed_up):
        whole = part.read_bytes()
        flip_a_bit(part)
        with pytest.raises(CorruptionError, match=part.name):
            collection.verify()
        with pytest.raises(CorruptionError, match=part.name):
            collection.restore(tmp_path / "restored")
        assert [path.name for path in tmp_path.iterdir() if "restor" in path.name] == []
        part.write_bytes(whole)


def test_missing_and_truncated_parts_are_all_named(
    backed_up: Path, collection: backup.Collection
) -> None:
    first, second = parts_of(backed_up)[:2]
    first.unlink()
    with pytest.raises(CorruptionError, match=first.name):
        collection.verify("files")
    second.write_bytes(second.read_bytes()[:-3])
    with pytest.raises(CorruptionError) as caught:
        collection.verify()
    assert first.name in str(caught.value)
    assert second.name in str(caught.value)


@pytest.mark.parametrize("depth", ["checksums", "contents"])
def test_a_verification_beside_a_compaction_sees_no_damage_in_what_that_replaced(
    store: kvstore.Store,
    collection: backup.Collection,
    backed_up: Path,
    depth: Literal["checksums", "contents"],
) -> None:
    other = backup.Collection(backed_up)

    def compact(_rows: int) -> None:
        store.put(b"k", b"v")
        other.backup(store)
        other.compact()

    report = collection.verify(depth, store if depth == "contents" else None, progress=compact)
    assert report.parts
    for _ in range(2):
        store.put(b"k", b"v")
        collection.backup(store)

    def lose(_rows: int) -> None:
        parts_of(backed_up)[-1].unlink(missing_ok=True)

    with pytest.raises(CorruptionError, match="is missing"):
        collection.verify(progress=lose)


def test_contents_that_differ_from_the_store_are_found(
    store: kvstore.Store, collection: backup.Collection, backed_up: Path
) -> None:
    report = collection.verify("contents", store)
    assert report.rows == len(versions(store, collection.upper - 1))
    collection._chains.shard(collection._chains.read().chains[0]).writer().progress(  # type: ignore[union-attr]
        store.sync() + 10**9
    )
    with pytest.raises((CorruptionError, NotYetWrittenError)):
        collection.verify("contents", store)
    with pytest.raises(UsageError):
        collection.verify("contents")
    with pytest.raises(UsageError):
        collection.verify("deeply")  # type: ignore[arg-type]


def test_contents_of_an_older_chain_are_compared_too(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    store.put(b"b", b"2")
    collection.backup(store, full=True)
    assert collection.verify("contents", store).rows == 1 + 2
    record = collection._chains.read()
    assert record is not None
    # Says that nothing was written when b was.
    collection._chains.shard(record.chains[0]).writer().progress(collection.upper)
    with pytest.raises(CorruptionError, match="differ"):
        collection.verify("contents", store)
    store._holds.drop(store.holds()[0].name)
    store.gc(before=store.sync() - 1)
    store.put(b"c", b"3")
    collection.backup(store, full=True)
    assert collection.verify("contents", store).rows == 3


def test_an_altered_manifest_is_an_error_that_names_the_place(
    backed_up: Path, collection: backup.Collection
) -> None:
    journal = next((backed_up / "consensus").glob("chain-*/*-journal*"))
    content = bytearray(journal.read_bytes())
    content[len(content) // 3] ^= 1
    journal.write_bytes(content)
    with pytest.raises(CorruptionError, match="journal"):
        backup.Collection(collection.url).list()


def test_what_an_unfinished_backup_left_is_found_by_a_scrub(
    store: kvstore.Store, collection: backup.Collection, backed_up: Path
) -> None:
    part = parts_of(backed_up)[0]
    orphan = part.with_name("00000000000000000001-00000000000000ff.parquet")
    shutil.copy(part, orphan)
    collection.backup(store)
    assert collection.scrub().orphans == (str(orphan.relative_to(backed_up / "blob")),)
    collection.scrub(delete_orphans_older_than=timedelta(days=1))
    assert not orphan.exists()
    assert collection.verify().backups == 5


def test_a_restore_that_was_killed_keeps_space_only_until_its_lease_has_run_out(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    place = tmp_path / "backups"
    collection = backup.Collection(place, clock=clock)
    store.put(b"k", b"1")
    collection.backup(store)
    killed = collection.snapshot(None)
    killed.__enter__()
    store.put(b"k", b"2")
    collection.backup(store)
    collection.compact()
    assert len(parts_of(place)) == 3
    clock.advance(LEASE_NS + 1)
    collection.compact()
    assert len(parts_of(place)) == 1


def test_an_expiry_passes_a_restore_that_was_killed_once_its_lease_has_run_out(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    store.put(b"k", b"1")
    collection.backup(store)
    killed = collection.snapshot(None)
    killed.__enter__()
    store.put(b"k", b"2")
    upper = collection.backup(store).upper
    assert collection.expire(before=upper) == 0
    clock.advance(LEASE_NS + 1)
    assert collection.expire(before=upper) == upper - 1


def two_chains(store: kvstore.Store, collection: backup.Collection) -> tuple[int, int]:
    """Two chains; an instant that only the older has, at which k is 1, and the newer's upper."""
    old = store.put(b"k", b"1")
    store.put(b"k", b"2")
    collection.backup(store)
    store.gc(before=store.upper)
    store.put(b"k", b"3")
    return old, collection.backup(store, full=True).upper


def test_a_chain_that_is_being_restored_is_removed_by_the_next_expiry(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    old, upper = two_chains(store, collection)
    with collection.snapshot(old) as (_, snapshot):
        assert collection.expire(before=upper) == upper - 1
        assert pa.Table.from_batches(snapshot.read()).column("value").to_pylist() == [b"1"]
        assert collection.show().chains == 1
    assert len(parts_of(tmp_path / "backups")) == 2
    collection.expire(before=upper)
    assert len(parts_of(tmp_path / "backups")) == 1


def test_a_killed_restore_of_an_ended_chain_stops_no_expiry(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    old, upper = two_chains(store, collection)
    killed = collection.snapshot(old)
    killed.__enter__()
    collection.expire(before=upper)
    clock.advance(LEASE_NS + 1)
    collection.expire(before=upper)
    assert len(parts_of(tmp_path / "backups")) == 1


@pytest.mark.parametrize("warm", [True, False])
def test_many_increments_leave_few_versions_of_the_state(
    store: kvstore.Store, tmp_path: Path, warm: bool
) -> None:
    """What opening reads is bounded: whoever backs up collects now and then."""
    place = tmp_path / "backups"
    collection = backup.Collection(place)
    for number in range(4 * ROLLUP_EVERY):
        store.put(b"k%03d" % number, b"v")
        if not warm:
            collection = backup.Collection(place)
        collection.backup(store)
    (chain,) = (path.name for path in (place / "consensus").iterdir() if path.name != "collection")
    assert len(FileConsensus(place / "consensus").scan(chain, start=0, limit=1 << 20)) < (
        3 * ROLLUP_EVERY
    )
    assert len(collection.list()) == 4 * ROLLUP_EVERY
    collection.verify()
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored", create=False) as restored:
        assert len(list(restored.scan())) == 4 * ROLLUP_EVERY


def test_a_backup_a_day_for_months_leaves_few_writers_in_the_state(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    for number in range(3 * ROLLUP_EVERY):
        clock.advance(86_400 * 10**9)
        store.put(b"k", b"%d" % number)
        collection.backup(store)
    with collection.snapshot(None) as (shard, _):
        assert len(shard.state.writers) <= ROLLUP_EVERY + 5
    collection.compact()
    with collection.snapshot(None) as (shard, _):
        assert len(shard.state.writers) <= 5


def test_two_collections_on_one_place_take_turns(store: kvstore.Store, tmp_path: Path) -> None:
    """What one remembers of the last state, the other has moved on from."""
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
    """Also short ones, ones with zeros at their end, and many of one first word."""
    keys = [b"prefix--%04d" % n for n in range(700, 0, -1)]
    keys += [
        b"a",
        b"a\0",
        b"a\0\0",
        b"",
        b"\0",
        b"\xff" * 9,
        b"\xff" * 8,
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


def test_rows_of_many_chunks_are_backed_up_in_bounded_batches_and_restored(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deletions and repeated keys lie on both sides of where chunks and batches are cut."""
    monkeypatch.setattr("backup.export.ARROW_BYTES_MAX", 1 << 14)
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
