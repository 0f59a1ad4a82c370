"""Jobs of Spark beside a service: Spark builds files, and the owner of the store adds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.opening import open_read_only
from kvstore.spark import bulk_import
from kvstore.spark.jobs.backup import backup
from kvstore.spark.jobs.backup import main as backup_main
from kvstore.spark.jobs.restore import restore_into

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def service(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", control=True) as store:
        store.put(b"a", b"1")
        yield store


def test_a_job_adds_to_the_store_of_a_service_and_backs_it_up(
    spark: SparkSession, service: kvstore.Store, tmp_path: Path
) -> None:
    collection = tmp_path / "collection"
    rows = spark.createDataFrame([("b", "2"), ("c", "3")], "key string, value string")
    with kvstore.connect(service.path) as client:
        stamp = bulk_import(rows, client, "key", "value", import_id=7)
        assert bulk_import(rows, client, "key", "value", import_id=7) == stamp
        expected = {b"a": b"1", b"b": b"2", b"c": b"3"}
        assert dict(service.scan(as_of=stamp)) == expected
        assert backup(spark, client, collection).rows == 3
        assert not list(tmp_path.glob(".*.copied-*"))
        service.put(b"a", b"4")
        assert backup_main([str(service.path), str(collection)]) == 0
        assert Collection(collection).verify("contents", service).rows >= 4
        service.delete(b"c")
        restore_into(spark, collection, client, prefix="c")
        assert service.get(b"c") == b"3"
    with open_read_only(tmp_path / "store") as reader:
        assert dict(reader.scan()) == dict(service.scan())
