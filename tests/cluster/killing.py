"""Kills of the executors of a driver, from the driver itself."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

WAIT_S = 300.0


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


def has_tasks(spark: SparkSession) -> bool:
    """Whether a stage of this application runs."""
    return bool(spark.sparkContext.statusTracker().getActiveStageIds())


@contextmanager
def killing(
    spark: SparkSession, is_time: Callable[[], Any], pick: random.Random
) -> Iterator[list[int]]:
    """Kill one executor as soon as `is_time()` holds, while the block runs. After the block the
    list has its process id, or nothing if the work ended before."""
    killed: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if is_time() and (running := executors(spark)):
                picked = pick.choice(running)
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(picked, signal.SIGKILL)
                    killed.append(picked)
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield killed
    finally:
        over.set()
        watcher.join(WAIT_S)
