"""`seed`: new stores and collections whose versions carry the times of a DataFrame's rows."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.spark import point_in_time_join, seed
from tests.harness.seeds import seed_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEED = "KVSTORE_SPARK_SEED_SEED"


class Row(NamedTuple):
    key: bytes
    ts: int
    value: bytes | None

    @property
    def op(self) -> str:
        return "delete" if self.value is None else "put"


def random_rows(pick: random.Random, count: int) -> list[Row]:
    keys = [pick.randbytes(pick.randrange(3)) for _ in range(40)]
    rows = {
        (key, time): Row(key, time, None if pick.random() < 0.2 else pick.randbytes(3))
        for key, time in ((pick.choice(keys), pick.randrange(1, 200)) for _ in range(count))
    }
    return pick.sample(list(rows.values()), len(rows))


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    table = pa.table(
        {
            "id": pa.array([row.key for row in rows], pa.binary()),
            "ts": pa.array([row.ts for row in rows], pa.int64()),
            "score": pa.array([row.value for row in rows], pa.binary()),
            "op": [row.op for row in rows],
        }
    )
    return spark.createDataFrame(table).repartition(3)


def versions(path: Path) -> list[tuple[bytes, int, bytes | None]]:
    with kvstore.open(path, create=False) as store:
        return [(c.key, int(c.timestamp), c.value) for c in store.changes(0, order="key")]


@pytest.mark.spark
def test_a_store_and_a_collection_have_the_rows_as_their_history(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(random.Random(seed_of(SEED)), 1500)
    df = frame(spark, rows)
    newest = max(row.ts for row in rows)
    columns: dict[str, Any] = {"key": "id", "value": "score", "op": "op"}
    monkeypatch.chdir(tmp_path)
    assert seed(df, "store", **columns, partitions=4) == newest
    url = f"file://{tmp_path}/collection"
    assert seed(df, url, **columns, partitions=4) == newest
    expected = sorted((row.key, row.ts, row.value) for row in rows)
    assert sorted(versions(tmp_path / "store")) == expected
    collection = Collection(url)
    assert (int(collection.since), int(collection.upper)) == (0, newest + 1)
    assert collection.verify("checksums").backups == 1
    collection.restore(tmp_path / "restored")
    assert sorted(versions(tmp_path / "restored")) == expected
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    labels = frame(spark, [row._replace(value=b"") for row in rows[:50]])
    known = {(row.key, row.ts): row.value for row in rows}
    for source in (tmp_path / "store", url):
        joined = point_in_time_join(labels, source, "id").collect()
        found = [
            (bytes(r.id), r.ts, None if r.f_value is None else bytes(r.f_value)) for r in joined
        ]
        assert sorted(found, key=str) == sorted(
            ((row.key, row.ts, known[row.key, row.ts]) for row in rows[:50]), key=str
        )


@pytest.mark.spark
def test_history_is_never_rewritten(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark, [Row(b"a", 5, b"1")])
    url = f"file://{tmp_path}/collection"
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
        Collection(tmp_path / "backed-up").backup(store)
        seed(df, url, "id", "score")
        with pytest.raises(UsageError, match="holds the backups of store"):
            Collection(url).backup(store)
    for target in (tmp_path / "store", url, f"file://{tmp_path}/backed-up"):
        with pytest.raises(UsageError, match=r"exists|history is never rewritten"):
            seed(df, target, "id", "score")
    assert Collection(url).list()[0].rows == 1


@pytest.mark.spark
def test_a_failed_seed_leaves_no_history_and_can_be_repeated(
    spark: SparkSession, tmp_path: Path
) -> None:
    twice = frame(spark, [Row(b"a", 5, b"1"), Row(b"b", 6, b"x"), Row(b"a", 5, b"2")])
    future = frame(spark, [Row(b"a", 2**62, b"1")])
    url = f"file://{tmp_path}/collection"
    for target in (tmp_path / "store", url):
        two = r"key b'a' has two versions at .*; drop one: df\.drop"
        with pytest.raises(UsageError, match=two):
            seed(twice, target, "id", "score")
        with pytest.raises(UsageError, match=r"column 'at' has .*, in the future"):
            seed(future, target, "id", "score")
    assert list(tmp_path.glob("store*")) == []
    assert Collection(url).upper == 0
    assert seed(frame(spark, [Row(b"a", 5, b"1")]), url, "id", "score") == 5


@pytest.mark.spark
def test_since_begins_the_history(spark: SparkSession, tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
    before = at - timedelta(days=1)
    df = spark.createDataFrame(
        [("de", 7, at, "x")], "country string, day int, ts timestamp, v string"
    )
    for target in (str(tmp_path / "store"), f"file://{tmp_path}/collection"):
        newest = seed(df, target, ["country", "day"], "v", since=before)
        assert newest.to_datetime() == at
    with kvstore.open(tmp_path / "store", create=False) as store:
        with pytest.raises(HistoryGoneError):
            store.get(b"k", as_of=int(store.since) - 1)
        assert store.since == Collection(f"file://{tmp_path}/collection").since


@pytest.mark.spark
def test_bad_columns_are_refused_before_a_task(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark, [Row(b"a", 5, b"1")])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key": "user"}, "the columns to seed: .*`user`"),
        ({"at": "score"}, "column score is binary, and no time"),
        ({"value": "ts"}, "value ts is bigint, not binary or string"),
        ({"partitions": 0}, "partitions"),
    ]
    for given, text in cases:
        with pytest.raises(UsageError, match=text):
            seed(df, tmp_path / "store", **{"key": "id", "value": "score", **given})
    null = df.selectExpr("id", "ts", "CAST(NULL AS BINARY) AS score", "op")
    with pytest.raises(UsageError, match="a put needs a value"):
        seed(null, tmp_path / "store", "id", "score", op="op")
    assert list(tmp_path.iterdir()) == []
