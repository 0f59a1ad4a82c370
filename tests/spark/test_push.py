"""A DataFrame as a push: its shards hold its rows once, and a waiting job hears from its stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from obstore.store import ObjectStore

import kvstore
from kvstore import ManualClock, bulk
from kvstore.bulk.pushes.pull import Puller
from kvstore.errors import BusyError, UsageError
from kvstore.spark import push, shard_of
from kvstore.spark.access import Access
from tests.pushes.made import build_time
from tests.shard.conftest import s3_bucket, s3_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["s3_bucket", "s3_server"]
pytestmark = pytest.mark.spark


def frame(spark: SparkSession, rows: int = 2000) -> DataFrame:
    return spark.range(0, rows, 1, 4).selectExpr("printf('k%06d', id) AS k", "CONCAT('v', id) AS v")


def test_a_push_reaches_the_stores_of_its_shards(
    spark: SparkSession, s3_server: str, s3_bucket: Callable[[], ObjectStore]
) -> None:
    bucket = s3_bucket().config["bucket"]  # type: ignore[attr-defined]
    url = Access(f"s3://{bucket}/pushes", endpoint=s3_server, region="us-east-1")
    options = {"endpoint": s3_server, "region": "us-east-1"}
    model = {b"k%06d" % n: b"v%d" % n for n in range(2000)}
    with (
        kvstore.open(None, engine="memory") as one,
        kvstore.open(None, engine="memory") as two,
        bulk.pull(one, url.url, name="eu-1", shard=0, every=0.05, options=options),
        bulk.pull(two, url.url, name="eu-2", shard=1, every=0.05, options=options),
    ):
        report = push(
            frame(spark),
            url,
            key="k",
            value="v",
            shards=2,
            partitions=3,
            wait_for=["eu-1", "eu-2"],
            timeout=300,
        )
        assert (report.number, report.rows) == (1, 2000)
        assert {each.name: each.state for each in report.stores} == {
            "eu-1": "added",
            "eu-2": "added",
        }
        assert set(report.stages) == {"compute", "write", "upload", "seal", "spark"}
        assert sum(report.stages.values()) > report.build_seconds - 0.01
        found = [dict(store.scan()) for store in (one, two)]
        assert found[0] | found[1] == model
        assert all(bulk.shard_of(key, 2) == at for at in range(2) for key in found[at])

        built_at = build_time(one, two)
        one.put(b"k1/live", b"newer")
        report = push(
            frame(spark, 1010),
            url,
            key="k",
            value="v",
            shards=2,
            partitions=2,
            mode="replace",
            prefix=b"k",
            keep_newer=True,
            built_at=built_at,
            wait_for=["eu-1", "eu-2"],
            timeout=300,
        )
        assert report.push.mode == "replace"
        kept = {key: model[key] for key in sorted(model)[:1010]}
        assert {**dict(one.scan()), **dict(two.scan())} == {**kept, b"k1/live": b"newer"}

    with pytest.raises(UsageError, match="outside of the span"):
        push(frame(spark, 10), url, key="k", value="v", mode="replace", prefix=b"k000009")
    pushes = bulk.Pushes(url.url, options=options)
    twice = frame(spark, 10).union(frame(spark, 1))
    with pytest.raises(UsageError, match="k000000"):
        push(twice, url, key="k", value="v", shards=2, partitions=2)
    assert len(pushes.list()) == 2
    with pytest.raises(BusyError, match="eu-9"):
        pushes.wait(1, ["eu-9"], timeout=0)


def test_rows_of_a_table_reach_their_shards_with_their_entries(
    spark: SparkSession, tmp_path: Path
) -> None:
    schema = pa.schema([("id", pa.int32()), ("zone", pa.string()), ("fare", pa.float64())])
    url, clock = str(tmp_path / "pushes"), ManualClock(1_700_000_000 * 10**9)
    rows = spark.sql(
        "SELECT id, CONCAT('z', id % 7) AS zone, id / 4 AS fare, "
        "IF(id % 3 = 0, 1700003600000000000L, NULL) AS until FROM range(0, 900, 1, 4)"
    )
    with ExitStack() as opened:
        stores = [
            opened.enter_context(kvstore.open(None, engine="memory", clock=clock)) for _ in range(2)
        ]
        tables = [store.table("trips", schema, "id", {"by_zone": "zone"}) for store in stores]
        report = push(rows, url, table=tables[0], shards=2, partitions=3, expires="until")
        assert report.rows == 2 * 900 + 2 * 2 * 300  # entries, and the records of due times
        for refused, told in (
            (rows.selectExpr("id", "zone AS place"), "has no column 'place'"),
            (rows.selectExpr("id + 2147483000 AS id"), "does not hold 2147483648 of row"),
            (rows.selectExpr("id % 800 AS id"), "the row id=.* of table 'trips' came twice"),
        ):
            with pytest.raises(UsageError, match=told):
                push(refused, url, table=tables[0], shards=2, partitions=3)
        with pytest.raises(UsageError, match="the table has a key"):
            push(rows, url, table=tables[0], key="id", value="zone")
        with pytest.raises(UsageError, match="or push a table"):
            push(rows, url)
        for at, store in enumerate(stores):
            puller = Puller(store, bulk.Pushes(url), name=f"s{at}", shard=at)
            while puller.step():
                pass
        for now in (0, 3600 * 10**9):
            clock.advance(now)
            left = [n for n in range(900) if now == 0 or n % 3]
            assert sorted(row["id"] for table in tables for row in table.rows()) == left
            for table in tables:
                ids = [row["id"] for row in table.rows() if row["zone"] == "z3"]
                assert [row["id"] for row in table.find("by_zone", "z3")] == ids
                assert len(ids) > 30
        assert all(not store.verify().problems for store in stores)


def test_shards_are_the_same_in_spark_and_in_python(spark: SparkSession) -> None:
    rows = frame(spark, 500).select("k", shard_of("k", 7).alias("shard")).collect()
    assert all(row.shard == bulk.shard_of(row.k.encode(), 7) for row in rows)
