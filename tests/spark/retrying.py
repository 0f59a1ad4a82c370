"""A session whose tasks get three attempts, and whose workers are killed: run in its own process.

`python -m tests.spark.retrying DIRECTORY` loads rows while workers die at three points: before the
sort, half way through a part, and after a part was finished but before it was reported. It then
backs up, compacts and restores while tasks fail and die, and prints the results as JSON. With the
word `all` behind it reads, seeds and joins do the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

import kvstore
from kvstore import Store, bulk
from kvstore.backup import Collection
from kvstore.bulk.part import PartWriter
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark import joins as joining
from kvstore.spark import load, point_in_time_join, seed, session, stage_import
from kvstore.spark import seed as seeding_collection
from kvstore.spark import seed as seeding_store
from kvstore.spark.jobs import backup, compact, restore
from tests.spark.frames import FAST_START

ROWS = 6000

_write = PartWriter.write


def main(directory: Path, *, is_all: bool) -> None:
    spark = session(
        "retries",
        memory="512m",
        **{"spark.master": "local[2,3]", "spark.driver.extraJavaOptions": FAST_START},
    )
    sorter: Any = load.sorter
    merger: Any = load.merger

    def dying_sorter(*args: Any) -> Any:
        sort = sorter(*args)

        def attempt(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            results = list(sort(batches))
            context = TaskContext.get()
            assert context is not None
            if context.attemptNumber() == 0 and context.partitionId() == 2:
                os._exit(1)  # its runs are on disk, and are not reported
            yield from results

        return attempt

    def dying_merger(*args: Any) -> Any:
        merge = merger(*args)

        def attempt(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            number, partition = context.attemptNumber(), context.partitionId()
            if number == 0 and partition % 2 == 0:
                PartWriter.write = _write_half_and_die  # type: ignore[method-assign]  # here only
            results = list(merge(batches))
            if number == 1 or (number == 0 and partition % 2 == 1):
                os._exit(1)  # the part is complete and on disk, and is not reported
            yield from results

        return attempt

    load.sorter = dying_sorter
    load.merger = dying_merger
    df = spark.sql(
        f"SELECT CAST(lpad(CAST(id AS STRING), 6, '0') AS BINARY) AS key, "
        f"CAST(CAST(id AS STRING) AS BINARY) AS value FROM range(0, {ROWS}, 1, 3)"
    ).mapInArrow(_dies_at_first, "key binary, value binary")
    staging = directory / "staging"
    with kvstore.open(directory / "store") as store:
        manifest = stage_import(df, staging, "key", "value", partitions=3)
        orphans = len(list(staging.glob("part-*.sst*"))) - len(manifest.parts)
        stamp = bulk.ingest(store, staging)
        rows = [key.decode() for key, _ in store.scan()]
        changes = list(store.changes(0, order="time"))
        jobs = _jobs_are_right(spark, store, directory)
        further: dict[str, Any] = {}
        if is_all:
            further["served"] = _reads_of_a_server_are_right(spark, store)
            further["seeds"] = _seeds_and_joins_are_right(spark, directory)
        print(
            json.dumps(
                {
                    "rows": rows == [f"{n:06d}" for n in range(ROWS)],
                    "changes": len(changes),
                    "stamps": {change.timestamp for change in changes} == {stamp},
                    "manifest_rows": manifest.rows,
                    "orphans": orphans,
                    "jobs": jobs,
                    **further,
                }
            )
        )
    spark.stop()


def _dies_at_first(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            os._exit(1)
        yield batch


def _write_half_and_die(writer: PartWriter, batch: pa.RecordBatch) -> None:
    _write(writer, batch.slice(0, batch.num_rows // 2))
    os._exit(1)


def _jobs_are_right(spark: SparkSession, store: Store, directory: Path) -> dict[str, Any]:
    """Backups, a compaction and a restore. Their tasks fail first, and die at the end of a later
    attempt."""
    for job, name in (
        (backup, "write_parts"),
        (compact, "merge_parts"),
        (restore, "build_files"),
    ):
        setattr(job, name, _failing(getattr(job, name)))
    store.delete_range(b"000100", b"005000")
    url = str(directory / "collection")
    collection = Collection(url)
    backup.backup(spark, store, url, tasks=3)
    lost = [len(collection.scrub().orphans)]
    store.put(b"000200", b"new")
    collection.backup(store)
    compact.compact(spark, url, tasks=3)
    lost.append(len(collection.scrub().orphans))
    compared = collection.verify("contents", store).rows
    at = restore.restore(spark, url, directory / "restored", tasks=3)
    with kvstore.open(directory / "restored") as restored:
        same = list(restored.replication.versions(since=None, upto=at)) == list(
            store.replication.versions(since=None, upto=at)
        )
    left = [entry.name for entry in directory.iterdir() if entry.name.startswith(".")]
    batches = len(collection.list())
    return {"lost": lost, "rows": compared, "same": same, "left": left, "batches": batches}


def _seeds_and_joins_are_right(spark: SparkSession, directory: Path) -> list[int]:
    """The number of labels that find their version, in a seeded store and in a seeded collection.
    Workers die after they have sorted, written and joined."""
    for module, name in (
        (seeding_store, "sorter"),
        (seeding_store, "merger"),
        (seeding_collection, "writer"),
        (joining, "joiner"),
    ):
        setattr(module, name, _dying(getattr(module, name)))
    rows = spark.sql(
        f"SELECT lpad(CAST(id % 100 AS STRING), 3, '0') AS id, id + 1 AS ts, "
        f"CAST(id + 1 AS STRING) AS said FROM range(0, {ROWS}, 1, 3)"
    )
    found = []
    for target in (directory / "seeded", f"file://{directory}/seeded-collection"):
        assert seed(rows, target, "id", "said", partitions=3) == ROWS
        joined = point_in_time_join(rows, target, "id")
        found.append(joined.where("CAST(f_value AS STRING) = said").count())
    return found


def _reads_of_a_server_are_right(spark: SparkSession, store: Store) -> bool:
    """Whether tasks whose workers die in the middle read all rows of a live store."""
    store.checkpoint(store.path.parent / "flushed")  # type: ignore[union-attr]
    with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
        read = spark.read.format("kvstore").option("numPartitions", "3").option("batchRows", "100")
        expected = list(store.scan())
        found = read.load(running.url).mapInArrow(_dies_in_the_middle, "key binary, value binary")
        return expected == sorted((bytes(row.key), bytes(row.value)) for row in found.collect())


def _dies_in_the_middle(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for number, batch in enumerate(batches):
        if context.attemptNumber() == 0 and number == 1:
            os._exit(1)
        yield batch


def _dying(maker: Callable[..., Any]) -> Callable[..., Any]:
    """The maker of a task whose worker dies at its first attempt, after its work."""

    def made(*args: Any) -> Any:
        work = maker(*args)

        def attempt(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            results = list(work(batches))
            if context.attemptNumber() == 0 and context.partitionId() == 0:
                os._exit(1)
            yield from results

        return attempt

    return made


def _failing(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def attempt(item: Any) -> Any:
        context = TaskContext.get()
        assert context is not None
        number, partition = context.attemptNumber(), context.partitionId()
        if number == 0 and partition % 2 == 0:
            raise OSError("a storage that comes back")
        done = work(item)
        if number < 2:
            os._exit(1)  # all files are written, and are not reported
        return done

    return attempt


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_all="all" in sys.argv[2:])
