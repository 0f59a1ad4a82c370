"""The progress of a Spark action, for the process that waits for it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from pyspark import SparkContext
from pyspark.sql import SparkSession

from kvstore.errors import UsageError
from spark_connector.executors import is_remote

Progress: TypeAlias = "Callable[[int, int], None]"
"""Called with the numbers of tasks done and of tasks known. The second grows as stages are
planned."""

INTERVAL_S: Final = 0.5
_GROUP: Final = "spark.jobGroup.id"


@contextmanager
def watched(spark: SparkSession, progress: Progress | None) -> Iterator[None]:
    """Report on the jobs that the block starts in this thread, from a second thread.

    The last report comes when the block ends. The end of the block also raises the error of
    `progress`, if there is one.
    """
    if progress is None:
        yield
        return
    if is_remote(spark):
        raise UsageError("Spark Connect tells no progress of tasks", "leave progress out")
    context = spark.sparkContext
    before = context.getLocalProperty(_GROUP)
    group = f"kvstore-{secrets.token_hex(8)}"
    context.setLocalProperty(_GROUP, group)
    ended = threading.Event()
    watcher = _Watcher(context, group, progress, ended)
    watcher.start()
    try:
        yield
        watcher.succeeded = True
    finally:
        ended.set()
        watcher.join()
        context.setLocalProperty(_GROUP, before)  # type: ignore[arg-type]  # None removes it
    if watcher.error is not None:
        raise watcher.error


class _Watcher(threading.Thread):
    def __init__(
        self, context: SparkContext, group: str, progress: Progress, ended: threading.Event
    ) -> None:
        super().__init__(name="kvstore-progress", daemon=True)
        self._context = context
        self._group = group
        self._progress = progress
        self._ended = ended
        self.succeeded = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(INTERVAL_S):
                self._progress(*self._tasks())
            done, known = self._tasks()
            # Spark counts the tasks of stages that it skips, because their output exists already.
            self._progress(known if self.succeeded else done, known)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            self.error = error

    def _tasks(self) -> tuple[int, int]:
        tracker = self._context.statusTracker()
        done = known = 0
        for job in tracker.getJobIdsForGroup(self._group):
            found = tracker.getJobInfo(job)
            for stage in found.stageIds if found is not None else ():
                info = tracker.getStageInfo(int(stage))
                if info is not None:
                    done += info.numCompletedTasks
                    known += info.numTasks
        return done, known
