"""DataFrames through a bucket: tasks and the store share nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from obstore.store import ObjectStore

from kvstore import Store, bulk
from kvstore.errors import UsageError
from kvstore.spark import ImportRows, bulk_import, run_import, sorted_rows, stage_import
from kvstore.spark.access import Access
from kvstore.storage.address import open_blob
from tests.shard.conftest import s3_bucket, s3_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["s3_bucket", "s3_server"]
pytestmark = pytest.mark.spark


@pytest.fixture
def bucket(s3_bucket: Callable[[], ObjectStore]) -> str:
    """The URL of a bucket. Every process finds the credentials in its environment."""
    return f"s3://{s3_bucket().config['bucket']}"  # type: ignore[attr-defined]


def place(url: str, server: str) -> Access:
    return Access(url, endpoint=server, region="us-east-1")


def frame(spark: SparkSession, rows: int = 3000) -> DataFrame:
    return spark.range(0, rows, 1, 4).selectExpr("printf('k%06d', id) AS k", "CONCAT('v', id) AS v")


def model(rows: int = 3000) -> dict[bytes, bytes]:
    return {b"k%06d" % n: b"v%d" % n for n in range(rows)}


def test_a_load_goes_through_a_bucket_and_leaves_nothing_there(
    spark: SparkSession, store: Store, bucket: str, s3_server: str
) -> None:
    url = f"{bucket}/staging/run-1"
    rows = ImportRows(frame(spark), "k", "v", partitions=2)
    report = run_import(rows, store, place(url, s3_server))
    assert dict(store.scan(as_of=report.stamp)) == model()
    assert (report.files, report.rows) == (2, 3000)
    assert set(report.stages) == {"compute", "write", "upload", "spark", "fetch", "check", "add"}
    options = {"endpoint": s3_server, "region": "us-east-1"}
    assert [*open_blob(bucket, **options).list()] == []

    url = f"{bucket}/staging/run-2"
    twice = frame(spark).union(frame(spark, 1))
    with pytest.raises(UsageError, match="k000000"):
        bulk_import(twice, store, "k", "v", staging=place(url, s3_server), partitions=2)
    assert [*open_blob(bucket, **options).list()] == []
    with pytest.raises(UsageError, match="max_bytes"):
        stage_import(frame(spark), place(url, s3_server), "k", "v", max_bytes=100)


def test_a_write_stages_in_a_bucket_and_the_store_adds_it(
    spark: SparkSession, store: Store, bucket: str, s3_server: str
) -> None:
    url = f"{bucket}/staging/run-1"
    write = sorted_rows(frame(spark), "k", "v", partitions=2).write.format("kvstore")
    named = {"endpoint": s3_server, "region": "us-east-1"}
    write.options(**named).mode("append").save(url)
    options = {"endpoint": s3_server, "region": "us-east-1"}
    stamp = bulk.ingest(store, url, options=options)
    assert dict(store.scan(as_of=stamp)) == model()
