"""A driver on a cluster, in a process of its own: `python -m tests.cluster.driver SETTINGS SHARED`.

It runs in the directory of drivers, whose files workers do not see, and names shared directories by
relative paths. It kills executors in the middle of its work, and prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.errors import UsageError
from kvstore.spark import bulk_import, lookup_join, session
from kvstore.spark.jobs.backup import backup
from kvstore.spark.jobs.compact import compact
from kvstore.spark.jobs.restore import restore
from kvstore.spark.jobs.verify import verify
from tests.cluster import pushing
from tests.cluster.killing import has_tasks, killing
from tests.cluster.streams import run_to_end
from tests.harness.seeds import seed_of

ROWS = 3000
SEED = "KVSTORE_CLUSTER_SEED"
KILLS = 2
"""Executors that must die in the midst of each kind of work."""
ROUNDS_MAX = 15
LOCAL_ONLY = (
    "spark.driver.bindAddress",
    "spark.local.dir",
    "spark.python.daemon.module",
    "spark.python.unix.domain.socket.enabled",
)
"""Settings that a session gives itself on one machine, and leaves to a cluster."""
_ENVIRONMENT = "spark.executorEnv.AWS_"


def frame(spark: SparkSession, rows: int = ROWS, generation: int = 0) -> DataFrame:
    return spark.range(0, rows, 1, 6).selectExpr(
        "printf('k%06d', id) AS key", f"CONCAT('v{generation}-', id) AS value"
    )


def model(rows: int = ROWS, generation: int = 0) -> list[tuple[bytes, bytes]]:
    return [(b"k%06d" % n, b"v%d-%d" % (generation, n)) for n in range(rows)]


def read(spark: SparkSession, path: Path | str, **options: str) -> list[tuple[bytes, bytes]]:
    df = spark.read.format("kvstore").options(**options).load(str(path))
    return sorted((bytes(row.key), bytes(row.value)) for row in df.collect())


def refusal(work: Callable[[], Any]) -> str:
    """The error of `work`, which is one line."""
    with pytest.raises(UsageError) as found:
        work()
    assert "\n" not in str(found.value), found.value
    return str(found.value)


def loads(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """An import, a read, a backup and a restore. An executor dies during the import."""
    name = spark.sparkContext.applicationId
    place = shared / name
    place.mkdir()
    staging = place / "staging"
    with kvstore.open(f"store-{name}") as store:
        with killing(spark, lambda: any(staging.glob("sorting-*/run-*")), pick) as killed:
            stamp = bulk_import(frame(spark), store, "key", "value", staging=str(staging))
        assert killed, "the import ended before an executor was killed"
        assert list(store.scan(as_of=stamp)) == model()
        assert not staging.exists()
        store.checkpoint(place / "copy")
        assert read(spark, place / "copy", numPartitions="2") == model()
        backup(spark, store, place / "collection", copies=place, tasks=2)
        restore(spark, place / "collection", place / "restored", tasks=2)
    with kvstore.open(place / "restored") as restored:
        assert list(restored.scan()) == model()
    return {"rows": ROWS, "streamed": len(stream(spark, place, f"checkpoint-{name}"))}


def stream(spark: SparkSession, shared: Path, checkpoint: str) -> list[tuple[bytes, bytes]]:
    seen: dict[int, list[tuple[bytes, bytes]]] = {}

    def add(batch: DataFrame, number: int) -> None:
        seen[number] = [(bytes(row.key), bytes(row.value)) for row in batch.collect()]

    source = str(shared / "copy")
    changes = spark.readStream.format("kvstore").option("readChangeFeed", "true").load(source)
    writer = changes.writeStream.foreachBatch(add).trigger(availableNow=True)
    run_to_end(writer.option("checkpointLocation", checkpoint).start)
    rows = [row for batch in seen.values() for row in batch]
    assert sorted(rows) == model()
    return rows


def hidden(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """Directories that only the driver sees are refused in one line, and no file is left behind."""
    with stored(Path("hidden-store")) as store:
        first = store.imports.all()[0].added
        df = frame(spark)
        errors = {"staging": refusal(lambda: bulk_import(df, store, "key", "value"))}
        errors["ordered"] = refusal(
            lambda: bulk_import(
                df, store, "key", "value", duplicates="last", order_by="value", staging="here"
            )
        )
        assert [each.added for each in store.imports.all()] == [first]
        assert not Path("here").exists()
        errors["copy"] = refusal(lambda: backup(spark, store, shared / "other", tasks=2))
        errors["collection"] = refusal(
            lambda: backup(spark, store, "collection", copies=shared, tasks=2)
        )
        assert Collection("collection").list() == []
        Collection(shared / "whole").backup(store)
        errors["restore"] = refusal(lambda: restore(spark, shared / "whole", "out", tasks=2))
        store.checkpoint("copy")
    with pytest.raises(PySparkException) as found:
        read(spark, "copy")
    errors["read"] = str(found.value).strip().splitlines()[-1]
    return errors


def bare(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """Executors without the library, or with sources alone: the error says so."""
    bare = f"bare-{spark.sparkContext.applicationId}"
    with kvstore.open(f"store-{bare}") as store:
        load = refusal(
            lambda: bulk_import(
                frame(spark), store, "key", "value", staging=str(shared / f"staging-{bare}")
            )
        )
        assert store.imports.all() == []
    assert not (shared / f"staging-{bare}").exists()
    Collection(shared / bare).backup(stored(Path(f"source-{bare}")))
    job = refusal(lambda: restore(spark, shared / bare, shared / f"restored-{bare}", tasks=2))
    assert not (shared / f"restored-{bare}").exists()
    join = refusal(lambda: lookup_join(frame(spark), shared / bare, "key"))
    return {"load": load, "job": job, "join": join}


def kills(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """An executor dies as soon as a kind of work has begun. All kinds repeat until executors have
    died in the midst of each."""
    done = dict.fromkeys(("import", "backup", "compact", "restore", "stream"), 0)
    place = shared / f"kills-{pick.randrange(1 << 32)}"
    place.mkdir()

    @contextmanager
    def hit(kind: str) -> Iterator[None]:
        with killing(spark, lambda: has_tasks(spark), pick) as killed:
            yield
        done[kind] += len(killed)

    with kvstore.open("stream-store") as store:
        bulk_import(frame(spark), store, "key", "value", staging=str(place / "staging"))
        store.checkpoint(place / "copy")
    for round_ in range(ROUNDS_MAX):
        with kvstore.open("kills-store") as store:
            df = frame(spark, generation=round_)
            with hit("import"):
                bulk_import(df, store, "key", "value", staging=str(place / "staging"))
            assert list(store.scan()) == model(generation=round_)
            collection = place / f"collection-{round_}"
            with hit("backup"):  # of a whole store: the driver writes a small window alone
                backup(spark, store, collection, copies=place, tasks=4)
            verify(spark, collection, store, copies=place)
            for number in range(3):  # for the compaction
                store.put(b"again", b"%d" % number)
                Collection(collection).backup(store)
            store.delete(b"again")
            Collection(collection).backup(store)
        with hit("compact"):
            compact(spark, collection, tasks=4)
        verify(spark, collection)
        out = place / f"restored-{round_}"
        with hit("restore"):
            restore(spark, collection, out, tasks=4)
        with kvstore.open_read_only(out) as restored:
            assert list(restored.scan()) == model(generation=round_)
        with hit("stream"):
            stream(spark, place, f"checkpoint-{round_}")
        if min(done.values()) >= KILLS:
            break
    return done


def stored(path: Path) -> kvstore.Store:
    """A store with an import, whose backup is work for tasks. The process ends with it open."""
    store = kvstore.open(path)
    built = bulk.Import.create(path.with_name(f"{path.name}-built"))
    with built.writer() as writer:
        for key, value in model():
            writer.put(key, value)
    built.seal()
    bulk.ingest(store, built.staging)
    return store


def main(settings: str, shared: str, *names: str) -> None:
    seed = seed_of(SEED)
    given = json.loads(settings)
    assert "spark.cores.max" in refusal(lambda: session("cluster", cores=2, **given))
    for name, value in given.items():  # the driver finds the bucket as its executors do
        if name.startswith(_ENVIRONMENT):
            os.environ[name.removeprefix("spark.executorEnv.")] = value
    spark = session("cluster", **given)
    conf = spark.sparkContext.getConf()
    assert [name for name in LOCAL_ONLY if conf.contains(name)] == []
    scenarios = {
        "loads": loads,
        "hidden": hidden,
        "bare": bare,
        "kills": kills,
        "nights": pushing.nights,
        "staged": pushing.staged,
        "straggling": pushing.straggling,
    }
    relative = Path(os.path.relpath(shared))
    found = {name: scenarios[name](spark, relative, random.Random(seed)) for name in names}
    spark.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
