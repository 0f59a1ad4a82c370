"""A driver on a cluster, in a process of its own: `python -m tests.cluster.driver SETTINGS SHARED`.

It runs in the directory of drivers, whose files workers do not see, and names shared directories by
relative paths. It kills executors in the middle of its work, and prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import bulk
import kvstore
from backup import Collection
from kvstore.errors import UsageError
from kvstore.testing.seeds import seed_of
from spark_connector import bulk_import, lookup_join, session
from spark_connector.jobs.backup import backup
from spark_connector.jobs.compact import compact
from spark_connector.jobs.restore import restore
from spark_connector.jobs.verify import verify

ROWS = 3000
SEED = "KVSTORE_CLUSTER_SEED"
KILLS = 3
WAIT_S = 300.0


def frame(spark: SparkSession, rows: int = ROWS, generation: int = 0) -> DataFrame:
    return spark.range(0, rows, 1, 6).selectExpr(
        "printf('k%06d', id) AS key", f"CONCAT('v{generation}-', id) AS value"
    )


def model(rows: int = ROWS, generation: int = 0) -> list[tuple[bytes, bytes]]:
    return [(b"k%06d" % n, b"v%d-%d" % (generation, n)) for n in range(rows)]


def read(spark: SparkSession, path: Path | str, **options: str) -> list[tuple[bytes, bytes]]:
    df = spark.read.format("kvstore").options(**options).load(str(path))
    return sorted((bytes(row.key), bytes(row.value)) for row in df.collect())


def executors(spark: SparkSession) -> list[int]:
    """The process ids of the executors of this application."""
    wanted = spark.sparkContext.applicationId.encode()
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                command = (each / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            if b"CoarseGrainedExecutorBackend" in command and wanted in command:
                found.append(int(each.name))
    return sorted(found)


@contextmanager
def killing(spark: SparkSession, is_time: Callable[[], Any], pick: random.Random) -> Iterator[None]:
    """Kill one executor as soon as `is_time()` holds, while the block runs. One must be killed."""
    killed: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if is_time() and (running := executors(spark)):
                killed.append(pick.choice(running))
                os.kill(killed[0], signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(WAIT_S)
    assert killed, "the work ended before an executor was killed"


def refusal(work: Callable[[], Any]) -> str:
    """The error of `work`, which is one line."""
    with pytest.raises(UsageError) as found:
        work()
    assert "\n" not in str(found.value), found.value
    return str(found.value)


def loads(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """An import, a read, a backup and a restore. An executor dies during the import."""
    staging = shared / "staging"
    with kvstore.open("store") as store:
        with killing(spark, lambda: any(staging.glob("sorting-*/run-*")), pick):
            stamp = bulk_import(frame(spark), store, "key", "value", staging=str(staging))
        assert list(store.scan(as_of=stamp)) == model()
        assert not staging.exists()
        store.checkpoint(shared / "copy")
        assert read(spark, shared / "copy", numPartitions="2") == model()
        backup(spark, store, shared / "collection", copies=shared, tasks=2)
        restore(spark, shared / "collection", shared / "restored", tasks=2)
    with kvstore.open("../shared/restored") as restored:
        assert list(restored.scan()) == model()
    loops = spark.sparkContext.parallelize(range(2), 2).map(loops_here).collect()
    return {
        "rows": ROWS,
        "streamed": len(stream(spark, shared)),
        "loops": sorted(set(loops)),
    }


def loops_here(_: int) -> str:
    from kvstore.loops.chosen import COMPILED

    return "compiled" if COMPILED else "plain"


def stream(
    spark: SparkSession, shared: Path, checkpoint: str = "checkpoint"
) -> list[tuple[bytes, bytes]]:
    seen: list[tuple[bytes, bytes]] = []

    def add(batch: DataFrame, _: int) -> None:
        seen.extend((bytes(row.key), bytes(row.value)) for row in batch.collect())

    source = str(shared / "copy")
    changes = spark.readStream.format("kvstore").option("readChangeFeed", "true").load(source)
    query = (
        changes.writeStream.foreachBatch(add)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)
    assert sorted(seen) == model()
    return seen


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
    """Executors without the library: the error says so."""
    with kvstore.open("bare-store") as store:
        load = refusal(
            lambda: bulk_import(
                frame(spark), store, "key", "value", staging=str(shared / "bare-staging")
            )
        )
        assert store.imports.all() == []
    assert not (shared / "bare-staging").exists()
    Collection(shared / "bare").backup(stored(Path("bare-source")))
    job = refusal(lambda: restore(spark, shared / "bare", shared / "bare-restored", tasks=2))
    assert not (shared / "bare-restored").exists()
    join = refusal(lambda: lookup_join(frame(spark), shared / "bare", "key"))
    return {"load": load, "job": job, "join": join}


def kills(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """An executor dies as soon as a kind of work has begun; this repeats some times for each
    kind."""
    done = dict.fromkeys(("import", "backup", "compact", "restore", "stream"), 0)
    place = shared / f"kills-{pick.randrange(1 << 32)}"
    place.mkdir()

    def under_way() -> bool:
        return bool(spark.sparkContext.statusTracker().getActiveStageIds())

    for round_ in range(KILLS):
        df = frame(spark, generation=round_)
        with kvstore.open("kills-store") as store:
            with killing(spark, under_way, pick):
                bulk_import(df, store, "key", "value", staging=str(place / "staging"))
            assert list(store.scan()) == model(generation=round_)
            done["import"] += 1
            with killing(spark, under_way, pick):
                backup(spark, store, place / "collection", copies=place, tasks=4)
            verify(spark, place / "collection", store, copies=place)
            done["backup"] += 1
        if round_:
            with killing(spark, under_way, pick):
                compact(spark, place / "collection", tasks=4)
            verify(spark, place / "collection")
            done["compact"] += 1
        out = place / f"restored-{round_}"
        with killing(spark, under_way, pick):
            restore(spark, place / "collection", out, tasks=4)
        with kvstore.open_read_only(out) as restored:
            assert list(restored.scan()) == model(generation=round_)
        done["restore"] += 1
    with kvstore.open("stream-store") as store:
        bulk_import(frame(spark), store, "key", "value", staging=str(place / "staging"))
        store.checkpoint(place / "copy")
    for round_ in range(KILLS):
        with killing(spark, under_way, pick):
            stream(spark, place, f"checkpoint-{round_}")
        done["stream"] += 1
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
    spark = session("cluster", **given)
    scenarios = {"loads": loads, "hidden": hidden, "bare": bare, "kills": kills}
    relative = Path(os.path.relpath(shared))
    found = {name: scenarios[name](spark, relative, random.Random(seed)) for name in names}
    spark.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
