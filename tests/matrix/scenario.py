"""What Spark is used for, in one release: `python -m tests.matrix.scenario classic|connect`.

It runs in the environment of that release, in a directory of its own, and prints what it did. With
`connect` the session is one of Spark Connect, whose server is a process of its own.

A call whose feature the release lacks, by `kvstore.spark.releases`, must be refused in one line.
All other calls must work.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

import kvstore
from kvstore import bulk
from kvstore.codec.tuples import encode_tuple
from kvstore.errors import UsageError
from kvstore.spark import (
    apply_changes,
    batch_importer,
    bulk_import,
    history,
    lookup_join,
    point_in_time_join,
    push,
    read_where,
    register,
    seed,
    session,
    sorted_rows,
    stage_import,
)
from kvstore.spark.jobs.backup import backup
from kvstore.spark.jobs.compact import compact
from kvstore.spark.jobs.restore import restore
from kvstore.spark.jobs.verify import verify
from kvstore.spark.releases import (
    ARROW_FUNCTIONS,
    LIMITS,
    NUMBERED_PARTITIONS,
    SOURCES,
    Feature,
    has,
)
from tests.matrix.connect import server

ROWS = 2000
WAIT_S = 600.0


def frame(spark: SparkSession, generation: int = 0) -> DataFrame:
    return spark.range(0, ROWS, 1, 4).selectExpr(
        "printf('k%06d', id) AS key", f"CONCAT('v{generation}-', id) AS value"
    )


def model(generation: int = 0) -> list[tuple[bytes, bytes]]:
    return [(b"k%06d" % n, b"v%d-%d" % (generation, n)) for n in range(ROWS)]


def pairs(df: DataFrame) -> list[tuple[bytes, bytes]]:
    return sorted((bytes(row.key), bytes(row.value)) for row in df.collect())


def refused(work: Callable[[], Any], told: str) -> None:
    with pytest.raises(UsageError) as refusal:
        work()
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


def loads(spark: SparkSession, *, is_remote: bool) -> None:
    with kvstore.open("store") as store:
        stamp = bulk_import(frame(spark), store, "key", "value", partitions=2)
        assert list(store.scan(as_of=stamp)) == model()
        if has(SOURCES):
            rows = sorted_rows(frame(spark, 1), "key", "value", partitions=2)
            rows.write.format("kvstore").mode("append").save(str(Path("staging").absolute()))
        else:
            stage_import(frame(spark, 1), "staging", "key", "value", partitions=2)
        assert list(store.scan(as_of=bulk.ingest(store, "staging"))) == model(1)
        store.checkpoint("copy")
        if is_remote:
            refused(lambda: bulk_import(frame(spark), store, "key", "value"), "pass partitions")
            refused(
                lambda: bulk_import(
                    frame(spark), store, "key", "value", partitions=2, progress=lambda *_: None
                ),
                "leave progress out",
            )
            with pytest.raises(Exception, match="foreachBatch") as refusal:
                follow(spark, batch_importer(store, "n", "key", "value"))
            assert "Connect runs foreachBatch on its server" in str(refusal.value.__context__)


def keys(spark: SparkSession) -> None:
    """Keys of several columns, chosen spans of keys, and a join with a table."""
    df = frame(spark)
    with kvstore.open("keys") as store:
        schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
        store.table("t", schema=schema, key=["id"]).put({"id": "k000007", "n": 7})
        store.checkpoint("tables")
        works: dict[Feature, list[Callable[[], Any]]] = {
            ARROW_FUNCTIONS: [
                lambda: bulk_import(df, store, ["key", "value"], "value", partitions=2),
                lambda: lookup_join(
                    df, str(Path("tables").absolute()), ["key"], table="t", prefix="f_"
                ).count(),
            ],
            NUMBERED_PARTITIONS: [
                lambda: bulk_import(df, store, "key", "value", splits=[b"k000100", b"k001900"])
            ],
        }
        for feature, calls in works.items():
            for work in calls:
                if has(feature):
                    work()
                else:
                    refused(work, "needs PySpark 4.1")
        if has(ARROW_FUNCTIONS):
            assert store.get(encode_tuple(("k000007", "v0-7"))) == b"v0-7"
            assert store.get(b"k000007") == b"v0-7"


def reads(spark: SparkSession) -> None:
    copy = str(Path("copy").absolute())
    labels = spark.sql("SELECT 'k000007' AS id")
    assert [bytes(row.f_value) for row in lookup_join(labels, copy, "id").collect()] == [b"v1-7"]
    with kvstore.open_read_only("copy") as store:
        times = {bytes(value): int(at) for _, at, value in store.history(b"k000007") if value}
    asked = ", ".join(f"('k000007', CAST({at} AS LONG))" for at in times.values())
    labels = spark.sql(f"SELECT * FROM VALUES {asked} AS labels(id, ts)")
    joined = point_in_time_join(labels, copy, "id", columns=["value"]).collect()
    assert {bytes(row.f_value): row.ts for row in joined} == times
    if not has(SOURCES):
        for work in (
            lambda: register(spark),
            lambda: history(spark, copy),
            lambda: read_where(spark, copy, [("key", "=", b"")]),
        ):
            refused(work, "needs PySpark 4.0")
        return
    source = spark.read.format("kvstore")
    assert pairs(source.option("numPartitions", "2").load(copy)) == model(1)
    some = [[("key", "startswith", b"k00000")], [("key", "in", [b"k001999"])]]
    assert read_where(spark, copy, some).count() == 11
    assert [row.operation for row in history(spark, copy).collect()] == ["import", "import"]
    register(spark)
    assert spark.read.format("kvstore").load(copy).count() == ROWS
    feed = spark.read.format("kvstore").options(readChangeFeed="true", startingTimestamp="0")
    with kvstore.open("second") as second:
        apply_changes(feed.load(copy), second)
        assert list(second.scan()) == model(1)


def follow(spark: SparkSession, into: Callable[[DataFrame, int], None] | None = None) -> None:
    """A stream from the beginning, into a function or into `followed`."""
    changes = spark.readStream.format("kvstore").option("readChangeFeed", "true")
    writer = changes.load(str(Path("copy").absolute())).writeStream.trigger(availableNow=True)
    if into is not None:
        writer = writer.foreachBatch(into)
    else:
        writer = writer.format("parquet").option("path", str(Path("followed").absolute()))
    offsets = tempfile.mkdtemp(dir=Path.cwd())
    query = writer.option("checkpointLocation", offsets).start()
    assert query.awaitTermination(int(WAIT_S))


def followed(spark: SparkSession) -> None:
    """The rows of a stream as files, and as pushes that the function of a micro-batch makes."""
    follow(spark)
    assert spark.read.parquet(str(Path("followed").absolute())).count() == ROWS
    root = str(Path("changes").absolute())

    def push_changes(batch: DataFrame, number: int) -> None:
        apply_changes(batch, bulk.Pushes(root), position=b"copy", batch_id=number)

    follow(spark, push_changes)
    with (
        kvstore.open("changed") as store,
        bulk.pull(store, root, name="changed") as puller,
    ):
        puller.wait(len(bulk.Pushes(root).list()))
        assert list(store.scan()) == model(1)


def bounded(spark: SparkSession) -> None:
    """A stream with a bound of its micro-batches comes in several, or is refused."""
    changes = spark.readStream.format("kvstore").options(readChangeFeed="true")
    bound = changes.option("maxRowsPerTrigger", "1500").load(str(Path("copy").absolute()))
    writer = bound.writeStream.format("parquet").trigger(availableNow=True)
    state, out = Path("bounded").absolute(), str(Path("bounded-rows").absolute())
    query = writer.option("checkpointLocation", str(state)).option("path", out).start()
    if has(LIMITS):
        assert query.awaitTermination(int(WAIT_S))
        assert len([each for each in (state / "offsets").iterdir() if each.name.isdigit()]) == 2
        assert spark.read.parquet(out).count() == ROWS
    else:
        with pytest.raises(Exception, match="bound of micro-batches needs PySpark"):
            query.awaitTermination(int(WAIT_S))


def pushed(spark: SparkSession) -> None:
    report = push(frame(spark), "pushes", key="key", value="value", shards=2, partitions=2)
    found: dict[bytes, bytes] = {}
    for shard in range(report.push.shards):
        with (
            kvstore.open(f"shard-{shard}") as store,
            bulk.pull(store, "pushes", name=f"store-{shard}", shard=shard) as puller,
        ):
            puller.wait(report.number)
            taken = dict(store.scan())
        assert all(bulk.shard_of(key, 2) == shard for key in taken)
        found |= taken
    assert sorted(found.items()) == model()


def jobs(spark: SparkSession) -> None:
    with kvstore.open("store") as store:
        backup(spark, store, "collection", tasks=2)
        bulk_import(frame(spark, 2), store, "key", "value", partitions=2)
        backup(spark, store, "collection", tasks=2)
        compact(spark, "collection", tasks=2)
        assert verify(spark, "collection", store, tasks=2).backups == 1
        restore(spark, "collection", "restored", tasks=2)
        with kvstore.open_read_only("restored") as restored:
            assert list(restored.changes(0)) == list(store.changes(0))
    events = frame(spark).selectExpr("*", "1000L AS ts")
    seed(events, "seeded", key="key", value="value", at="ts", partitions=2)
    with kvstore.open_read_only("seeded") as seeded:
        assert list(seeded.scan()) == model()


@contextmanager
def started(kind: str) -> Iterator[SparkSession]:
    """A session of this kind, which ends with the block."""
    if kind == "connect":
        with server() as url:
            spark = SparkSession.builder.remote(url).getOrCreate()
            yield spark
            spark.stop()
        return
    fast = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    spark = session("matrix", **{"spark.driver.extraJavaOptions": fast})
    yield spark
    spark.stop()


def main(kind: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvm-") as directory:
        os.chdir(directory)
        with started(kind) as spark:
            loads(spark, is_remote=kind == "connect")
            keys(spark)
            reads(spark)
            if has(SOURCES):
                bounded(spark)
                followed(spark)
            pushed(spark)
            jobs(spark)
        os.chdir("/")
    version = ".".join(map(str, sys.version_info[:2]))
    sys.stdout.write(f"{kind}: PySpark {pyspark.__version__}, Python {version}: all held\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
