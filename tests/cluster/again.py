"""A job that its user runs again after its driver died: `python -m tests.cluster.again SETTINGS
SHARED KIND ATTEMPT TASKS`.

It runs in the directory of drivers. It prints `under way` when a stage runs and this number of
tasks has ended, and `done` when the work has ended and its result is right.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

import kvstore
from kvstore.backup import Collection
from kvstore.spark import batch_importer, bulk_import, session
from kvstore.spark.jobs.backup import backup
from kvstore.spark.jobs.compact import compact
from kvstore.spark.jobs.restore import restore
from kvstore.spark.jobs.verify import verify
from tests.cluster.driver import frame, model
from tests.cluster.killing import WAIT_S
from tests.cluster.streams import run_to_end

UNDER_WAY: Final = "under way"
DONE: Final = "done"
STORE: Final = "again-store"


@contextmanager
def told(spark: SparkSession, tasks: int) -> Iterator[None]:
    """Print `under way` as soon as it is true."""
    over = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def ended() -> int:
        infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(None)]
        stages = [stage for info in infos if info is not None for stage in info.stageIds]
        found = [tracker.getStageInfo(int(stage)) for stage in stages]
        return sum(info.numCompletedTasks for info in found if info is not None)

    def watch() -> None:
        while not over.wait(0.01):
            if tracker.getActiveStageIds() and ended() >= tasks:
                print(UNDER_WAY, flush=True)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    over.set()
    watcher.join(WAIT_S)


def import_rows(spark: SparkSession, shared: Path, attempt: str) -> None:
    with kvstore.open(STORE) as store:
        staging = str(shared / f"again-staging-{attempt}")
        bulk_import(frame(spark), store, "key", "value", staging=staging, import_id=7)
        assert list(store.scan()) == model()
        assert [each.import_id for each in store.imports.all()] == [7]


def back_up(spark: SparkSession, shared: Path, attempt: str) -> None:
    with kvstore.open(STORE) as store:
        backup(spark, store, shared / "again-collection", copies=shared, tasks=4)
        assert verify(spark, shared / "again-collection", store, copies=shared).backups >= 1
        for number in range(3):  # for the compaction
            store.put(b"again", b"%d" % number)
            Collection(shared / "again-collection").backup(store)
        store.delete(b"again")
        Collection(shared / "again-collection").backup(store)


def merge(spark: SparkSession, shared: Path, attempt: str) -> None:
    compact(spark, shared / "again-collection", tasks=4)
    verify(spark, shared / "again-collection")


def put_back(spark: SparkSession, shared: Path, attempt: str) -> None:
    if not (shared / "again-restored").exists():
        restore(spark, shared / "again-collection", shared / "again-restored", tasks=4)
    with kvstore.open_read_only(shared / "again-restored") as restored:
        assert list(restored.scan()) == model()


def follow(spark: SparkSession, shared: Path, attempt: str) -> None:
    if not (shared / "again-copy").exists():
        with kvstore.open(STORE) as store:
            store.checkpoint(shared / "again-copy")
    changes = spark.readStream.format("kvstore").option("readChangeFeed", "true")
    bound = changes.option("maxRowsPerTrigger", "500").load(str(shared / "again-copy"))
    with kvstore.open(shared / "again-target") as target:
        importer = batch_importer(target, "again", "key", "value")
        writer = bound.writeStream.foreachBatch(importer).trigger(availableNow=True)
        run_to_end(writer.option("checkpointLocation", "again-offsets").start)
        assert list(target.scan()) == model()
        assert sum(each.rows for each in target.imports.all()) == len(model())


KINDS: Final[dict[str, Callable[[SparkSession, Path, str], None]]] = {
    "import": import_rows,
    "backup": back_up,
    "compact": merge,
    "restore": put_back,
    "stream": follow,
}


def main(settings: str, shared: str, kind: str, attempt: str, tasks: str) -> None:
    spark = session("again", **json.loads(settings))
    with told(spark, int(tasks)):
        KINDS[kind](spark, Path(shared), attempt)
    spark.stop()
    print(DONE, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
