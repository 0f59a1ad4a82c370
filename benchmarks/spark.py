"""Spark in and out: `python -m benchmarks.spark [--rows N] [--rounds N]`.

Every figure is a ratio of two runs of the same round, in one session, and of the rounds the median
counts: the machine drifts by more than the differences that matter.

    load        bulk_import            against Spark's own read + range partition + sort
                delta-rs               the same job as a user of delta-rs would write it
    read        collection, checkpoint against native Parquet of the same rows
    changes     collection             against native Parquet of the same rows
    backup      two tasks at a time    against one process, of the same store

Rows are 16 random bytes of key and 100 of value. A noop sink takes what is read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import kvstore
from backup import BackupInfo, Collection
from kvstore import Store
from kvstore.arrow import binary_array
from spark_connector import register, run_import, session
from spark_connector.jobs import backup as backup_job

KEY_BYTES, VALUE_BYTES = 16, 100
FILES = 4
SEED = 20_260


def main() -> None:
    """Run it and print one JSON line per figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvstore-bench-"))
    spark = session("benchmark", memory="2g")
    register(spark)
    try:
        source = directory / "source"
        write_rows(source, given.rows)
        loads = load_workloads(spark, source, directory)
        report("load", given.rows, measure(loads, given.rounds), "spark sort")
        reads = read_workloads(spark, source, directory)
        report("read", given.rows, measure(reads, given.rounds), "native parquet")
        with kvstore.open(directory / "store") as store:
            backups = backup_workloads(spark, store, directory)
            report("backup", given.rows, measure(backups, given.rounds), "one process")
    finally:
        spark.stop()
        shutil.rmtree(directory, ignore_errors=True)


def write_rows(source: Path, rows: int) -> None:
    """Parquet files of random rows, as the input of everything."""
    source.mkdir()
    random = np.random.default_rng(SEED)
    for number in range(FILES):
        count = rows // FILES
        columns = {}
        for name, width in (("key", KEY_BYTES), ("value", VALUE_BYTES)):
            raw = random.bytes(count * width)
            cut = [raw[at : at + width] for at in range(0, len(raw), width)]
            columns[name] = binary_array(cut)
        pq.write_table(pa.table(columns), source / f"{number}.parquet", compression="none")


def load_workloads(
    spark: SparkSession, source: Path, directory: Path
) -> dict[str, Callable[[], None]]:
    """What gets the rows in, from the same files, into the same number of files."""
    df = spark.read.parquet(str(source))
    counter = iter(range(1 << 30))

    def spark_sort() -> None:
        df.repartitionByRange(FILES, "key").sortWithinPartitions("key").write.format("noop").mode(
            "overwrite"
        ).save()

    def bulk() -> None:
        path = directory / f"store-{next(counter)}"
        with kvstore.open(path) as store:
            done = run_import(df, store, "key", "value", partitions=FILES)
        print(json.dumps({"build_s": done.build_seconds, "add_s": done.add_seconds}))
        shutil.rmtree(path)

    found = {"spark sort": spark_sort, "bulk_import": bulk}
    try:
        from deltalake import write_deltalake
    except ImportError:
        return found

    def delta() -> None:
        path = directory / f"delta-{next(counter)}"
        write_deltalake(str(path), pq.read_table(source).sort_by("key"))
        shutil.rmtree(path)

    return {**found, "delta-rs": delta}


def read_workloads(
    spark: SparkSession, source: Path, directory: Path
) -> dict[str, Callable[[], None]]:
    """What gets all rows out, each into a sink that drops them."""
    df = spark.read.parquet(str(source))
    native = directory / "native"
    df.repartitionByRange(FILES, "key").sortWithinPartitions("key").write.parquet(
        str(native), compression="zstd"
    )
    with kvstore.open(directory / "store") as store:
        run_import(df, store, "key", "value", partitions=FILES)
        Collection(directory / "collection").backup(store)
        store.checkpoint(directory / "checkpoint")
    ours = spark.read.format("kvstore")
    changes = {"readChangeFeed": "true", "startingTimestamp": "0"}
    reads = {
        "native parquet": spark.read.parquet(str(native)),
        "collection": ours.load(str(directory / "collection")),
        "checkpoint": ours.load(str(directory / "checkpoint")),
        "changes of a collection": ours.options(**changes).load(str(directory / "collection")),
    }
    return {name: drained(each) for name, each in reads.items()}


def backup_workloads(
    spark: SparkSession, store: Store, directory: Path
) -> dict[str, Callable[[], None]]:
    """A full backup of the store, each time into a new collection."""
    counter = iter(range(1 << 30))

    def backed_up(take: Callable[[str], BackupInfo]) -> Callable[[], None]:
        def run() -> None:
            path = directory / f"backup-{next(counter)}"
            take(str(path))
            shutil.rmtree(path)

        return run

    return {
        "one process": backed_up(lambda url: Collection(url).backup(store)),
        "spark": backed_up(lambda url: backup_job.backup(spark, store, url)),
    }


def drained(df: DataFrame) -> Callable[[], None]:
    """Read all of it."""
    return lambda: df.write.format("noop").mode("overwrite").save()


def measure(workloads: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, taking turns; a first round that warms the JVM does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    names = list(workloads)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            started = time.perf_counter()
            workloads[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(group: str, rows: int, seconds: dict[str, list[float]], baseline: str) -> None:
    """One line per subject: rows per second, and how many times the baseline's time it took."""
    for name, taken in seconds.items():
        pairs = zip(taken, seconds[baseline], strict=True)
        line = {
            "group": group,
            "subject": name,
            "rows_per_s": round(rows / statistics.median(taken)),
            "times_baseline": round(statistics.median(a / b for a, b in pairs), 2),
            "rounds": [round(each, 2) for each in taken],
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
