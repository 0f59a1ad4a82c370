"""Loading DataFrames: exactly the rows of the frame, once, at one timestamp, or nothing at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import functions

import kvstore
from kvstore import Store, bulk
from kvstore.errors import LoadRefusedError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.spark import ImportRows, bulk_import, run_import, sorted_rows, stage_import
from kvstore.spark.load import INPUT_TASKS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
from tests.spark.frames import ROWS, frame, random_rows


def test_random_keys_of_all_bytes_come_back_in_order_at_one_timestamp(
    spark: SparkSession, store: Store
) -> None:
    rows = random_rows(1, 5000)
    before = store.put(b"before", b"1")
    stamp = bulk_import(frame(spark, rows), store, "key", "value", partitions=5)
    assert store.upper == stamp + 1
    assert list(store.scan(as_of=before)) == [(b"before", b"1")]
    assert list(store.scan()) == sorted({b"before": b"1", **rows}.items())
    assert {v.timestamp for v in store.changes(before)} == {stamp}
    assert not any((store.path / "ingest").iterdir())  # type: ignore[operator]


def test_a_load_that_does_not_pass_its_gate_is_refused_and_stays(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    rows = random_rows(7, 200)
    staging, gate = tmp_path / "staging", {"rows": {"least": len(rows) + 1}}
    df = frame(spark, rows)
    with pytest.raises(LoadRefusedError, match="rows is"):
        bulk_import(df, store, "key", "value", staging, check=gate)
    assert store.count() == 0
    assert bulk.read_manifest(staging).rows == len(rows)
    again = tmp_path / "again"
    bulk_import(df, store, "key", "value", again, check=gate, force=bulk.Force("known", by="ann"))
    [record] = store.imports.all()
    assert '"by": "ann"' in record.report
    assert store.count() == len(rows)


def test_parts_are_disjoint_ascending_and_hold_all_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = random_rows(2, 2000)
    manifest = stage_import(frame(spark, rows), tmp_path / "s", "key", "value", partitions=4)
    assert manifest.rows == len(rows)
    assert len(manifest.parts) == 4
    for before, after in zip(manifest.parts, manifest.parts[1:], strict=False):
        assert before.largest < after.smallest


def test_hot_key_goes_to_one_part_and_last_takes_its_greatest_order(
    spark: SparkSession, store: Store
) -> None:
    df = spark.sql(
        "SELECT IF(id % 2 = 0, X'686f74', CAST(CAST(id AS STRING) AS BINARY)) AS key, "
        "CAST(CAST(id AS STRING) AS BINARY) AS value, id AS version FROM range(0, 9000, 1, 5)"
    )
    bulk_import(df, store, "key", "value", partitions=4, duplicates="last", order_by="version")
    assert store.get(b"hot") == b"8998"
    assert sum(1 for _ in store.scan()) == 4501


def test_among_equal_orders_the_greatest_value_is_taken(spark: SparkSession, store: Store) -> None:
    df = spark.sql(
        "SELECT X'6b' AS key, CAST(lpad(CAST(id AS STRING), 4, '0') AS BINARY) AS value "
        "FROM range(0, 3000, 1, 6)"
    )
    bulk_import(df, store, "key", "value", duplicates="last", order_by=df.key)
    assert list(store.scan()) == [(b"k", b"2999")]


def test_among_equal_orders_a_put_counts_however_the_rows_come(
    spark: SparkSession, store: Store
) -> None:
    """This also holds where a deletion carries the deleted value."""
    puts = "SELECT CAST(id AS STRING) AS key, '1' AS value, 'put' AS op FROM range(9)"
    deletes = puts.replace("'put'", "'delete'").replace("'1'", "IF(id < 5, '1', '2')")
    for query in (f"{puts} UNION ALL {deletes}", f"{deletes} UNION ALL {puts}"):
        df = spark.sql(query)
        bulk_import(df, store, "key", "value", op="op", duplicates="last", order_by="key")
        assert dict(store.scan()) == {b"%d" % n: b"1" for n in range(9)}


def test_empty_frame_adds_an_import_without_rows(spark: SparkSession, store: Store) -> None:
    stamp = bulk_import(spark.createDataFrame([], ROWS), store, "key", "value")
    assert store.upper == stamp + 1
    assert list(store.scan()) == []


def test_more_partitions_than_rows_leave_no_empty_files(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    rows = {b"a": b"1", b"b": b"2", b"c": b"3"}
    manifest = stage_import(frame(spark, rows), tmp_path / "s", "key", "value", partitions=16)
    assert 1 <= len(manifest.parts) <= 3
    bulk.ingest(store, tmp_path / "s")
    assert dict(store.scan()) == rows


def test_longest_keys_and_a_value_of_64_mib(spark: SparkSession, store: Store) -> None:
    keys = [b"k" * KEY_BYTES_MAX, b"k" * (KEY_BYTES_MAX - 1), b"\x00" * KEY_BYTES_MAX]
    small = frame(spark, dict.fromkeys(keys, b"v"))
    # The value depends on a column, so that Spark does not compute it while planning and print it
    # in its plans.
    large = spark.sql(
        "SELECT X'6c' AS key, CAST(repeat('x', CAST(67108864 + id AS INT)) AS BINARY) AS value "
        "FROM range(1)"
    )
    bulk_import(small.union(large), store, "key", "value", partitions=2)
    assert [key for key, _ in store.scan()] == sorted([*keys, b"l"])
    assert store.get(b"l") == b"x" * (64 << 20)


def test_strings_and_expressions_are_keys_and_values(spark: SparkSession, store: Store) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    df = spark.createDataFrame([("b", 2), ("ä", 3), ("a", 1)], "name string, n int")
    bulk_import(df, store, key="name", value=F.concat(F.lit("n="), F.col("n").cast("string")))
    assert list(store.scan()) == [(b"a", b"n=1"), (b"b", b"n=2"), ("ä".encode(), b"n=3")]


def test_orphans_of_other_attempts_are_never_added(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    rows = random_rows(3, 500)
    staging = tmp_path / "s"
    manifest = stage_import(frame(spark, rows), staging, "key", "value", partitions=2)
    for number, part in enumerate(manifest.parts):  # a speculative twin that finished its file too
        shutil.copy(staging / part.name, staging / f"part-{number:032x}.sst")
    with bulk.PartWriter(staging, manifest.import_id) as twin:
        twin.put(b"of a twin", b"never seen")
    (staging / "part-dead.sst.tmp").write_bytes(b"half")
    bulk.ingest(store, staging)
    assert dict(store.scan()) == rows


def _failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if b"bad" in batch["key"].to_pylist():
            raise RuntimeError("this row cannot be computed")
        yield batch


def dying(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if b"bad" in batch["key"].to_pylist():
            os._exit(3)
        yield batch


@pytest.mark.parametrize("end", [_failing, dying])
def test_failed_job_leaves_neither_rows_nor_files(
    spark: SparkSession, store: Store, end: object
) -> None:
    df = frame(spark, {**random_rows(4, 300), b"bad": b""})
    with pytest.raises(Exception, match=r"cannot be computed|crashed"):
        bulk_import(df.mapInArrow(end, ROWS), store, "key", "value")  # type: ignore[arg-type]
    assert store.imports.all() == []
    assert not any((store.path / "ingest").iterdir())  # type: ignore[operator]


def test_same_staged_import_added_twice_keeps_its_first_stamp(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    stage_import(frame(spark, {b"a": b"1"}), tmp_path / "s", "key", "value")
    first = bulk.ingest(store, tmp_path / "s")
    store.put(b"a", b"2")
    assert bulk.ingest(store, tmp_path / "s") == first
    assert store.get(b"a") == b"2"


def test_import_survives_a_restart_of_the_store(spark: SparkSession, tmp_path: Path) -> None:
    rows = random_rows(5, 300)
    with kvstore.open(tmp_path / "db") as store:
        stamp = bulk_import(frame(spark, rows), store, "key", "value")
    with kvstore.open(tmp_path / "db") as store:
        assert dict(store.scan(as_of=stamp)) == rows
        assert list(store.scan(as_of=stamp - 1)) == []


def test_several_key_columns_sort_as_the_columns_do(spark: SparkSession, store: Store) -> None:
    from kvstore.codec.tuples import decode_tuple, encode_tuple

    df = spark.sql(
        "SELECT IF(id % 7 = 0, null, concat('c', id % 3)) AS country, 500 - id AS n, "
        "CAST(id AS STRING) AS value FROM range(1000)"
    )
    bulk_import(df, store, key=["country", "n"], value="value", partitions=3)
    found = [decode_tuple(key) for key, _ in store.scan()]
    assert found == [(row.country, row.n) for row in df.orderBy("country", "n").collect()]
    assert len(list(store.scan(prefix=encode_tuple(["c1"])))) == sum(c == "c1" for c, _ in found)


def test_rows_that_delete_leave_tombstones(spark: SparkSession, store: Store) -> None:
    before = store.put(b"a", b"old")
    df = spark.sql(
        "SELECT * FROM VALUES ('a', 'delete', null), ('b', 'put', 'new'), ('c', 'delete', 'x') "
        "AS t(key, op, value)"
    )
    stamp = bulk_import(df, store, "key", "value", op="op")
    assert dict(store.scan()) == {b"b": b"new"}
    assert store.get(b"a", as_of=before) == b"old"
    ops = {change.key: change.op for change in store.changes(before, stamp)}
    assert ops == {b"a": "delete", b"b": "put", b"c": "delete"}


@pytest.mark.parametrize(
    "way", ["bulk_import", pytest.param("last", marks=pytest.mark.soak), "write"]
)
def test_rows_expire_at_the_times_of_a_column(
    spark: SparkSession, tmp_path: Path, way: str
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    rows = spark.sql(
        "SELECT CAST(id AS STRING) AS key, 'v' AS value, IF(id % 2 = 0, NULL, "
        "timestamp_seconds(1700000000 + 60 * id)) AS until FROM range(0, 40, 1, 3)"
    )
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        if way == "write":
            staging = str(tmp_path / "staging")
            sorted_ = sorted_rows(rows, "key", "value", expires="until", partitions=2)
            sorted_.write.format("kvstore").mode("append").save(staging)
            bulk.ingest(store, staging, thorough=True)
        elif way == "last":
            last = {"duplicates": "last", "order_by": "key", "expires": "until"}
            bulk_import(rows, store, "key", "value", **last)  # type: ignore[arg-type]
        else:
            bulk_import(rows, store, "key", "value", expires="until")
        clock.advance(60 * 20 * 10**9)
        alive = {b"%d" % number for number in range(40) if number % 2 == 0 or number > 20}
        assert {key for key, _ in store.scan()} == alive
        assert store.history(b"7")[0].timestamp == (1_700_000_000 + 420) * 10**9
        with pytest.raises(UsageError, match="no time"):
            bulk_import(rows, store, "key", "value", expires="value")


def test_deletions_alone_need_no_column_of_values(spark: SparkSession, store: Store) -> None:
    store.put(b"a", b"old")
    df = spark.sql("SELECT 'a' AS key")
    bulk_import(df, store, "key", functions.lit(None), op=functions.lit("delete"))
    assert list(store.scan()) == []


def test_explicit_splits_are_the_borders_of_the_files(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    rows = random_rows(6, 1500)
    splits = [b"\x00\x01", b"\x40", b"\x80", b"\x80\x00", b"\xff"]
    staging = tmp_path / "s"
    manifest = stage_import(frame(spark, rows), staging, "key", "value", splits=splits)
    for part in manifest.parts:
        assert not any(part.smallest < split <= part.largest for split in splits)
    assert len(manifest.parts) == len(splits) + 1
    bulk.ingest(store, staging)
    assert dict(store.scan()) == rows
    for wrong in ([b"b", b"a"], [b""], [b"a", b"a"]):
        with pytest.raises(UsageError, match="splits do not ascend"):
            stage_import(frame(spark, rows), tmp_path / "t", "key", "value", splits=wrong)


def test_parts_are_about_even_however_the_rows_come(spark: SparkSession, tmp_path: Path) -> None:
    """The first input partition has all low keys, and so a run of its own."""
    df = spark.sql(
        "SELECT CAST(lpad(CAST(id AS STRING), 6, '0') AS BINARY) AS key, X'' AS value "
        "FROM range(0, 40000, 1, 7)"
    )
    manifest = stage_import(df, tmp_path / "s", "key", "value", partitions=5)
    assert [part.rows for part in manifest.parts] == pytest.approx([8000] * 5, rel=0.25)


def test_keys_alike_for_longer_than_what_is_sampled_of_them_are_all_there(
    spark: SparkSession, store: Store
) -> None:
    rows = {b"k" * (1024 + n): b"%d" % n for n in range(200)}
    bulk_import(frame(spark, rows), store, "key", "value", partitions=3)
    assert dict(store.scan()) == rows


def test_rows_beyond_a_tasks_memory_are_sorted_on_disk(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    """Three values of 64 MiB and one of 32, sorted in runs of 32 MiB, merged 64 at a time."""
    df = spark.sql(
        "SELECT CAST(chr(100 - CAST(id AS INT)) AS BINARY) AS key, "
        "CAST(repeat(chr(48 + CAST(id AS INT)), IF(id = 3, 32, 64) * 1048576) AS BINARY) AS value "
        "FROM range(0, 4, 1, 4)"
    )
    stage_import(df, tmp_path / "s", "key", "value", partitions=1)
    assert not list((tmp_path / "s").glob("sorting*"))
    bulk.ingest(store, tmp_path / "s")
    found = {key: (value[:1], len(value) >> 20) for key, value in store.scan()}
    assert found == {b"a": (b"3", 32), b"b": (b"2", 64), b"c": (b"1", 64), b"d": (b"0", 64)}


def test_job_of_a_known_id_is_added_once(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    df = frame(spark, {b"a": b"1"})
    report = run_import(ImportRows(df, "key", "value"), store, import_id=77)
    assert (report.import_id, report.rows, report.files) == (77, 1, 1)
    assert report.bytes == store.imports.all()[0].size_bytes
    assert report.stamp == store.imports.all()[0].added
    never_run = frame(spark, {b"bad": b""}).mapInArrow(_failing, ROWS)
    again = run_import(ImportRows(never_run, "key", "value"), store, import_id=77)
    assert again == replace(report, build_seconds=0.0, add_seconds=0.0)
    stage_import(df, tmp_path / "s", "key", "value", import_id=77)
    with pytest.raises(UsageError, match="used with another manifest; added at"):
        bulk.ingest(store, tmp_path / "s")
    assert len(store.imports.all()) == 1
    store.revert_import(77)
    with pytest.raises(UsageError, match="import 77 was reverted at"):
        run_import(ImportRows(never_run, "key", "value"), store, import_id=77)


def test_job_that_another_thread_ran_meanwhile_returns_its_report(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    df = frame(spark, {b"a": b"1"})
    stage_import(df, tmp_path / "s", "key", "value", import_id=79)

    def add(_done: int, _known: int) -> None:
        if not store.imports.all():
            bulk.ingest(store, tmp_path / "s")

    report = run_import(ImportRows(df, "key", "value"), store, import_id=79, progress=add)
    assert [found.added for found in store.imports.all()] == [report.stamp]
    assert not any((store.path / "ingest").iterdir())  # type: ignore[operator]


def test_job_that_died_while_it_added_is_run_again_by_its_id(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    df = frame(spark, {b"a": b"1"})
    stage_import(df, tmp_path / "s", "key", "value", import_id=78)

    def die(step: str) -> None:
        if step == "add":
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        bulk.ingest(store, tmp_path / "s", progress=die)
    stamp = bulk_import(df, store, "key", "value", import_id=78)
    assert [(found.import_id, found.added) for found in store.imports.all()] == [(78, stamp)]
    assert dict(store.scan()) == {b"a": b"1"}


@pytest.mark.parametrize("order_by", [None, "id"])
def test_many_small_input_partitions_are_read_by_a_bounded_number_of_tasks(
    spark: SparkSession, tmp_path: Path, order_by: str | None
) -> None:
    count, told = 3 * INPUT_TASKS, [0]
    df = spark.sql(
        "SELECT CAST(id AS STRING) AS key, CAST(id AS STRING) AS value, id "
        f"FROM range(0, 900, 1, {count})"
    )
    manifest = stage_import(
        df,
        tmp_path / "s",
        "key",
        "value",
        partitions=3,
        duplicates="error" if order_by is None else "last",
        order_by=order_by,
        progress=lambda done, known: told.append(known),
    )
    # To order rows Spark first samples them, and it counts the tasks of a shuffle twice.
    passes = 1 if order_by is None else 3
    assert manifest.rows == 900
    assert max(told) <= passes * INPUT_TASKS + len(manifest.parts)
    assert df.rdd.getNumPartitions() == count


def test_progress_is_told_and_what_it_raises_is_raised(spark: SparkSession, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    df = frame(spark, {b"a": b"1", b"b": b"2"})
    stage_import(
        df, tmp_path / "s", "key", "value", progress=lambda done, known: told.append((done, known))
    )
    assert told[-1][0] == told[-1][1] > 0

    def fail(done: int, known: int) -> None:
        raise ValueError("the bar is broken")

    with pytest.raises(ValueError, match="the bar is broken"):
        stage_import(df, tmp_path / "t", "key", "value", progress=fail)
    assert not (tmp_path / "t").exists()


def test_tasks_of_a_load_are_described_in_sparks_pages(spark: SparkSession, store: Store) -> None:
    """The value of each row is the description of the job that computes it."""

    @functions.udf("string")
    def described(_: int) -> str | None:
        context = TaskContext.get()
        return None if context is None else context.getLocalProperty("spark.job.description")

    rows = spark.range(1).select(functions.lit("k").alias("key"), described("id").alias("value"))
    bulk_import(rows, store, "key", "value")
    assert (store.get(b"k") or b"").startswith(b"kvstore: sorting rows in ")
    spark.sparkContext.setJobDescription("mine")
    try:
        bulk_import(rows, store, "key", "value")
    finally:
        spark.sparkContext.setLocalProperty("spark.job.description", None)
    assert store.get(b"k") == b"mine"
