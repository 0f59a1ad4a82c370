"""Joins with a collection: values as the store knew them at each time, straight from the parts of
backups."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kvstore
from kvstore import Join, ManualClock, Store, backup
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.limits import PART_WHOLE_BYTES_MAX
from tests.harness.bounds import TINY, bounds
from tests.harness.seeds import seed_of
from tests.joins.histories import KEYS, known, pairs, table, write_at_random

SEED = "KVSTORE_COLLECTION_JOIN_SEED"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(
        tmp_path / "store", engine="memory", clock=clock, durability="async"
    ) as store:
        yield store


@pytest.fixture
def collection(tmp_path: Path, clock: ManualClock) -> backup.Collection:
    return backup.Collection(tmp_path / "collection", clock=clock)


@pytest.mark.parametrize("passphrase", [None, "secret"])
@pytest.mark.parametrize("tiny", [{}, TINY], ids=["whole", "tiny"])
def test_a_collection_answers_as_the_history_of_each_key_says(
    store: Store, clock: ManualClock, tmp_path: Path, tiny: dict[str, int], passphrase: str | None
) -> None:
    """Windows of every kind, compactions and chains in between, at any covered time."""
    pick = random.Random(seed_of(SEED, None))
    collection = backup.Collection(tmp_path / "collection", passphrase, clock=clock)

    def keep_up() -> None:
        if pick.random() < 0.3:
            collection.backup(store)
        if pick.random() < 0.05:
            collection.compact()

    store.hold("test", at=0)
    with bounds(tiny):
        moments = write_at_random(store, clock, tmp_path, pick, keep_up)
        collection.backup(store)
        collection.compact() if pick.random() < 0.3 else None
        times = [near for at in moments for near in (at - 1, at, at + 1)]
        times = [at for at in times if collection.since <= at < collection.upper]
        for count in (0, 1, 7, 300):
            labels = [(pick.choice([*KEYS, b"zz"]), pick.choice(times)) for _ in range(count)]
            age = pick.choice([None, 0, 30, 1000])
            max_age = None if age is None else timedelta(microseconds=age)
            expected = [
                known(store, *label, None if age is None else age * 1000) for label in labels
            ]
            joined = collection.join(table(labels), max_age=max_age).read_all()
            assert joined.drop_columns(["value", "value_timestamp"]).equals(table(labels))
            assert pairs(joined.to_reader()) == expected


def test_each_label_asks_the_chain_that_covers_its_time(
    store: Store, clock: ManualClock, collection: backup.Collection
) -> None:
    first = store.put(b"a", b"1")
    clock.advance(100)
    collection.backup(store)
    (hold,) = store.holds.all()
    store.drop_hold(hold.name)
    clock.advance(100)
    hole = store.put(b"a", b"2")
    clock.advance(100)
    third = store.put(b"a", b"3")
    store.gc(before=third)
    collection.backup(store, full=True)
    labels = table([(b"a", third), (b"a", first), (b"b", first)])
    assert pairs(collection.join(labels)) == [(b"3", third), (b"1", first), (None, None)]
    lost = table([(b"a", third), (b"a", hole)])
    with pytest.raises(HistoryGoneError, match="row 1, key b'a'"):
        collection.join(lost).read_all()
    assert pairs(collection.join(lost, on_gone="null")) == [(b"3", third), (None, None)]


def test_labels_above_the_newest_backup_are_not_written_yet(
    store: Store, clock: ManualClock, collection: backup.Collection
) -> None:
    with pytest.raises(UsageError, match="no backup"):
        collection.join(table([]))
    at = store.put(b"a", b"1")
    collection.backup(store)
    late = table([(b"a", at), (b"b", collection.upper)])
    with pytest.raises(NotYetWrittenError, match="row 1, key b'b'"):
        collection.join(late).read_all()
    keys = pa.table({"id": ["a", "b"]})
    assert collection.join(keys, at=None).read_all()["value"].to_pylist() == [b"1", None]


def test_an_open_join_keeps_its_parts_from_compaction_and_expiry(
    store: Store, clock: ManualClock, collection: backup.Collection
) -> None:
    times = []
    for value in range(20):
        times.append(store.put(b"k%d" % (value % 3), b"%d" % value))
        clock.advance(100)
        if value % 4 == 3:
            collection.backup(store)
    labels = table([(b"k0", at) for at in times])
    expected = collection.join(labels).read_all()
    with bounds(JOIN_COLUMNS_ROWS_MAX=3):
        reader = collection.join(labels)
        other = backup.Collection(collection.url, clock=clock)
        other.compact()
        other.expire(before=times[10])
        assert reader.read_all().equals(expected)
    other.expire(before=times[10])
    with pytest.raises(HistoryGoneError):
        collection.join(labels).read_all()


def test_only_the_row_groups_that_labels_touch_are_read(
    store: Store, collection: backup.Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.transaction() as txn:
        for number in range(400):
            txn.put(b"%03d" % number, b"v" * 20)
    at = store.upper - 1
    store.put(b"zzzz", b"")
    with bounds(ROW_GROUP_ROWS_MAX=10):
        collection.backup(store)
    read: list[tuple[int, list[str]]] = []
    plain = pq.ParquetFile.read_row_group

    def noted(
        file: pq.ParquetFile, number: int, *, columns: list[str], use_threads: bool
    ) -> pa.Table:
        read.append((number, columns))
        return plain(file, number, columns=columns, use_threads=use_threads)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    labels = table([(b"015", at), (b"015", at + 1), (b"/", at), (b"zzzzz", at)])
    assert [value for value, _ in pairs(collection.join(labels))] == [b"v" * 20] * 2 + [None] * 2
    ((number, keys), (other, values)) = read
    assert (number, keys, values) == (other, ["key", "timestamp"], ["value"])


@pytest.mark.parametrize("whole_bytes_max", [0, PART_WHOLE_BYTES_MAX], ids=["fetched", "whole"])
def test_a_file_of_a_part_is_read_in_one_thread(
    store: Store,
    collection: backup.Collection,
    monkeypatch: pytest.MonkeyPatch,
    whole_bytes_max: int,
) -> None:
    """Two threads that read one `ParquetFile` end in a false report of damage, or in a crash. A
    join once read values by the same `ParquetFile` as the thread that read the next keys."""
    count = 90
    with store.transaction() as txn:
        for number in range(count):
            txn.put(b"%02d" % number, b"v%d" % number)
    at = store.upper - 1
    used: list[tuple[pq.ParquetFile, int]] = []
    plain = pq.ParquetFile.read_row_group

    def noted(file: pq.ParquetFile, number: int, **options: Any) -> pa.Table:
        used.append((file, threading.get_ident()))
        return plain(file, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    with bounds(ROW_GROUP_ROWS_MAX=3, PART_WHOLE_BYTES_MAX=whole_bytes_max):
        collection.backup(store)
        joined = collection.join(table([(b"%02d" % number, at) for number in range(count)]))
        assert [value for value, _ in pairs(joined)] == [b"v%d" % n for n in range(count)]
    assert len({thread for _, thread in used}) > 1
    threads: dict[int, set[int]] = {}
    for file, thread in used:
        threads.setdefault(id(file), set()).add(thread)
    assert all(len(each) == 1 for each in threads.values())


def test_several_sources_stand_side_by_side(
    store: Store, clock: ManualClock, tmp_path: Path, collection: backup.Collection
) -> None:
    old = store.put(b"a", b"1")
    collection.backup(store)
    clock.advance(100)
    with kvstore.open(tmp_path / "other", clock=clock) as other:
        other.put(b"u", b"x")
        clock.advance(100)
        new = store.put(b"a", b"2")
        other.put(b"w", b"y")
        labels = pa.table({"id": ["a", "a"], "user": ["u", "w"], "ts": [old, new]})
        labels = labels.set_column(2, "ts", labels["ts"].cast(pa.timestamp("ns", "UTC")))
        store.put(b"b", b"")
        with store.snapshot(as_of=new) as snapshot:
            joins = [
                Join(snapshot, columns=("now", "now_at")),
                Join(other, key="user", prefix="user_"),
                Join(collection, prefix="old_"),
            ]
            with pytest.raises(NotYetWrittenError):  # the collection ends below row 1
                kvstore.join(labels, joins).read_all()
            joined = kvstore.join(labels, joins[:2]).read_all()
            assert joined.column_names[3:] == [
                "now",
                "now_at",
                "user_value",
                "user_value_timestamp",
            ]
            assert joined["now"].to_pylist() == [b"1", b"2"]
            assert joined["user_value"].to_pylist() == [None, b"y"]
            with pytest.raises(UsageError, match="two sources add a column 'value'"):
                kvstore.join(labels, [store, other])
            with pytest.raises(UsageError, match="no source"):
                kvstore.join(labels, [])
            with pytest.raises(UsageError, match="not dict"):
                kvstore.join(labels, [{}])  # type: ignore[list-item]
            early = labels.slice(0, 1)
            assert kvstore.join(early, joins).read_all()["old_value"].to_pylist() == [b"1"]


def test_a_damaged_part_is_named(store: Store, collection: backup.Collection) -> None:
    at = store.put(b"a", b"1" * 1000)
    collection.backup(store)
    (part,) = (part for batch in collection.batches() for part in batch.parts)
    (file,) = Path(collection.url).rglob(part.name.rpartition("/")[2] + "*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="part"):
        collection.join(table([(b"a", at)])).read_all()


def test_many_range_deletes_over_one_key_hide_what_they_should(
    store: Store, clock: ManualClock, collection: backup.Collection
) -> None:
    """Ranges nest, cross, abut and share times with one another, in two windows."""
    pick = random.Random(seed_of(SEED, None))
    times = []
    for number in range(300):
        clock.advance(10)
        low, high = sorted(pick.sample(range(100), 2))
        with store.transaction() as txn:
            txn.put(b"%02d" % pick.randrange(100), b"%d" % number)
            if pick.random() < 0.6:
                txn.delete_range(b"%02d" % low, b"%02d" % high)
        times.append(int(store.upper) - 1)
        if number == 150:
            collection.backup(store)
    collection.backup(store)
    labels = table([(b"%02d" % pick.randrange(100), pick.choice(times)) for _ in range(3000)])
    assert collection.join(labels).read_all().equals(store.join(labels).read_all())
