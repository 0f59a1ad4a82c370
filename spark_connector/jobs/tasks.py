"""Spreading work over Spark's cores: descriptions go out, descriptions come back, no rows.

A task that fails is tried again by Spark, and may run twice at once: so tasks write under names
that are never used twice, and what counts is what came back. Errors that trying again cannot
mend come back too, and are raised here as they are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from pyspark.sql import SparkSession

from backup.shard import ShardSnapshot
from kvstore.background import Failures
from kvstore.clock import Clock
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    UsageError,
)
from spark_connector.worker import freeze_objects

BYTES_PER_TASK: Final = 64 << 20
"""Bytes on file of one task: some parts, and long against the tens of ms a task costs."""

TASKS_PER_CORE: Final = 2
"""Pieces are even by their files' bounds only: with several to a core, none waits for one long."""

BYTES_WORTH_SHARING: Final = 4 << 20
"""Below it one task is done before several have started."""

RENEW_SECONDS: Final = 60.0
"""How often a job looks whether a lease is to be renewed: many times in the least part of one."""

_LASTING = (CorruptionError, HistoryGoneError, NotYetWrittenError, UsageError)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def task_count(spark: SparkSession, size_bytes: int, wanted: int | None = None) -> int:
    """Into how many pieces to cut `size_bytes` on file. Raises `UsageError` if `wanted` is none."""
    if wanted is not None:
        if wanted < 1:
            raise UsageError(f"tasks={wanted}", "ask for at least one, or leave it out")
        return wanted
    if size_bytes < BYTES_WORTH_SHARING:
        return 1
    cores = spark.sparkContext.defaultParallelism
    rounds = max(TASKS_PER_CORE, -(-size_bytes // (BYTES_PER_TASK * cores)))
    return cores * rounds


def run_tasks(
    spark: SparkSession, items: Sequence[_Item], work: Callable[[_Item], _Result]
) -> list[_Result]:
    """What `work` makes of each item, in order, each in a task of its own."""
    if not items:
        return []

    def attempt(item: _Item) -> _Result | KVStoreError:
        freeze_objects()
        try:
            return work(item)
        except _LASTING as error:
            return error

    results = []
    for outcome in spark.sparkContext.parallelize(items, len(items)).map(attempt).collect():
        if isinstance(outcome, KVStoreError):
            raise outcome
        results.append(outcome)
    return results


@contextmanager
def kept(*snapshots: ShardSnapshot, every_s: float = RENEW_SECONDS) -> Iterator[None]:
    """Renew the leases of what tasks read, from a thread beside: here nobody takes rows of it,
    which would renew them."""
    stopped = threading.Event()
    failures = Failures("kvstore.leases", Clock())
    owner = os.getpid()

    def renew() -> None:
        while not stopped.wait(every_s):
            for snapshot in snapshots:
                try:
                    snapshot.renew()
                except Exception as error:  # noqa: BLE001, PERF203  # the next one may be in time
                    failures.note("renewing the lease of a snapshot", error)

    thread = threading.Thread(target=renew, name="kvstore-lease-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if os.getpid() == owner:  # in a fork the thread is gone, perhaps with the event's lock
            stopped.set()
            thread.join()
