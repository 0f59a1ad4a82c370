"""Checks for things that executors of a cluster may lack: directories that this process sees, and
this library.

A task that does not see a directory must not make one of the same name: its files would lie on the
disk of one machine, where no other process finds them. So a task looks first, and the error names
its machine. Another attempt would help only by chance, so the error ends the job.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kvstore.errors import KVStoreError, UsageError
from spark_connector.releases import CONNECT, require
from spark_connector.worker import freeze_objects

_Result = TypeVar("_Result")

_DESCRIPTION: Final = "spark.job.description"
_MISSING: Final = re.compile(r"ModuleNotFoundError: (No module named '[^']*')")
_NOT_COMPILED: Final = re.compile(r"NotCompiledError: (the loops of kvstore are not compiled .*?);")
_OTHER_PYTHON: Final = re.compile(r"\[PYTHON_VERSION_MISMATCH\] (.*?\.) ")


def is_remote(spark: object) -> bool:
    """Whether the session is one of Spark Connect: it has no context, and no JVM beside it. Raises
    `UsageError` if it is, and the release is too old for it."""
    found = not isinstance(spark, SparkSession)
    if found:
        require(CONNECT)
    return found


def cores_of(spark: SparkSession) -> int | None:
    """The cores of the executors; None where Spark Connect does not tell them."""
    return None if is_remote(spark) else spark.sparkContext.defaultParallelism


def require_seen(directories: Iterable[str | os.PathLike[str]]) -> None:
    """Raise `UsageError` unless this machine sees all these directories."""
    for directory in directories:
        if not os.path.isdir(directory):
            raise UsageError(
                f"machine {socket.gethostname()} does not see {os.fspath(directory)}",
                "use a directory that this machine and all of Spark's machines see under one path",
            )


@contextmanager
def running_tasks(spark: SparkSession, doing: str) -> Iterator[None]:
    """Tasks run in the block. Spark's pages show them as `kvstore: doing`, unless the caller has
    described his jobs himself.

    Executors without this library, without its compiled modules, or with another Python, are
    reported as a `UsageError` of one line.
    """
    try:
        with _described(spark, f"kvstore: {doing}"):
            yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        if (bare := _NOT_COMPILED.search(text)) is not None:
            raise UsageError(
                f"Spark's executors have sources without compiled modules: {bare[1]}",
                "install a wheel of kvstore-mvcc in their Python, or ship an archive of an "
                "installed one: see docs/how-to/spark-cluster.md",
            ) from None
        if (missing := _MISSING.search(text)) is not None:
            raise UsageError(
                f"Spark's executors cannot import the library: {missing[1]}",
                "install kvstore-mvcc[spark] in their Python, or ship it: see "
                "docs/how-to/spark-cluster.md",
            ) from None  # Spark's text is a page, and tells nothing more
        if (other := _OTHER_PYTHON.search(text)) is not None:
            raise UsageError(
                f"Spark's executors run another Python: {other[1]}",
                "set spark.pyspark.python, or PYSPARK_PYTHON, to this version on their machines",
            ) from None
        raise


def asked(spark: SparkSession, work: Callable[[], _Result], doing: str) -> _Result:
    """The result of `work` in one task. A worker looks at places, and not the driver, which may
    have the store open: a look from the same process would take the driver's own lock away.

    Raises the error of the library that the task has found.
    """

    def attempt(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_objects()
        found: _Result | KVStoreError
        try:
            found = work()
        except KVStoreError as error:  # a retry cannot help
            found = error
        yield pa.record_batch({"found": pa.array([pickle.dumps(found)], pa.binary())})

    with running_tasks(spark, doing):
        [row] = spark.range(0, 1, 1, 1).mapInArrow(attempt, "found binary").collect()
    found: _Result | KVStoreError = pickle.loads(row[0])
    if isinstance(found, KVStoreError):
        raise found
    return found


@contextmanager
def _described(spark: SparkSession, text: str) -> Iterator[None]:
    if is_remote(spark):  # it describes no jobs
        yield
        return
    context = spark.sparkContext
    if context.getLocalProperty(_DESCRIPTION) is not None:
        yield
        return
    context.setLocalProperty(_DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, None)  # type: ignore[arg-type]  # it removes it
