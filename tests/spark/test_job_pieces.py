"""The tasks of jobs, without a session: the pieces give the result of one process.

Every task runs twice, as a retry or a speculative twin would, and the first outcome is lost.
Arguments and results are pickled, as on their way through Spark.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, Store, bulk
from kvstore.backup import Collection
from kvstore.backup.shard import Cas, MemoryBlob, MemoryConsensus, Shard, ShardBatch, Versioned
from kvstore.errors import CorruptionError, HistoryGoneError, UsageError
from kvstore.limits import KEY_BYTES_MAX, LEASE_NS
from kvstore.spark.access import Access
from kvstore.spark.format_options import read_options
from kvstore.spark.jobs import backup, compact, restore, verify
from kvstore.spark.jobs.backup import SparkUpload
from kvstore.spark.jobs.compact import SparkMerge
from kvstore.spark.jobs.copies import copy_of
from kvstore.spark.jobs.restore import SparkBuild
from kvstore.spark.jobs.spread import kept
from kvstore.spark.read import STATE, QueryReader
from tests.backup.histories import change, staged_import, versions

NO_SESSION: Any = None


@pytest.fixture(autouse=True)
def _tasks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process, each twice; and no window is too small to be shared."""

    def run(
        _spark: object, items: Sequence[Any], work: Callable[[Any], Any], **_how: object
    ) -> list[Any]:
        for item in items:
            work(pickle.loads(pickle.dumps(item)))
        return [pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(i))))) for i in items]

    for job in (backup, compact, restore, verify):
        monkeypatch.setattr(job, "run_tasks", run)
    monkeypatch.setattr("kvstore.changes.batches.SORTED_CHANGES_MAX", 0)


def rows_of(collection: Collection, place: Path) -> list[kvstore.Change]:
    """Every version of the newest chain, by way of a restore."""
    collection.restore(place)
    with kvstore.open(place) as store:
        return versions(store, store.upper - 1)


def rewrite(store: Store, directory: Path, pick: random.Random, step: int) -> None:
    """Changes of every kind, an import, and perhaps its undoing."""
    change(store, pick, 40)
    staged = staged_import(directory / f"staging-{step}")
    bulk.ingest(store, staged.staging)
    change(store, pick, 5)
    if pick.random() < 0.5:
        store.revert_import(staged.import_id)
        change(store, pick, 5)


def test_verify_compares_older_chains_as_one_process_does(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    collection = Collection(url)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        change(store, random.Random(1), 60)
        collection.backup(store)
        change(store, random.Random(2), 60)
        collection.backup(store, full=True)
        report = verify.verify(NO_SESSION, url, store, tasks=3)
        assert report == collection.verify("contents", store)
        assert report.chains == 2
        with collection.snapshots() as chains:
            older = next(iter(chains))
        # This claims that nothing was written between the two chains.
        older.writer().progress(collection.upper)
        for each in (
            lambda: collection.verify("contents", store),
            lambda: verify.verify(NO_SESSION, url, store, tasks=3),
        ):
            with pytest.raises(CorruptionError, match="differ"):
                each()
        # History that the store has collected cannot be compared any more.
        store.drop_hold(store.holds.all()[0].name)
        change(store, random.Random(3), 5)
        store.gc(before=store.sync() - 1)
        change(store, random.Random(4), 5)
        collection.backup(store, full=True)
        report = verify.verify(NO_SESSION, url, store, tasks=3)
        assert report == collection.verify("contents", store)
        assert report.chains == 3


@pytest.mark.parametrize("seed", range(4))
def test_backups_by_tasks_and_by_one_process_mix_and_hold_the_same_versions(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # batches that cut a key in two
        monkeypatch.setattr("kvstore.backup.rows.ARROW_BYTES_MAX", 100)
    pick = random.Random(seed)
    alone = Collection(tmp_path / "alone")
    url = str(tmp_path / "shared")
    shared = Collection(url)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for step in range(5):
            rewrite(store, tmp_path, pick, step)
            if pick.random() < 0.4:
                shared.backup(store)
            else:
                info = shared.backup(
                    store, upload=SparkUpload(NO_SESSION, Access(url), pick.choice([2, 5, 9]))
                )
                assert (info.lower == 0) == (step == 0)
            if pick.random() < 0.3:
                shared.compact(merge=SparkMerge(NO_SESSION, Access(url), 3))
        upper = shared.upper
        alone.backup(store)
        report = verify.verify(NO_SESSION, url, store, tasks=4)
        assert report == shared.verify("contents", store)
        assert shared.verify("contents", store).rows == alone.verify("contents", store).rows
        assert rows_of(shared, tmp_path / "r1") == versions(store, upper - 1)
        assert len(shared.scrub().orphans) > 5  # files of the first attempts, which no state names
        assert not list(tmp_path.glob(".*.copied-*"))


@pytest.mark.parametrize("seed", range(4))
def test_compaction_by_tasks_equals_compaction_by_one_process(tmp_path: Path, seed: int) -> None:
    pick = random.Random(100 + seed)
    found = []
    with kvstore.open(tmp_path / "store", durability="async") as store:
        both = [Collection(tmp_path / "a"), Collection(tmp_path / "b")]
        times = []
        for step in range(4):
            rewrite(store, tmp_path, pick, step)
            times.append(store.upper - 1)
            for collection in both:
                collection.backup(store)
        for collection in both:
            collection.expire(before=times[1])
        for step in range(4, 6):
            rewrite(store, tmp_path, pick, step)
            for collection in both:
                collection.backup(store)
        both[0].compact()
        both[1].compact(merge=SparkMerge(NO_SESSION, Access(str(tmp_path / "b")), 4))
        for collection in both:
            assert len(collection.list()) == 1
            collection.verify("contents", store)
            found.append([info.rows for info in collection.list()])
        assert found[0] == found[1]
        assert both[0].since == both[1].since == times[1]


@pytest.mark.parametrize("seed", range(4))
def test_restore_by_tasks_equals_restore_by_one_process(tmp_path: Path, seed: int) -> None:
    pick = random.Random(200 + seed)
    collection = Collection(tmp_path / "c")
    build = SparkBuild(NO_SESSION, Access(str(tmp_path / "c")), 5)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for step in range(3):
            rewrite(store, tmp_path, pick, step)
            collection.backup(store)
        then = pick.choice([c.timestamp for c in store.changes(0, order="time")])
    for number, wanted in enumerate(
        (
            {},
            {"as_of": then},
            {"start": b"k12", "end": b"k47"},
            {"prefix": b"k3"},
            {"history": False},
        )
    ):
        places = [tmp_path / f"{number}-{way}" for way in ("alone", "shared")]
        assert collection.restore(places[0], **wanted) == collection.restore(  # type: ignore[arg-type]
            places[1],
            build=build,
            **wanted,  # type: ignore[arg-type]
        )
        with kvstore.open(places[0]) as one, kvstore.open(places[1]) as other:
            assert list(one.changes(one.since)) == list(other.changes(other.since))
            assert list(one.scan()) == list(other.scan())
            assert one.since == other.since
            assert versions(one, one.upper - 1) == versions(other, other.upper - 1)
            other.verify().require_ok()


def test_contents_that_differ_are_told_by_tasks_as_by_one_process(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        rewrite(store, tmp_path, random.Random(5), 0)
        Collection(url).backup(store)
    with kvstore.open(tmp_path / "other") as store:
        store.put(b"k10", b"of another")
        for compared in (
            lambda: Collection(url).verify("contents", store),
            lambda: verify.verify(NO_SESSION, url, store, tasks=4),
        ):
            with pytest.raises(CorruptionError, match="differ from the store's"):
                compared()


def test_range_tombstones_over_many_pieces_are_written_once_and_whole(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        with store.batch() as batch:
            for number in range(200):
                batch.put(b"%03d" % number, b"x" * 100)
        store.delete_range(b"010", b"190")
        store.delete_range(b"000", b"100")
        collection = Collection(url)
        collection.backup(store, upload=SparkUpload(NO_SESSION, Access(url), 8))
        parts = [part for batch in collection.batches() for part in batch.parts]
        assert len(parts) > 1
        assert sum(part.ranges for part in parts) == 2
        collection.verify("contents", store)
        store.put(b"050", b"again")
        collection.backup(store)
        collection.compact(merge=SparkMerge(NO_SESSION, Access(url), 8))
        parts = [part for batch in collection.batches() for part in batch.parts]
        assert sum(part.ranges for part in parts) == 2
        collection.verify("contents", store)


def test_tasks_finish_what_a_killed_process_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.backup.shard.rows.batch_writer.PART_BYTES_MAX", 1 << 16)
    monkeypatch.setattr("kvstore.backup.shard.rows.batch_writer.ROW_GROUP_ROWS_MAX", 500)
    url = str(tmp_path / "c")
    killed = RuntimeError("killed")

    def die(rows: int) -> None:
        if rows > 8000:
            raise killed

    with kvstore.open(tmp_path / "store", durability="async") as store:
        for start in range(0, 20_000, 1000):
            with store.batch() as batch:
                for number in range(start, start + 1000):
                    batch.put(b"%05d" % number, b"x" * 50)
        store.delete_range(b"00100", b"15000")
        collection = Collection(url)
        with pytest.raises(RuntimeError):
            collection.backup(store, progress=die)
        begun = {file.name for file in (tmp_path / "c" / "blob").rglob("*.parquet")}
        assert begun
        store.put(b"after", b"1")
        collection.backup(store, upload=SparkUpload(NO_SESSION, Access(url), 4))
        assert len(collection.list()) == 2  # the window that was begun, and the rest
        named = {part.name.rpartition("/")[2] for b in collection.batches() for part in b.parts}
        assert begun & named
        collection.verify("contents", store)


def test_a_window_the_copy_does_not_have_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        collection = Collection(url)
        upload = SparkUpload(NO_SESSION, Access(url), 2)
        collection.backup(store, upload=upload)
        for hold in store.holds.all():
            store.drop_hold(hold.name)
        store.put(b"a", b"2")
        store.gc(before=store.upper - 1)
        with pytest.raises(HistoryGoneError, match="full=True"):
            collection.backup(store, upload=upload)
        collection.backup(store, full=True, upload=upload)
        assert collection.show().chains == 2


def test_longest_keys_and_a_value_of_64_mib_go_there_and_back(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    large = b"x" * (64 << 20)
    keys = [
        b"",
        b"\x00" * KEY_BYTES_MAX,
        b"k" * (KEY_BYTES_MAX - 1),
        b"\xff" * 8 + b"\xfe" * (KEY_BYTES_MAX - 8),
    ]
    with kvstore.open(tmp_path / "store") as store:
        with store.batch() as batch:
            for key in keys:
                batch.put(key, key[:9])
        store.put(b"large", large)
        store.delete_range(b"\x00", b"\x00\x01")
        Collection(url).backup(store, upload=SparkUpload(NO_SESSION, Access(url), 5))
        rows = dict(store.scan())
        assert len(rows) == 4
    Collection(url).restore(tmp_path / "restored", build=SparkBuild(NO_SESSION, Access(url), 5))
    with kvstore.open(tmp_path / "restored") as restored:
        assert dict(restored.scan()) == rows
        restored.checkpoint(tmp_path / "copy")
    for path in (url, str(tmp_path / "copy")):
        reader = QueryReader(
            read_options({"path": path, "numPartitions": "4"}, "state"), STATE, changes=False
        )
        found: dict[bytes, bytes] = {}
        for piece in reader.partitions():
            for each in reader.read(piece):
                found |= zip(each["key"].to_pylist(), each["value"].to_pylist(), strict=True)
        assert found == rows


def test_a_store_without_rows_is_backed_up_and_restored(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        Collection(url).backup(store, upload=SparkUpload(NO_SESSION, Access(url), 3))
        Collection(url).verify("contents", store)
    Collection(url).compact(merge=SparkMerge(NO_SESSION, Access(url), 3))
    Collection(url).restore(tmp_path / "restored", build=SparkBuild(NO_SESSION, Access(url), 3))
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.scan()) == []


def test_a_failed_append_takes_back_the_parts_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another script was faster: the parts of the loser go, and it takes the next window."""
    url = str(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        upload = SparkUpload(NO_SESSION, Access(url), 1)
        raced: list[ShardBatch] = []

        def overtaken(*args: Any) -> Any:
            uploaded = upload(*args)
            if not raced:
                raced.append(uploaded.batch)
                Collection(url).backup(store)
            return uploaded

        Collection(url).backup(store, upload=overtaken)
        assert len(raced[0].parts) == 1
        assert not (tmp_path / "c" / "blob" / raced[0].parts[0].name).exists()
        Collection(url).verify("contents", store)


def test_copies_of_other_stores_are_left_where_several_share_a_directory(tmp_path: Path) -> None:
    """All stores in memory share the system's temporary directory."""
    shared = tmp_path / "copies"
    shared.mkdir()
    with kvstore.open(None, "memory") as one, kvstore.open(None, "memory") as other:
        with copy_of(one, shared) as copy:
            pass
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        left, in_use, strange = (
            copy.with_name(copy.name.replace(f"-{os.getpid()}-", f"-{process}-"))
            for process in (ended.pid, 1, "x")
        )
        for each in (left, in_use, strange):
            each.mkdir()
        with copy_of(other, shared):
            assert left.exists()
        with copy_of(one, shared):
            assert not left.exists()
            assert in_use.exists()
            assert strange.exists()


class _ToldConsensus(MemoryConsensus):
    """Releases a semaphore for every command that was tried."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Semaphore(0)

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        outcome = super().compare_and_set(key, expected=expected, new=new)
        self.told.release()
        return outcome


def test_what_tasks_read_is_kept_however_long_they_take() -> None:
    clock, blob, consensus = ManualClock(1), MemoryBlob(), _ToldConsensus()
    shard, other = (Shard.open(blob, consensus, "chain", clock=clock) for _ in range(2))
    shard.writer().progress(5)
    with shard.snapshot(4) as snapshot, kept(snapshot, every_s=0.001):
        (reader,) = other.refresh().leased
        for _ in range(3):
            clock.advance(LEASE_NS - 1)
            while other.refresh().leased[reader].heartbeat_ns < clock.wall_ns():
                assert consensus.told.acquire(timeout=120)
            other.expire_lapsed()
        assert reader in other.refresh().leased


def test_a_collection_in_one_processs_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="memory of one process"):
        Access("memory://here")
