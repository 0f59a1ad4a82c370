"""Spreading work over Spark's cores. Tasks get and return descriptions, never rows.

Spark tries a failed task again, and may run one twice at once. So no two attempts write under the
same name, and only the returned results count. An error that another attempt cannot mend comes back
as a result too, and is raised in the driver.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from kvstore.backup.shard import ShardSnapshot
from kvstore.base.background import Failures
from kvstore.base.clock import Clock
from kvstore.errors import (
    Argument,
    CorruptionError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.spark.access import cores_of, freeze_objects, is_remote, require_seen, running_tasks
from kvstore.spark.releases import NUMBERED_PARTITIONS, has

BYTES_PER_TASK: Final = 64 << 20
"""Bytes in files per task: some parts, whose work is long against the tens of ms of a task."""

TASKS_PER_CORE: Final = 2
"""The bounds of files cut the work into tasks of unequal size. With several tasks per core, no core
waits long for the last one."""

BYTES_WORTH_SHARING: Final = 4 << 20
"""Below this size one task ends before several have started."""

RENEW_SECONDS: Final = 60.0
"""How often a job renews leases if need be: many times within the shortest lease."""

_LASTING = (CorruptionError, HistoryGoneError, NotYetWrittenError, UsageError)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def task_count(spark: SparkSession, size_bytes: int, wanted: int | None = None) -> int:
    """The number of tasks for `size_bytes` in files, or `wanted`. It must be at least one. In a
    session of Spark Connect only a small job needs no `wanted`."""
    if wanted is not None:
        if wanted < 1:
            raise UsageError(Argument("tasks", str(wanted)), "pass at least one, or leave it out")
        return wanted
    if size_bytes < BYTES_WORTH_SHARING:
        return 1
    cores = cores_of(spark)
    if cores is None:
        raise UsageError("Spark Connect does not tell the number of cores", "pass tasks")
    rounds = max(TASKS_PER_CORE, -(-size_bytes // (BYTES_PER_TASK * cores)))
    return cores * rounds


def run_tasks(
    spark: SparkSession,
    items: Sequence[_Item],
    work: Callable[[_Item], _Result],
    *,
    doing: str,
    sees: Sequence[str] = (),
) -> list[_Result]:
    """The results of `work` for each item, in order. Each item has a task of its own.

    `doing` describes them in Spark's pages. The machines of the tasks must see the directories
    `sees`.
    """
    if not items:
        return []

    def attempt(item: _Item) -> _Result | KVStoreError:
        freeze_objects()
        try:
            require_seen(sees)
            return work(item)
        except _LASTING as error:
            return error

    results = []
    with running_tasks(spark, doing):
        if is_remote(spark):
            outcomes = _sent(spark, items, attempt)
        else:
            outcomes = spark.sparkContext.parallelize(items, len(items)).map(attempt).collect()
    for outcome in outcomes:
        if isinstance(outcome, KVStoreError):
            raise outcome
        results.append(outcome)
    return results


def _sent(
    spark: SparkSession, items: Sequence[_Item], attempt: Callable[[_Item], _Result | KVStoreError]
) -> list[_Result | KVStoreError]:
    """The outcomes by way of frames: a session of Spark Connect has no other one."""

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number, item in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                outcome = pickle.dumps(attempt(pickle.loads(item)))
                yield pa.record_batch({"number": [number], "outcome": [outcome]})

    pickled = [(number, pickle.dumps(item)) for number, item in enumerate(items)]
    frame = spark.createDataFrame(pickled, "number int, item binary")
    if has(NUMBERED_PARTITIONS):
        apart = frame.repartitionById(len(items), "number")
    else:  # a task may get two rows, or none
        apart = frame.repartition(len(items))
    found = apart.mapInArrow(work, "number long, outcome binary").collect()
    return [pickle.loads(row.outcome) for row in sorted(found, key=lambda row: row.number)]


@contextmanager
def kept(*snapshots: ShardSnapshot, every_s: float = RENEW_SECONDS) -> Iterator[None]:
    """Renew the leases of snapshots from a thread, while tasks read them.

    Reading renews a lease only in the process that holds it.
    """
    stopped = threading.Event()
    failures = Failures("kvstore.leases", Clock())
    owner = os.getpid()

    def renew() -> None:
        while not stopped.wait(every_s):
            for snapshot in snapshots:
                try:
                    snapshot.renew()
                except Exception as error:  # noqa: BLE001, PERF203  # the next may succeed
                    failures.note("renewing the lease of a snapshot", error)

    thread = threading.Thread(target=renew, name="kvstore-lease-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if os.getpid() == owner:  # a fork has no such thread, and the event's lock may be taken
            stopped.set()
            thread.join()
