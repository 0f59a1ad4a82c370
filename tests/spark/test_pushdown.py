"""Filters on keys narrow what tasks read: counted rows, and the same answers as without them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import kvstore
from kvstore import Span
from kvstore.backup import Collection
from kvstore.engine import FileSpan
from kvstore.errors import UsageError
from kvstore.spark import lookup_join, read_where, register, tuple_key
from kvstore.spark.format_options import read_options
from kvstore.spark.origins import CheckpointOrigin
from kvstore.spark.pushdown import checked, common, from_text, joined, key_spans, to_text
from kvstore.spark.read import CHANGES, STATE, QueryReader, ReadPartition
from tests.spark.test_origins import KEYS, write_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 5000


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a collection with the same rows."""
    directory = tmp_path_factory.mktemp("places")
    with kvstore.open(directory / "store", durability="async") as store:
        store.put_many({b"k%04d" % number: b"v" for number in range(ROWS)})
        Collection(directory / "collection").backup(store)
        store.checkpoint(directory / "checkpoint")
    return directory


def read(path: Path, *filters: Any, **more: str) -> list[dict[str, Any]]:
    """The rows that the tasks of a read give to Spark, which then filters them again."""
    is_feed = "readChangeFeed" in more
    if filters:
        more["filters"] = to_text(checked(filters))
    options = read_options({"path": str(path), **more}, "changes" if is_feed else "state")
    reader = QueryReader(options, CHANGES if is_feed else STATE, changes=is_feed)
    parts = reader.partitions()
    batches = [
        batch for part in parts if isinstance(part, ReadPartition) for batch in reader.read(part)
    ]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def test_in_reads_only_its_keys_out_of_a_checkpoint(places: Path) -> None:
    wanted = [b"k0003", b"k4999", b"k2500", b"absent"]
    for partitions in ("1", "7"):
        found = read(places / "checkpoint", ("key", "in", wanted), numPartitions=partitions)
        assert [row["key"] for row in found] == [b"k0003", b"k2500", b"k4999"]


def test_filters_that_leave_no_key_read_nothing(places: Path) -> None:
    for filters in (
        [("key", "in", [])],
        [("key", "in", [b"a", b"b"]), ("key", "in", [b"c"])],
        [("key", "in", [b"k0001"]), ("key", ">=", b"k0002")],
        [("key", "startswith", b"k1"), ("key", "<", b"k1")],
        [("key", "startswith", b"k1"), ("key", "startswith", b"k2")],
    ):
        assert read(places / "checkpoint", *filters) == []


def test_bounds_and_in_narrow_together(places: Path) -> None:
    filters = [
        ("key", "in", [b"k0001", b"k0500", b"k0900"]),
        ("key", ">=", b"k0002"),
        ("key", "<", b"k0900"),
    ]
    found = read(places / "checkpoint", *filters)
    # The bound of LessThan includes its end: a bound may be wider than its filter, never narrower.
    assert [row["key"] for row in found] == [b"k0500", b"k0900"]
    assert [row["key"] for row in read(places / "checkpoint", ("key", "=", b"k7"))] == []


def test_keys_of_one_row_group_are_read_with_it_once(places: Path) -> None:
    found = read(places / "collection", ("key", "in", [b"k0003", b"k0005"]))
    assert [row["key"] for row in found] == [b"k0003", b"k0004", b"k0005"]
    files = [FileSpan(b"a", b"f", 1), FileSpan(b"g", b"m", 1)]
    keys = key_spans(checked([("key", "in", [b"h", b"b", b"e", b"z", b"i"])]))
    spans = list(joined(common(keys, Span(b"b", b"y")), files))
    assert spans == [Span(b"b", b"e\0"), Span(b"h", b"i\0")]


def test_ranges_read_their_keys_alone_out_of_every_place(places: Path) -> None:
    ranges = '["k000", ["k0100", "k0103"], ["k4998", null], "none"]'
    wanted = [b"k%04d" % n for n in (*range(10), 100, 101, 102, 4998, 4999)]
    for name in ("checkpoint", "collection"):
        for partitions in ("1", "7"):
            more = {"ranges": ranges, "numPartitions": partitions}
            assert [row["key"] for row in read(places / name, **more)] == wanted
            keys = [b"k0003", b"k0101", b"k2000"]
            filters = [("key", "in", keys), ("key", "<", b"k0102")]
            found = [row["key"] for row in read(places / name, *filters, **more)]
            # A row group that holds two of the keys is read between them, inside each range alone.
            assert [key for key in found if key in keys] == [b"k0003", b"k0101"]
            assert set(found) <= set(wanted)


@pytest.mark.parametrize("more", [{}, {"includePreimage": "true"}, {"revisions": "latest"}])
def test_changes_of_ranges_are_the_changes_of_each(tmp_path: Path, more: dict[str, str]) -> None:
    pick = random.Random(6)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        write_history(store, tmp_path, pick, steps=40)
    feed = {"readChangeFeed": "true", "startingTimestamp": "0", "keyEncoding": "hex", **more}
    starts, ends = (b"", b"a\x01", b"b"), (b"a\x00", b"aaa", b"b\x78")
    pairs = [[start.hex(), end.hex()] for start, end in zip(starts, ends, strict=True)]
    for name in ("checkpoint", "collection"):
        found = read(tmp_path / name, ranges=json.dumps(pairs), numPartitions="3", **feed)
        each = [
            row
            for start, end in pairs
            for row in read(tmp_path / name, startKey=start, endKey=end, **feed)
        ]
        assert found
        assert sorted(map(str, found)) == sorted(map(str, each))


@pytest.mark.parametrize("more", [{}, {"includePreimage": "true"}, {"revisions": "latest"}])
def test_in_gives_the_same_changes_as_a_filter_behind_the_read(
    tmp_path: Path, more: dict[str, str]
) -> None:
    pick = random.Random(5)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        write_history(store, tmp_path, pick, steps=40)
    feed = {"readChangeFeed": "true", "startingTimestamp": "0", **more}
    for name in ("checkpoint", "collection"):
        everything = read(tmp_path / name, **feed)
        for _ in range(5):
            keys = pick.sample(KEYS, 3)
            found = read(tmp_path / name, ("key", "in", keys), numPartitions="3", **feed)
            kept = [row for row in found if row["key"] in keys]
            wanted = [row for row in everything if row["key"] in keys]
            assert sorted(map(str, kept)) == sorted(map(str, wanted))


@pytest.mark.spark
def test_a_key_of_several_columns_is_named_after_them(spark: Any) -> None:
    df = spark.sql("SELECT 'AA' AS carrier, 7 AS flight")
    assert df.select(tuple_key("carrier", "flight")).columns == ["tuple_key(carrier, flight)"]


def counted(df: DataFrame) -> int:
    """The rows that the tasks of a query give to Spark. Runs the query."""
    execution = df._jdf.queryExecution()
    execution.executedPlan().executeCollect()
    nodes = [execution.executedPlan()]
    for node in nodes:
        if node.nodeName().startswith("BatchScan"):
            return int(node.metrics().apply("numOutputRows").value())
        children = node.children()
        nodes += [children.apply(number) for number in range(children.size())]
    raise AssertionError(df._jdf.queryExecution().toString())


@pytest.mark.spark
def test_filters_read_their_keys_alone_and_each_query_has_its_own_rows(
    spark: SparkSession, places: Path
) -> None:
    """A frame is used by several queries, and twice by one. With the filters that Spark passes to
    Python sources, the second query read the keys of the first."""
    copy, key = str(places / "checkpoint"), F.col("key")
    ends = [[("key", "startswith", b"k001")], [("key", ">=", b"k4990"), ("key", "<", b"k4995")]]
    df = read_where(spark, copy, ends)
    assert counted(df.where(key == b"k0010")) == 16  # with the end, which Spark then drops
    assert df.where(key == b"k0010").union(df.where(key > b"k4990")).count() == 1 + 4
    assert df.count() == 15
    whole = spark.read.format("kvstore").load(copy)
    assert whole.where(key < b"k0010").union(whole.where(key >= b"k4990")).count() == 20
    assert whole.count() == ROWS
    assert counted(read_where(spark, copy, [("key", "in", [b"k0001", b"k4000", b"none"])])) == 2
    ranges = '["k001", ["k4998", null]]'
    assert counted(spark.read.format("kvstore").option("ranges", ranges).load(copy)) == 12
    # A limit ends the task.
    assert counted(whole.limit(3)) == 3
    few = spark.createDataFrame([(b"k0003",), (b"k4000",)], "id binary")
    looked = lookup_join(few, copy, "id")
    assert sorted(bytes(row.f_value) for row in looked.collect()) == [b"v", b"v"]
    assert "BatchScan" not in looked._jdf.queryExecution().toString()


def test_registered_sources_get_no_filters_of_spark(spark: SparkSession, places: Path) -> None:
    """A session that lets Spark push filters to Python sources makes no difference."""
    name = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, "true")
    try:
        register(spark)
        df = spark.read.format("kvstore").load(str(places / "checkpoint"))
        assert df.where("key < X'6b30303130'").count() == 10
        assert df.count() == ROWS
    finally:
        spark.conf.set(name, before or "false")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "filters []; pass [("),
        (["key"], "filters ['key']"),
        ([("key", "=")], "a filter ('key', '=')"),
        ([("key", "like", "a")], "the operators are = < <= > >= in startswith"),
        ([("key", "in", b"a")], "pass a list of values to in"),
        ([("key", "startswith", 1)], "pass a text, or bytes"),
        ([("key", "=", None)], "a filter with a NoneType"),
        ([("key", "in", [b"%d" % n for n in range(10_001)])], "10,001 values; at most 10,000"),
    ],
)
def test_filters_of_another_form_are_refused(given: Any, told: str) -> None:
    with pytest.raises(UsageError) as refusal:
        checked(given)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_text_of_filters_gives_the_same_filters() -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=timezone.utc)
    values = [
        b"\xff",
        "é",
        2**70,
        0.5,
        True,
        at,
        at.date(),
        at.time(),
        Decimal("1.50"),
        UUID(int=7),
    ]
    filters = checked([[("a", "==", value)] for value in values] + [[("a", "in", values)]])
    assert from_text(to_text(filters)) == filters
    for text in ("", "{}", "[[[]]]", '{"bytes": 1}', '[["a", "=", {"bytes": "x"}]]', "[" * 10**5):
        with pytest.raises(UsageError):
            from_text(text)
    for text in ('[["a", "=", {"date": "x"}]]', '[["a", "=", {"decimal": "x"}]]', "[[1, 2, 3]]"):
        with pytest.raises(UsageError, match="filter"):
            from_text(text)


def test_a_task_reads_no_further_than_spark_asks(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    state = CheckpointOrigin.state

    def watched(*args: Any) -> Iterator[pa.RecordBatch]:
        for batch in state(*args):
            given.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(CheckpointOrigin, "state", watched)
    options = read_options({"path": str(places / "checkpoint"), "batchRows": "100"}, "state")
    reader = QueryReader(options, STATE, changes=False)
    (part,) = reader.partitions()
    rows = reader.read(part)
    first = next(rows)
    assert given == [first.num_rows]
    assert first.num_rows <= 100
