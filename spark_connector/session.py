"""A local Spark session with the settings that loading, reading and testing a store want.

    from spark_connector import session
    spark = session("flights", cores=2, memory="2g", **{"spark.sql.shuffle.partitions": "8"})

Everything a session writes for itself goes to a folder of its own under the temporary one, and
is removed when the process ends. Java is found by `spark_connector.java`.

What is decided when the JVM starts and cannot change in this process any more: `cores`,
`memory`, every `spark.driver.*`, `spark.executor.*`, `spark.local.dir`, the warehouse, and the
Java. While a session runs, `session()` returns it and applies what can still change; asking
for another value of what cannot is an error. A session stopped and started again takes new
`cores`, but runs in the same JVM, with its `memory`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from kvstore.errors import UsageError
from spark_connector.java import java_for_spark

CORES = 2
MEMORY = "1g"
"""The heap by default. Sorting spills: three million rows of 116 bytes were sorted in this."""

RANGE_SAMPLE_ROWS = 1000
"""Rows sampled a partition to find range borders. Spark's 100 leaves files uneven."""

WORKER_START_SECONDS = 60
"""How long a Python worker may take to call back. Spark's 15 s fail on a busy machine."""

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
"""Errors only. A Python session takes the gateway's level for all; by default that is WARN."""


def session(
    app_name: str = "kvstore",
    *,
    cores: int | None = None,
    memory: str | None = None,
    **conf: object,
) -> SparkSession:
    """Return the running session, or start a local one on `cores` threads (2) and `memory` of
    heap (1g).

    `conf` holds Spark settings by their full names and wins over the defaults here. Whoever
    calls it may `stop()` the session; what was started here is stopped at exit anyway. Starting
    takes about five seconds, most of it the JVM's.

    Raises `UsageError` on a name that is no Spark setting, on a setting that the running JVM
    cannot change, and where no Java is found.
    """
    settings = {**_asked(cores, memory), **_checked(conf)}
    if SparkContext._active_spark_context is not None:
        # Not getActiveSession(): that one is a thread's, and None in every other thread.
        running = SparkSession.builder.getOrCreate()
        return _adjust(running, {_PUSHDOWN: "true", **settings})
    cores = CORES if cores is None else cores
    if cores < 1:
        raise UsageError(f"cores is {cores}", "give at least one")
    scratch = Path(tempfile.mkdtemp(prefix="kvstore-spark-"))
    atexit.register(_remove, scratch, os.getpid())
    started = _start(
        app_name, {**_defaults(scratch, cores=cores, memory=MEMORY), **settings}, scratch
    )
    # Runs before the removal: the last registered goes first.
    atexit.register(_stop, started, os.getpid())
    return started


def _asked(cores: int | None, memory: str | None) -> dict[str, str]:
    """What was not left to the defaults: a running session must have it."""
    asked = {} if cores is None else {"spark.master": f"local[{cores}]"}
    return asked if memory is None else {**asked, "spark.driver.memory": memory}


def _checked(conf: Mapping[str, object]) -> dict[str, str]:
    for name in conf:
        if not name.startswith("spark."):
            raise UsageError(f"{name!r} is no Spark setting", "write its full name: spark.…")
    return {name: _text(value) for name, value in conf.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _adjust(running: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """Apply `settings` to a running session, all or none."""
    fixed = running.sparkContext.getConf()
    changes = {}
    for name, value in settings.items():
        if running.conf.isModifiable(name):
            changes[name] = value
        elif fixed.get(name) != value:
            raise UsageError(
                f"{name} is {fixed.get(name)!r} in the running Spark session, not {value!r}",
                "set it where the session is started; a JVM's settings end with its process",
            )
    for name, value in changes.items():
        running.conf.set(name, value)
    return running


def _defaults(scratch: Path, *, cores: int, memory: str) -> dict[str, str]:
    return {
        "spark.master": f"local[{cores}]",
        "spark.driver.memory": memory,
        # Nothing leaves this machine, and nothing asks what the machine is called.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        # Two hundred tasks of nothing cost more than the shuffle.
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.execution.rangeExchange.sampleSizePerPartition": str(RANGE_SAMPLE_ROWS),
        # Batches go to a worker on this machine: lz4 made the whole job 3.5 times slower.
        "spark.sql.execution.arrow.compression.codec": "none",
        # Off by default, and a reader that can push filters fails while it is off.
        _PUSHDOWN: "true",
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.python.authenticate.socketTimeout": f"{WORKER_START_SECONDS}s",
        **_sockets(scratch),
    }


def _sockets(scratch: Path) -> dict[str, str]:
    """Workers are spoken to by files, where the system has sockets that are files.

    Through TCP each task of Python waits some 40 ms for an acknowledgement that is held back: a
    hundred small ones on two cores take 2.8 s, and 1.2 so.
    """
    if not hasattr(socket, "AF_UNIX") or len(os.fsencode(scratch)) > _SOCKET_FOLDER_BYTES_MAX:
        return {}
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(scratch),
        "spark.python.daemon.module": "pyspark_kvstore.daemon",
    }


_SOCKET_FOLDER_BYTES_MAX = 56
"""Of the path of such a file the system takes 104 bytes, macOS at least; Spark's names have 43."""


def _start(app_name: str, settings: Mapping[str, str], scratch: Path) -> SparkSession:
    (scratch / "local").mkdir()
    log4j = scratch / "log4j2.properties"
    log4j.write_text(_LOG4J)
    options = f"-Dlog4j2.configurationFile={log4j.as_uri()} {settings.get(_JAVA_OPTIONS, '')}"
    builder = SparkSession.builder.appName(app_name)
    for name, value in {**settings, _JAVA_OPTIONS: options.strip()}.items():
        builder = builder.config(name, value)
    with _environment(_process_environment()):
        return builder.getOrCreate()


def _process_environment() -> dict[str, str]:
    """What the JVM and its Python workers must find in their environment."""
    # The workers import these packages by name, and are not started in the caller's folder.
    # Installed ones are found anyway, and site-packages must not come before the standard library.
    root = Path(__file__).resolve().parent.parent
    paths = [os.environ.get("PYTHONPATH", "")]
    if root.name not in ("site-packages", "dist-packages"):
        paths.insert(0, str(root))
    return {
        "JAVA_HOME": str(java_for_spark().home),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Hold `changes` in `os.environ`: the JVM inherits them, the caller keeps its own."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs the handlers too
        shutil.rmtree(scratch, ignore_errors=True)


def _stop(started: SparkSession, owner: int) -> None:
    if os.getpid() == owner and SparkContext._active_spark_context is started.sparkContext:
        started.stop()
