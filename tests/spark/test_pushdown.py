"""Filters on keys narrow what tasks read: counted rows, and the same answers as without them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, In, LessThan

import kvstore
from backup import Collection
from kvstore import Span
from kvstore.engine import FileSpan
from spark_connector import tuple_key
from spark_connector.options import read_options
from spark_connector.reading.partitions import ReadPartition
from spark_connector.reading.pushdown import key_spans
from spark_connector.reading.query import PushdownQueryReader
from spark_connector.reading.schema import CHANGES, STATE
from tests.spark.test_origins import KEYS, write_history

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


def read(path: Path, *filters: Filter, **more: str) -> list[dict[str, Any]]:
    """The rows that the tasks of a read give to Spark, which then filters them again."""
    is_feed = "readChangeFeed" in more
    options = read_options({"path": str(path), **more}, "changes" if is_feed else "state")
    reader = PushdownQueryReader(options, CHANGES if is_feed else STATE, changes=is_feed)
    assert list(reader.pushFilters(list(filters))) == list(filters)
    parts = reader.partitions()
    batches = [
        batch for part in parts if isinstance(part, ReadPartition) for batch in reader.read(part)
    ]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def test_in_reads_only_its_keys_out_of_a_checkpoint(places: Path) -> None:
    wanted = [b"k0003", b"k4999", b"k2500", b"absent", None]
    for partitions in ("1", "7"):
        found = read(places / "checkpoint", In(("key",), wanted), numPartitions=partitions)
        assert [row["key"] for row in found] == [b"k0003", b"k2500", b"k4999"]


def test_filters_that_leave_no_key_read_nothing(places: Path) -> None:
    for filters in (
        [In(("key",), [])],
        [In(("key",), [None])],
        [In(("key",), [b"a", b"b"]), In(("key",), [b"c"])],
        [In(("key",), [b"k0001"]), GreaterThanOrEqual(("key",), b"k0002")],
    ):
        assert read(places / "checkpoint", *filters) == []


def test_bounds_and_in_narrow_together(places: Path) -> None:
    filters = [
        In(("key",), [b"k0001", b"k0500", b"k0900"]),
        GreaterThanOrEqual(("key",), b"k0002"),
        LessThan(("key",), b"k0900"),
    ]
    found = read(places / "checkpoint", *filters)
    # The bound of LessThan includes its end: a bound may be wider than its filter, never narrower.
    assert [row["key"] for row in found] == [b"k0500", b"k0900"]
    assert [row["key"] for row in read(places / "checkpoint", EqualTo(("key",), b"k7"))] == []


def test_keys_of_one_row_group_are_read_with_it_once(places: Path) -> None:
    found = read(places / "collection", In(("key",), [b"k0003", b"k0005"]))
    assert [row["key"] for row in found] == [b"k0003", b"k0004", b"k0005"]
    files = [FileSpan(b"a", b"f", 1), FileSpan(b"g", b"m", 1)]
    spans = key_spans([b"h", b"b", b"e", b"z", b"i"], Span(b"b", b"y"), files)
    assert spans == [Span(b"b", b"e\0"), Span(b"h", b"i\0")]


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
            found = read(tmp_path / name, In(("key",), keys), numPartitions="3", **feed)
            kept = [row for row in found if row["key"] in keys]
            wanted = [row for row in everything if row["key"] in keys]
            assert sorted(map(str, kept)) == sorted(map(str, wanted))


@pytest.mark.spark
def test_a_key_of_several_columns_is_named_after_them(spark: Any) -> None:
    df = spark.sql("SELECT 'AA' AS carrier, 7 AS flight")
    assert df.select(tuple_key("carrier", "flight")).columns == ["tuple_key(carrier, flight)"]
