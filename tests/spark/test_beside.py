"""Jobs of Spark beside a service: Spark builds files, and the owner of the store adds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.bulk.served import import_verbs
from kvstore.errors import AccessDeniedError, NotUniqueError, TableAlteredError
from kvstore.opening import open_read_only
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.spark import batch_importer, bulk_import
from kvstore.spark.jobs.backup import backup
from kvstore.spark.jobs.backup import main as backup_main
from kvstore.spark.jobs.restore import restore_into

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


SECRETS = {"admin": "a" * 32, "write": "w" * 32}
SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string())])


@pytest.mark.parametrize("road", ["beside", "served"])
def test_a_job_loads_a_table_of_a_service_that_serves(
    spark: SparkSession, service: kvstore.Store, tmp_path: Path, road: str
) -> None:
    its = service.table("users", SCHEMA, "id", {"by_mail": kvstore.unique("mail")})
    place, ran = tmp_path / "staging", tmp_path / "ran"
    place.mkdir()

    def touch(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ran.touch()
        yield from batches

    def frame(first: int, count: int) -> DataFrame:
        found = spark.sql(
            f"SELECT id, CONCAT('m', id) AS mail FROM range({first}, {first + count})"
        )
        return found.mapInArrow(touch, found.schema)

    def alter(done: int, known: int) -> None:
        if "late" not in its.schema.names:
            its.alter(add={"late": pa.int32()})

    with ExitStack() as stack:
        tokens = [Token(secret, right) for right, secret in SECRETS.items()]
        served = app(service, tokens, verbs=import_verbs([str(place)]))
        url = stack.enter_context(serving(served, ListenAddress("127.0.0.1", 0))).url
        writer = stack.enter_context(connect(url, SECRETS["write"]))
        with pytest.raises(AccessDeniedError, match="needs the right 'admin'"):
            bulk_import(frame(0, 3), writer.table("users"))
        admin = connect(service.path) if road == "beside" else connect(url, SECRETS["admin"])
        users = stack.enter_context(admin).table("users")
        if road == "served":
            with pytest.raises(AccessDeniedError, match="and not from there"):
                bulk_import(frame(0, 3), users, staging=str(tmp_path / "elsewhere"))
        assert not ran.exists(), "a refusal comes before Spark computes"

        stamp = bulk_import(frame(0, 100), users, import_id=7)
        assert bulk_import(frame(0, 3), users, import_id=7) == stamp
        assert [row["id"] for row in its.find("by_mail", "m42")] == [42]
        assert len(list(its.rows())) == 100
        batch_importer(users, "stream")(frame(100, 5), 0)
        assert len(list(its.rows())) == 105
        with pytest.raises(NotUniqueError, match="mail='m7' is taken by the row id="):
            bulk_import(frame(7, 1).selectExpr("id + 200 AS id", "mail"), users)
        with pytest.raises(TableAlteredError):
            bulk_import(frame(300, 5), users, progress=alter)
        assert len(list(its.rows())) == 105
    assert [each.added is not None for each in service.imports.all()] == [True, True]
    assert not any(place.iterdir())
    assert service.path is not None
    assert not any((service.path / "ingest").iterdir())
