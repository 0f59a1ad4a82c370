"""Encrypted collections and object stores: opened by reference, in the driver and in every task."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from obstore.store import ObjectStore

import kvstore
from kvstore import Store
from kvstore.backup import Collection
from kvstore.errors import UsageError
from kvstore.spark.access import Access
from kvstore.spark.format_options import read_options
from kvstore.spark.jobs import backup, compact, restore, verify
from kvstore.spark.origins import find
from tests.harness.soak import soaked
from tests.shard.conftest import s3_bucket, s3_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["s3_bucket", "s3_server"]


@pytest.fixture
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    s3_server: str,
    s3_bucket: Callable[[], ObjectStore],
) -> Access:
    """A collection on files encrypted by a passphrase, or on S3 encrypted by a key file."""
    if request.param == "files":
        (tmp_path / "passphrase").write_text("open sesame\n")
        return Access(str(tmp_path / "c"), passphrase_file=str(tmp_path / "passphrase"))
    (tmp_path / "key").write_bytes(bytes(range(32)))
    bucket = s3_bucket().config["bucket"]  # type: ignore[attr-defined]
    return Access(
        f"s3://{bucket}/some/place",
        key_file=str(tmp_path / "key"),
        endpoint=s3_server,
        region="us-east-1",
    )


def commit(store: Store, first: int) -> None:
    pick = random.Random(first)
    with store.batch() as batch:
        for number in range(first, first + 2000):
            batch.put(b"%06d" % number, pick.randbytes(20))
    store.delete_range(b"%06d" % (first + 50), b"%06d" % (first + 90))


@pytest.mark.parametrize("place", ["s3", *soaked("files")], indirect=True)
def test_jobs_reads_and_streams_open_encrypted_collections_wherever_they_are(
    spark: SparkSession, store: Store, tmp_path: Path, place: Access
) -> None:
    commit(store, 0)
    backup.backup(spark, store, place, tasks=2)
    commit(store, 1000)
    backup.backup(spark, store, place, tasks=2)
    collection = place.open()
    collection.verify("contents", store)
    assert verify.verify(spark, place)[:4] == collection.verify()[:4]
    compact.compact(spark, place, tasks=2)
    assert len(collection.list()) == 1
    reader = spark.read.format("kvstore").options(**place.as_options())
    assert {bytes(row.key): bytes(row.value) for row in reader.load(place.url).collect()} == dict(
        store.scan()
    )
    restore.restore(spark, place, tmp_path / "restored", tasks=2)
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.changes(0)) == list(store.changes(0))
    with kvstore.open(tmp_path / "other") as other:
        restore.restore_into(spark, place, other)
        assert list(other.scan()) == list(store.scan())
    seen: list[int] = []
    query = (
        spark.readStream.format("kvstore")
        .options(readChangeFeed="true", **place.as_options())
        .load(place.url)
        .writeStream.foreachBatch(lambda batch, _: seen.append(batch.count()))
        .option("checkpointLocation", str(tmp_path / "state"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert seen == [sum(1 for _ in store.scan())]
    with pytest.raises(Exception, match="is encrypted"):
        spark.read.format("kvstore").options(
            **{
                n: v
                for n, v in place.as_options().items()
                if n not in ("keyFile", "passphraseFile")
            }
        ).load(place.url).count()


def test_passphrase_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "c")
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        Collection(url, "secret").backup(store)
    access = read_options({"path": url, "passphraseEnv": "FLIGHTS_KEY"}, "state").access
    with pytest.raises(UsageError, match="FLIGHTS_KEY is not set"):
        access.open()
    monkeypatch.setenv("FLIGHTS_KEY", "secret")
    assert access.open().upper == Collection(url, "secret").upper
    assert "secret" not in repr(access)


@pytest.mark.parametrize("name", ["passphrase", "secret_access_key", "SESSION_TOKEN", "token"])
def test_secrets_are_no_options(name: str) -> None:
    with pytest.raises(UsageError, match="is a secret"):
        read_options({"path": "s3://bucket/place", name: "x"}, "state")


def test_options_that_open_collections_mean_nothing_to_a_checkpoint(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
    with pytest.raises(UsageError, match="region are for collections and servers"):
        find(read_options({"path": str(tmp_path / "store"), "region": "x"}, "state").access)


def test_two_keys_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than one of keyFile"):
        read_options({"path": "p", "keyFile": "a", "passphraseFile": "b"}, "state")
    with pytest.raises(UsageError, match="cannot be read"):
        Access(str(tmp_path), passphrase_file=str(tmp_path / "none")).open()
