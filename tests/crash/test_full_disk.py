"""A disk that is full: a clear error, a handle that refuses further calls, and nothing lost.

The tests use a real file system of 24 MB where they may mount one. Elsewhere they set a limit on
file sizes, which the system reports in the same place with another error.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.errors import KVStoreError, OutOfSpaceError, PoisonedError
from kvstore.store import Store
from tests.harness.bounds import bounds
from tests.harness.full_disk import fill, small_disk

DISK_BYTES = 24 << 20
VALUE = os.urandom(64 * 1024)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as place:
        yield place


def put_until_refused(store: Store) -> tuple[list[bytes], KVStoreError]:
    acknowledged: list[bytes] = []
    for number in range(10_000):
        key = b"%06d" % number
        try:
            store.put(key, VALUE)
        except KVStoreError as error:
            return acknowledged, error
        acknowledged.append(key)
    raise AssertionError("the disk never filled")


def require_refusing(store: Store) -> None:
    for call in (
        lambda: store.put(b"more", b""),
        lambda: store.delete(b"more"),
        lambda: store.get(b"000000"),
        lambda: store.history(b"000000"),
        lambda: list(store.scan()),
        lambda: store.changes(0),
        lambda: store.sync(),
    ):
        with pytest.raises(PoisonedError):
            call()


@pytest.mark.parametrize("durability", ["sync", "group"])
def test_a_commit_on_a_full_disk_fails_clearly_and_keeps_what_was_acknowledged(
    disk: Path, durability: kvstore.Durability
) -> None:
    store = kvstore.open(disk / "store", durability=durability)
    acknowledged, error = put_until_refused(store)
    assert isinstance(error, OutOfSpaceError)
    assert str(disk / "store") in error.where
    assert len(acknowledged) > 100
    require_refusing(store)
    store.close()
    grow(disk)
    with kvstore.open(disk / "store") as store:
        found = [key for key, value in store.scan() if value == VALUE]
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) <= len(acknowledged) + 1  # the refused row may or may not be there
        assert [change.key for change in store.changes(0)] == found
        store.put(b"again", VALUE, durability="sync")


@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_a_large_commit_that_does_not_fit_is_not_there_and_fits_later(
    disk: Path, engine: str
) -> None:
    rows = {b"%06d" % number: VALUE for number in range(DISK_BYTES // len(VALUE))}
    with kvstore.open(disk / "store", engine) as store:
        store.put(b"000000", b"before", durability="sync")
    store = kvstore.open(disk / "store", engine)
    with pytest.raises(OutOfSpaceError):
        store.put_many(rows)
    require_refusing(store)
    store.close()
    grow(disk)
    for present in ({b"000000": b"before"}, rows):
        with kvstore.open(disk / "store", engine) as store:
            assert dict(store.scan()) == present
            assert {change.key for change in store.changes(0)} == set(present)
            store.verify().require_ok()
            store.put_many(rows, durability="sync")


def grow(disk: Path) -> None:
    size = f"remount,size={4 * DISK_BYTES}"
    subprocess.run(["mount", "-o", size, str(disk)], check=True)


def write_rows(made: bulk.Import, count: int) -> None:
    with made.writer(compression="none") as writer:
        for number in range(count):
            writer.put(b"%06d" % number, VALUE)


def test_an_import_that_does_not_fit_adds_nothing_and_can_be_added_later(
    disk: Path, tmp_path: Path
) -> None:
    made = bulk.Import.create(tmp_path / "staged")
    write_rows(made, 200)
    made.seal()
    with kvstore.open(disk / "store") as store:
        store.put(b"before", b"1")
        ballast = fill(disk, spare=4 << 20)
        with pytest.raises(OutOfSpaceError):
            bulk.ingest(store, made.staging, move=True)
        assert dict(store.scan()) == {b"before": b"1"}
        assert len(list(made.staging.glob("part-*"))) == 1
        ballast.unlink()
        stamp = bulk.ingest(store, made.staging)
        assert len(list(store.scan(as_of=stamp))) == 201


def test_a_push_whose_deletes_do_not_fit_is_refused_and_added_once_there_is_room(
    disk: Path, tmp_path: Path
) -> None:
    pushes = Pushes(tmp_path / "pushes")
    with kvstore.open(disk / "store") as store:
        store.put_many({b"a/" + os.urandom(250): b"" for _ in range(20_000)})
    with kvstore.open(disk / "store") as store:  # its log is empty: nothing is flushed later
        before = dict(store.scan())
        with pushes.begin(mode="replace", prefix=b"a/") as building:
            with building.writer() as writer:
                writer.put(b"a/", b"the whole")
            building.seal()
        puller = Puller(store, pushes, name="s")
        fill(disk, spare=3 << 20)
        with bounds(FETCH_SPARE_BYTES=1 << 20):
            assert puller.step()
            upper = store.upper
            assert not puller.step()
            [status] = pushes.status(1).stores
            assert (status.state, "OutOfSpaceError" in status.error) == ("refused", True)
            fetched = [*disk.glob("store/ingest/*.fetched/part-*")]
            assert len(fetched) == 1, "the push itself has come"
            assert not [*disk.glob("store/ingest/*/deleted*")]
            assert store.upper == upper
            assert dict(store.scan()) == before
            grow(disk)
            assert puller.step()
        assert dict(store.scan()) == {b"a/": b"the whole"}


def test_staging_on_a_full_disk_fails_clearly(disk: Path) -> None:
    fill(disk, spare=1 << 20)
    made = bulk.Import.create(disk / "staged")
    with pytest.raises(OutOfSpaceError):
        write_rows(made, 100)
    assert made.seal().rows == 0
    assert [file.name for file in made.staging.iterdir()] == ["import.json"]


def test_a_load_that_outgrows_the_disk_leaves_no_file_that_counts(disk: Path) -> None:
    """The disk fills in the middle of a part, behind stretches that other threads packed."""
    made = bulk.Import.create(disk / "staged")

    def write() -> None:
        with made.writer() as writer:
            for step in range(DISK_BYTES >> 20):
                keys = pa.array([b"%04d%04d" % (step, row) for row in range(64)], pa.binary())
                values = pa.array([os.urandom(1 << 15) for _ in range(64)], pa.binary())
                writer.write(pa.record_batch({"key": keys, "value": values}))

    with pytest.raises(OutOfSpaceError, match="free space"):
        write()
    assert made.seal().rows == 0
    assert [file.name for file in made.staging.iterdir()] == ["import.json"]


def test_a_backup_that_does_not_fit_leaves_the_collection_as_it_was(
    disk: Path, tmp_path: Path
) -> None:
    collection = Collection(disk / "backups")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        collection.backup(store)
        for number in range(100):
            store.put(b"%06d" % number, os.urandom(1 << 16), durability="async")
        ballast = fill(disk, spare=1 << 20)
        with pytest.raises(OutOfSpaceError):
            collection.backup(store)
        assert len(collection.list()) == 1
        collection.verify()
        ballast.unlink()
        collection.backup(store)
        collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert len(list(restored.scan())) == 101


def test_a_restore_that_does_not_fit_leaves_nothing(disk: Path, tmp_path: Path) -> None:
    collection = Collection(tmp_path / "backups")
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for number in range(300):
            store.put(b"%06d" % number, os.urandom(1 << 16))
        collection.backup(store)
    fill(disk, spare=2 << 20)
    with pytest.raises(OutOfSpaceError):
        collection.restore(disk / "restored")
    assert [file.name for file in disk.iterdir()] == ["ballast"]


_LIMITED = """
import resource, signal, sys
import kvstore
from kvstore.errors import PoisonedError, StorageError
store = kvstore.open(sys.argv[1], durability="sync")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
done = 0
try:
    while True:
        store.put(b"%06d" % done, bytes(65536))
        done += 1
except StorageError:
    pass
try:
    store.get(b"000000")
except PoisonedError:
    print(done)
"""


def test_a_write_that_the_system_refuses_poisons_the_handle(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    ran = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "store"), str(2 << 20)],
        capture_output=True,
        text=True,
        check=True,
    )
    done = int(ran.stdout)
    assert done >= 1
    with kvstore.open(tmp_path / "store") as store:
        assert [key for key, _ in store.scan()][:done] == [b"%06d" % n for n in range(done)]
