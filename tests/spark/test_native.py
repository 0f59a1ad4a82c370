"""`read_collection`: the rows of the store, whether Spark's own scan reads them or our source."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import kvstore
from kvstore import Span, Store, Timestamp
from kvstore.backup import Collection
from kvstore.backup.shard.rows import batch_writer
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.spark import read as native
from kvstore.spark import read_collection
from kvstore.spark.access import Access
from kvstore.spark.jobs import backup as backup_job
from kvstore.spark.jobs import compact as compact_job
from kvstore.spark.origins import CollectionOrigin, find
from tests.harness.soak import soaked
from tests.spark.test_origins import KEYS, spans, write_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READS_A_JOB = 12
"""Every read is a plan of its own. Jobs cost more than plans, so one job makes this many reads."""


class Asked(NamedTuple):
    frame: DataFrame
    span: Span
    as_of: int


def compared(store: Store, reads: Sequence[Asked]) -> None:
    """All reads give the answers of the store."""
    from pyspark.sql import functions as F  # noqa: N812

    for first in range(0, len(reads), READS_A_JOB):
        some = reads[first : first + READS_A_JOB]
        frames = [each.frame.withColumn("read", F.lit(n)) for n, each in enumerate(some)]
        found: list[list[tuple[bytes, bytes]]] = [[] for _ in some]
        for row in reduce(lambda a, b: a.unionByName(b), frames).collect():
            found[row.read].append((bytes(row.key), bytes(row.value)))
        for each, rows in zip(some, found, strict=True):
            expected = list(store.scan(each.span.start, each.span.end, as_of=each.as_of))
            assert sorted(rows) == expected, (each.span, each.as_of)


def plan_of(path: str, span: Span, as_of: int) -> native.Scan | str:
    access = Access.of(path)
    with CollectionOrigin(find(access), [as_of]) as origin:
        return native.plan(origin, access, span, as_of)


def asked(spark: SparkSession, path: str, span: Span, as_of: int) -> Asked:
    frame = read_collection(spark, path, as_of, start=span.start, end=span.end)
    return Asked(frame, span, as_of)


@pytest.mark.parametrize("seed", [1, 2, 5, *soaked(0, 3, 4)])
def test_random_histories_read_as_the_store_reads_them(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_writer, "ROW_GROUP_ROWS_MAX", 5)
    if seed % 3 == 2:  # versions of a key in two parts
        monkeypatch.setattr(batch_writer, "PART_BYTES_MAX", 600)
    pick = random.Random(seed)
    path = str(tmp_path / "collection")
    with kvstore.open(tmp_path / "store", durability="async") as store:
        write_history(store, tmp_path, pick, 30)
        collection = Collection(path)
        if seed % 2:
            collection.compact()
        if seed % 3 == 1:
            collection.expire(pick.choice([c.timestamp for c in store.changes(0, order="time")]))
        for _ in range(3):
            store.put(pick.choice(KEYS), b"late")
            store.delete_range(*sorted(pick.sample(KEYS, 2)))
        collection.backup(store)
        times = {change.timestamp for change in store.changes(0, order="time")}
        times = {int(t) for t in times if t >= collection.since} | {int(collection.upper) - 1}
        drawn = pick.sample(sorted(times), min(len(times), 5))
        pairs = [(span, at) for span in spans() for at in drawn]
        compared(store, [asked(spark, path, span, at) for span, at in pairs])
        scans = [isinstance(plan_of(path, span, at), native.Scan) for span, at in pairs]
        assert any(scans) or seed % 3 == 2


class Place(NamedTuple):
    store: Store
    path: str
    first: Timestamp


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A collection of one full backup, of keys with and without history."""
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(300):
                batch.put(b"k%03d" % number, b"v%d" % number)
        first = batch.timestamp
        assert first is not None
        store.put(b"k000", b"changed")
        store.delete(b"k001")
        with store.batch() as batch:
            batch.delete_range(b"k1", b"k2")
            batch.put(b"k15", b"at the time of the delete that it outlives")
        path = str(tmp_path / "odd [x] {y} 100% day=1*")
        Collection(path).backup(store)
        yield Place(store, path, first)


def test_a_backup_with_history_is_scanned_natively_at_any_time(
    spark: SparkSession, place: Place
) -> None:
    store, path, first = place
    found = read_collection(spark, path, native=True)
    assert "kvstore" not in found._jdf.queryExecution().toString()
    assert found.schema == spark.read.format("kvstore").load(path).schema
    whole = Span()
    times = [int(first), int(store.upper) - 1]
    compared(store, [Asked(read_collection(spark, path, t, native=True), whole, t) for t in times])
    only = read_collection(spark, path, prefix=b"k2", columns=["value"], native=True)
    assert only.columns == ["value"]
    assert only.count() == 100


def test_of_rows_only_what_statistics_leave_open_is_looked_at(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "collection")

    def columns(as_of: int | None = None, prefix: bytes | None = None) -> set[str]:
        frame = read_collection(spark, path, as_of, prefix, native=True)
        compared(store, [Asked(frame, Span.of(prefix=prefix), as_of or store.upper - 1)])
        plan = frame._jdf.queryExecution().executedPlan().toString()
        (read,) = re.findall("ReadSchema: struct<(.*)>", plan)
        return {field.partition(":")[0] for field in read.split(",")}

    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(100):
                batch.put(b"k%02d" % number, b"v")
        first = batch.timestamp
        assert first is not None
        Collection(path).backup(store)
        assert columns() == columns(prefix=b"k5") == {"key", "value"}
        later = store.put(b"k50", b"changed")
        Collection(path).backup(store, full=True)
        assert columns(first) == {"key", "value", "timestamp"}
        assert columns(later) == {"key", "value", "until"}
        store.delete(b"k51")
        Collection(path).backup(store, full=True)
        assert columns(later) == {"key", "value", "timestamp", "until", "op"}


def test_increments_are_laid_over_the_oldest_backup(spark: SparkSession, place: Place) -> None:
    store, path, first = place
    store.put(b"k002", b"newer")
    store.delete(b"k003")
    store.put(b"new", b"n")
    store.delete_range(b"k25", b"k26")
    store.put(b"k250", b"again")
    Collection(path).backup(store)
    times = [int(first), *(int(c.timestamp) for c in store.changes(first, order="time"))]
    reads = [Asked(read_collection(spark, path, t, native=True), Span(), t) for t in times]
    compared(store, reads)
    plan = reads[-1].frame._jdf.queryExecution().executedPlan().toString()
    assert "BroadcastHashJoin [xxhash64(key" in plan, "a key itself takes longer to look up"


def test_parts_that_tasks_wrote_are_scanned_natively(spark: SparkSession, place: Place) -> None:
    store, path, _ = place
    backup_job.backup(spark, store, path, full=True, tasks=3)
    compared(store, [Asked(read_collection(spark, path, native=True), Span(), store.upper - 1)])
    store.put(b"k002", b"newer")
    Collection(path).backup(store)
    compact_job.compact(spark, path)
    compared(store, [Asked(read_collection(spark, path, native=True), Span(), store.upper - 1)])


def test_a_frame_keeps_the_time_it_was_made_at(spark: SparkSession, place: Place) -> None:
    store, path, _ = place
    for choice in (True, False):
        before = int(store.upper) - 1
        frame = read_collection(spark, path, native=choice)
        store.put(b"later", b"unseen")
        Collection(path).backup(store)
        compared(store, [Asked(frame, Span(), before)])


def test_an_empty_span_and_a_time_before_all_rows_are_empty(
    spark: SparkSession, place: Place
) -> None:
    assert read_collection(spark, place.path, Timestamp(1), native=True).collect() == []
    found = read_collection(spark, place.path, prefix=b"zz", native=True)
    assert (found.columns, found.collect()) == (["key", "value"], [])


def test_what_cannot_be_scanned_goes_to_the_source_and_says_why(
    spark: SparkSession, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path, _ = place

    def refused(reason: str, access: Access | str = path) -> None:
        with pytest.raises(UsageError, match=reason):
            read_collection(spark, access, native=True)
        compared(store, [Asked(read_collection(spark, access), Span(), store.upper - 1)])

    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    Collection(tmp_path / "sealed", key_file=key).backup(store)
    refused("encrypted", Access(str(tmp_path / "sealed"), key_file=str(key)))
    with monkeypatch.context() as patch:
        patch.setattr(batch_writer, "PART_BYTES_MAX", 1)
        patch.setattr(batch_writer, "ROW_GROUP_ROWS_MAX", 1)
        Collection(tmp_path / "cut").backup(store)
    refused("in two parts", str(tmp_path / "cut"))
    store.put(b"k" * 5000, b"a key too long for statistics")
    Collection(tmp_path / "long").backup(store)
    refused("its least and greatest key", str(tmp_path / "long"))
    Collection(path).backup(store)
    with monkeypatch.context() as patch:
        patch.setattr(native, "NEWER_ROWS_MAX", 0)
        refused("1 changes behind")
        patch.setattr(native, "NEWER_ROWS_MAX", 9)
        patch.setattr(native, "NEWER_BYTES_MAX", 0)
        refused("bytes behind")
    monkeypatch.setattr(native, "COVER_MAX", 0)
    refused("range deletes")


def test_times_and_places_that_are_not_there_are_refused(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    store, path, first = place
    with pytest.raises(UsageError, match=r"as_of=5 is 1970-.*versions are nanoseconds"):
        read_collection(spark, path, 5)
    with pytest.raises(NotYetWrittenError):
        read_collection(spark, path, int(store.upper) + 10**9)
    Collection(path).expire(int(store.upper) - 1)
    with pytest.raises(HistoryGoneError):
        read_collection(spark, path, first)
    store.checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match="is no collection"):
        read_collection(spark, str(tmp_path / "checkpoint"))


def test_a_part_that_is_gone_fails_the_query(spark: SparkSession, place: Place) -> None:
    """This also holds in a session that ignores missing files, because fewer rows would be a wrong
    answer."""
    store, path, _ = place
    frame = read_collection(spark, path, native=True)
    store.put(b"another", b"one")
    Collection(path).backup(store)
    compact_job.compact(spark, path)
    for part in Path(path).glob("blob/*/part/*"):
        part.unlink()
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with pytest.raises(Exception, match="FILE_NOT_EXIST"):
            frame.collect()
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")


def test_a_flipped_bit_fails_the_query(spark: SparkSession, tmp_path: Path) -> None:
    """The values do not compress, so only the checksums of pages can show the damage."""
    pick = random.Random(3)
    path = tmp_path / "collection"
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(4000):  # a part that planning does not read as a whole
                batch.put(b"k%04d" % number, pick.randbytes(500))
        Collection(path).backup(store)
    (file,) = path.glob("blob/*/part/*.parquet")
    whole = file.read_bytes()
    for at in (len(whole) // 3, len(whole) // 2, len(whole) * 4 // 5):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        frame = read_collection(spark, str(path), native=True)
        with pytest.raises(Exception, match=r"(?i)crc|checksum"):
            frame.collect()
    file.write_bytes(whole)
    assert read_collection(spark, str(path), native=True).count() == 4000
