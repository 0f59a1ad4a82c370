"""Scripts beside the owner of a store: they read its files, and ask the owner for little."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
import kvstore.backup.tasks
import kvstore.bulk.tasks
import kvstore.upkeep
from kvstore.backup.window import Uploaded, upload_here
from kvstore.errors import (
    FencedError,
    HistoryGoneError,
    ImportRefusedError,
    KeyConflictError,
    KVStoreError,
    LockedError,
    UsageError,
)
from kvstore.remote.control import as_store, reach
from kvstore.tasks import Worker
from tests.control.owners import owning
from tests.harness.bounds import bounds

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", control=True) as store:
        store.put(b"a", b"1")
        store.delete_range(b"x", b"y")
        yield store


@pytest.fixture
def client(owner: kvstore.Store) -> Iterator[kvstore.Client]:
    with kvstore.connect(owner.path) as client:
        yield client


def staged(place: Path, rows: dict[bytes, bytes]) -> Path:
    made = kvstore.bulk.Import.create(place)
    with made.writer() as writer:
        for key, value in sorted(rows.items()):
            writer.put(key, value)
    made.seal()
    return place


# -- backups ---------------------------------------------------------------------------------


def test_a_backup_has_all_that_was_committed_before(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    collection = kvstore.backup.Collection(tmp_path / "collection")
    for number in range(3):
        at = owner.put(b"k", b"%d" % number, durability="async")
        info = collection.backup(client)
        assert info.upper > at
        assert owner.durable >= info.upper, "a crash could take back what was backed up"
    assert collection.verify("contents", client) == collection.verify("contents", owner)
    (hold,) = owner.holds.all()
    assert (hold.kind, hold.timestamp) == ("backup", collection.upper - 1)
    collection.restore(tmp_path / "restored")
    with kvstore.open_read_only(tmp_path / "restored") as restored:
        assert dict(restored.scan()) == dict(owner.scan())
        assert restored.history(b"k") == owner.history(b"k")


def test_owner_and_script_take_windows_of_one_chain(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    collection = kvstore.backup.Collection(tmp_path / "collection")
    for number in range(4):
        owner.put(b"k", b"%d" % number)
        collection.backup(client if number % 2 else owner)
    assert len(collection.list()) == 4
    collection.verify("contents", owner)


@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed"])
def test_a_handle_older_than_the_newest_backup_backs_up_what_is_new(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client, is_killed: bool
) -> None:
    collection = kvstore.backup.Collection(tmp_path / "collection")
    collection.backup(owner)

    def killed(*window: Any) -> Uploaded:
        upload_here(*window)
        raise KeyboardInterrupt

    upload: Any = killed if is_killed else upload_here
    with as_store(client) as older, bounds(PART_BYTES_MAX=300, ARROW_ROWS_MAX=3):
        owner.put_many({b"key/%02d" % number: bytes([number]) * 30 for number in range(40)})
        with suppress(KeyboardInterrupt):
            collection.backup(owner, upload=upload)
        last = owner.put(b"k", b"v")
        assert collection.backup(older).upper > last
    assert _rows(collection.scan_batches()) == dict(owner.scan())


def test_a_script_beside_an_older_copy_of_its_store_is_refused(
    tmp_path: Path, owner: kvstore.Store
) -> None:
    collection = kvstore.backup.Collection(tmp_path / "collection")
    owner.checkpoint(tmp_path / "older")
    owner.put(b"k", b"v")
    collection.backup(owner)
    with (
        kvstore.open(tmp_path / "older", control=True) as older,
        kvstore.connect(older.path) as client,
        pytest.raises(UsageError, match="it was put back from an older copy"),
    ):
        collection.backup(client)


def _rows(batches: Iterable[pa.RecordBatch]) -> dict[bytes, bytes]:
    columns = [[column.to_pylist() for column in batch.columns] for batch in batches]
    return {key: value for keys, values in columns for key, value in zip(keys, values, strict=True)}


def test_gc_of_the_owner_keeps_what_a_script_backs_up_next(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    collection = kvstore.backup.Collection(tmp_path / "collection")
    collection.backup(client)
    owner.put(b"a", b"2")
    owner.put(b"a", b"3")
    owner.gc(keep=timedelta(0))
    collection.backup(client)
    values = {version.value for version in owner.history(b"a")}
    assert {b"1", b"2", b"3"} == values
    collection.verify("contents", owner)


def test_a_new_hold_keeps_what_the_handle_shows(
    owner: kvstore.Store, client: kvstore.Client
) -> None:
    with as_store(client) as store:
        owner.put(b"a", b"2")
        owner.gc(keep=timedelta(0))
        with pytest.raises(HistoryGoneError):
            store.hold("late")
    with as_store(client) as store:
        hold = store.hold("mine", max_age=timedelta(hours=1))
        owner.put(b"a", b"3")
        owner.gc(keep=timedelta(0))
        assert hold.timestamp == store.upper - 1
        assert owner.get(b"a", as_of=hold.timestamp) == b"2"
        assert hold.is_new
        again = store.hold("mine")
        assert not again.is_new
        with pytest.raises(FencedError):
            hold.move(owner.upper - 1)
        again.move(owner.upper - 1, reached=owner.upper)
        assert owner.holds.all()[0].reached == again.timestamp + 1
        again.release()
        assert store.holds.all() == owner.holds.all() == []
        store.hold("other")
        assert store.drop_hold("other").name == "other"
        with pytest.raises(UsageError, match="no hold"):
            store.drop_hold("other")


def test_a_first_backup_that_was_killed_holds_history_for_a_week(tmp_path: Path) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    week = timedelta(days=7, seconds=1)
    with kvstore.open(tmp_path / "store", clock=clock, control=True) as owner:
        owner.put(b"a", b"1")
        with kvstore.connect(owner.path) as client:
            for _ in range(2):  # the second one is killed as well
                with as_store(client) as store:
                    store.hold("killed", kind="backup")
            with as_store(client) as store:
                first = store.hold("done", kind="backup")
                first.move(store.upper - 1)
                assert first.timestamp == store.upper - 1
            kvstore.backup.Collection(tmp_path / "collection").backup(client)
            owner.put(b"a", b"2")
            clock.advance(int(week.total_seconds() * 10**9))
            report = owner.gc(keep=timedelta(0))
            assert [hold.name for hold in report.lost_holds] == ["killed"]
            assert len(owner.history(b"a")) == 2
            kvstore.backup.Collection(tmp_path / "collection").backup(client)


def test_a_replica_follows_beside_the_owner(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    stop = kvstore.backup.Stop()
    uppers: list[int] = []
    changed = threading.Condition()

    def tell(upper: int) -> None:
        with changed:
            uppers.append(upper)
            changed.notify_all()

    with bounds({"CONTROL_POLL_S": 0.01}):
        thread = threading.Thread(
            target=lambda: kvstore.backup.replicate(
                client, tmp_path / "standby", follow=True, stop=stop, progress=tell
            )
        )
        thread.start()
        try:
            for number in range(3):
                at = owner.put(b"k", b"%d" % number)
                with changed:
                    assert changed.wait_for(lambda at=at: uppers and uppers[-1] > at, timeout=120)
        finally:
            stop.set()
            thread.join()
    with kvstore.open_read_only(tmp_path / "standby") as standby:
        assert dict(standby.scan()) == dict(owner.scan())
        assert standby.history(b"k") == owner.history(b"k")


# -- imports ---------------------------------------------------------------------------------


def test_an_import_is_added_once(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(tmp_path / "staged", {b"b": b"2", b"c": b"3"})
    before = owner.upper
    stamp = kvstore.bulk.ingest(client, place)
    assert stamp >= before
    assert dict(owner.scan(as_of=stamp)) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    assert (
        kvstore.bulk.ingest(client, place, move=True) == kvstore.bulk.ingest(client, place) == stamp
    )
    assert not list((tmp_path / "store" / "ingest").iterdir())
    assert {change.key for change in owner.changes(stamp - 1)} == {b"b", b"c"}
    with as_store(client) as store:
        (record,) = owner.imports.all()
        assert store.imports.get(record.import_id) == record
        assert store.revert_import(record.import_id) > stamp
        with pytest.raises(UsageError, match="revert"):
            store.imports.abort(record.import_id)
        assert not store.imports.abort(17)
    assert dict(owner.scan()) == {b"a": b"1"}


def test_an_import_by_many_scripts_at_once_is_added_once(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(tmp_path / "staged", {b"%03d" % n: b"v" for n in range(50)})
    stamps = set()
    threads = [
        threading.Thread(target=lambda given=given: stamps.add(kvstore.bulk.ingest(given, place)))
        for given in (client, client, owner, client)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stamps) == 1
    assert len(list(owner.scan(prefix=b"0"))) == 50
    assert len(owner.imports.all()) == 1


def test_live_keys_refuse_an_import(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(tmp_path / "staged", {b"a": b"2", b"b": b"2"})
    with pytest.raises(KeyConflictError) as refusal:
        kvstore.bulk.ingest(client, place, on_conflict="error")
    assert refusal.value.keys == (b"a",)
    place = staged(tmp_path / "other", {b"b": b"2"})

    def come(step: str) -> None:
        if step == "add":
            owner.put(b"b", b"late")

    with pytest.raises(KeyConflictError):
        kvstore.bulk.ingest(client, place, on_conflict="error", progress=come)
    assert owner.get(b"b") == b"late"
    owner.delete(b"b")
    owner.gc(keep=timedelta(0))  # the versions that were checked before are gone
    kvstore.bulk.ingest(client, place, on_conflict="error")
    assert owner.get(b"b") == b"2"


def test_a_check_that_the_owner_cannot_run_is_refused_before_anything_is_brought(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(tmp_path / "staged", {b"b": b"2"})
    with pytest.raises(UsageError, match="no effect"):
        kvstore.bulk.ingest(client, place, check=lambda: None)
    assert owner.imports.all() == []


def test_files_that_are_no_sealed_import_are_not_taken(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    assert owner.path is not None
    place = staged(tmp_path / "staged", {b"b": b"2"})
    sealed = kvstore.bulk.read_manifest(place)
    named = f"{sealed.import_id:016x}-0"
    brought = owner.path / "ingest" / named
    for name in (str(place), f"../../staged/{named}", "../staged", f"{sealed.import_id:016x}", 5):
        with pytest.raises(UsageError, match=r"directory in ingest/|must be a text"):
            client.work("add_import", None, directory=name)

    def bring() -> None:
        shutil.rmtree(brought, ignore_errors=True)
        shutil.copytree(place, brought)

    def add() -> None:
        client.work("add_import", None, directory=named)

    with pytest.raises(ImportRefusedError, match="nothing is there"):
        add()
    bring()
    (brought / "import.json").unlink()
    with pytest.raises(ImportRefusedError, match="not sealed"):
        add()
    bring()
    (part,) = brought.glob("part-*")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(ImportRefusedError, match="altered"):
        add()
    part.unlink()
    part.symlink_to("/dev/zero")
    with pytest.raises(ImportRefusedError, match="regular file"):
        add()
    assert owner.imports.all() == []
    (place / part.name).write_bytes(b"no file")
    with pytest.raises(ImportRefusedError):
        kvstore.bulk.ingest(client, place)
    assert dict(owner.scan()) == {b"a": b"1"}


def test_a_restore_goes_into_the_store_of_an_owner(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    collection = kvstore.backup.Collection(tmp_path / "collection")
    collection.backup(client)
    owner.put(b"a", b"2")
    collection.restore_into(client)
    assert owner.get(b"a") == b"1"


# -- the owner's work ------------------------------------------------------------------------


def test_gc_is_done_by_the_owner(owner: kvstore.Store, client: kvstore.Client) -> None:
    for number in range(50):
        owner.put(b"k", b"%d" % number)
    hold = owner.hold("keeps", at=owner.upper - 1)
    owner.put(b"k", b"last")
    report = client.gc(keep=timedelta(0), progress=lambda count: None)
    assert report.versions >= 48
    assert report.held_back
    assert [claim.name for claim in report.held_by] == ["keeps"]
    assert owner.since == hold.timestamp
    with pytest.raises(UsageError, match="before or keep"):
        client.gc()


def test_a_script_that_calls_gc_off_ends_it(owner: kvstore.Store, client: kvstore.Client) -> None:
    with bounds({"GC_KEYS_PER_STEP": 2}):
        for number in range(400):
            owner.put(b"%02d" % (number % 40), b"%d" % number)

        def call_off(count: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            client.gc(keep=timedelta(0), progress=call_off)
        report = client.gc(keep=timedelta(0))  # waits for the end of the first run
    assert all(len(owner.history(b"%02d" % number)) == 1 for number in range(40))
    assert report.since == owner.since


def test_closing_ends_the_work_of_a_script(owner: kvstore.Store, client: kvstore.Client) -> None:
    for number in range(400):
        owner.put(b"%02d" % (number % 40), b"%d" % number)
    closing = threading.Thread(target=owner.close)
    assert client.path is not None
    hasty = kvstore.connect(client.path, patience=0)

    def close(count: int) -> None:
        if closing.ident is None:
            closing.start()
        closing.join()  # the script does not take the rest of its answer

    with bounds({"GC_KEYS_PER_STEP": 2}), suppress(KVStoreError):
        client.gc(keep=timedelta(0), progress=close)  # its last step may be done already
    with hasty, pytest.raises(KVStoreError):
        hasty.get(b"00")


def test_writes_by_the_word_of_a_script(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    at = client.put(b"k", b"v", durability="sync")
    assert (owner.get(b"k"), owner.upper > at) == (b"v", True)
    client.delete(b"k")
    assert owner.get(b"k") is None
    assert client.clear_range(b"k", b"l") > at
    copied = client.checkpoint(tmp_path / "copy")
    with pytest.raises(UsageError, match="exists"):
        client.checkpoint(tmp_path / "copy")
    deleted = client.delete_range(b"a", b"b")
    assert deleted is not None
    assert deleted > copied
    assert owner.get(b"a") is None
    with as_store(client) as store, pytest.raises(UsageError, match="opened to be read only"):
        store.put(b"a", b"1")
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert copy.upper - 1 >= copied
        assert dict(copy.scan()) == {b"a": b"1"}


def test_tasks_of_scripts_are_done_by_the_owner(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(tmp_path / "staged", {b"b": b"2"})
    with pytest.raises(UsageError, match="worker"):
        client.tasks.claim(["import"])
    names = {
        kvstore.bulk.tasks.submit_import(client, place),
        kvstore.bulk.tasks.submit_import(client, place),
        kvstore.backup.tasks.submit_backup(client, tmp_path / "collection", task_id="first"),
        kvstore.upkeep.submit_gc(client, keep=timedelta(days=1)),
    }
    assert len(names) == 3
    handlers = {
        **kvstore.bulk.tasks.handlers(owner),
        **kvstore.backup.tasks.handlers(client),  # this work reads beside the owner
        **kvstore.upkeep.handlers(owner),
    }
    worker = Worker(owner.tasks, handlers)
    while worker.run_one() is not None:
        pass
    assert owner.get(b"b") == b"2"
    assert kvstore.backup.Collection(tmp_path / "collection").upper > 0
    assert not any(size.total for size in owner.tasks.sizes().values())


# -- reaching it -----------------------------------------------------------------------------


def test_a_path_is_opened_here_where_nobody_has_it_open(tmp_path: Path, each_engine: str) -> None:
    kvstore.open(tmp_path / "store").close()
    with reach(tmp_path / "store", kvstore.open) as store:
        store.delete_range(b"a", b"b")
    with (
        kvstore.open(tmp_path / "store"),
        bounds({"CONTROL_TRY_S": 0.0}),
        pytest.raises(LockedError, match="control=True"),
        reach(tmp_path / "store", kvstore.open),
    ):
        raise AssertionError


def test_an_error_of_the_block_is_its_own(tmp_path: Path, owner: kvstore.Store) -> None:
    with pytest.raises(LockedError, match="mine"), reach(tmp_path / "store", kvstore.open):
        raise LockedError("mine")


def test_a_client_of_an_address_has_no_files(owner: kvstore.Store, tmp_path: Path) -> None:
    socket = tmp_path / "store" / "control" / "socket"
    with (
        kvstore.connect(socket) as client,
        pytest.raises(UsageError, match="files are elsewhere"),
        as_store(client),
    ):
        raise AssertionError


@pytest.mark.usual_limits  # the owner writes as fast as it can, so tiny parts would be many
def test_scripts_beside_a_loaded_owner(tmp_path: Path, spawn: Any, each_engine: str) -> None:
    path = tmp_path / "store"
    collection = kvstore.backup.Collection(tmp_path / "collection")
    with owning(spawn, path, each_engine, load=True), kvstore.connect(path) as client:
        for number in range(4):
            place = staged(tmp_path / f"staged-{number}", {b"import": b"%d" % number})
            kvstore.bulk.ingest(client, place)
            collection.backup(client)
            with as_store(client) as store:
                assert store.get(b"import") == b"%d" % number
                client.gc(keep=timedelta(0))
        assert client.get(b"import") == b"3"
    with kvstore.open(path) as store:
        collection.backup(store)
        collection.verify("contents", store)
        assert store.verify().ok
