"""A Spark session with the settings that loading, reading and testing a store need: a local one, or
one on the cluster that the setting `spark.master` names.

    from kvstore.spark import session
    spark = session("flights", cores=2, memory="2g", **{"spark.sql.shuffle.partitions": "8"})

A local session writes its own files to a folder of its own in the temporary folder, which is
removed when the process ends. A session on a cluster takes the cluster's own settings for
directories, addresses and sockets. `java_for_spark` finds the Java.

The start of the JVM fixes some settings for the rest of the process: `cores`, `memory`, every
`spark.driver.*` and `spark.executor.*`, `spark.local.dir`, the warehouse, and the Java. While a
session runs, `session()` returns it and applies the settings that can still change; another value
of a fixed setting is an error. A session that is stopped and started again takes new `cores`, but
runs in the same JVM with the same `memory`.
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
from kvstore.spark.java import java_for_spark
from kvstore.spark.releases import UNIX_SOCKETS, has

CORES = 2
MEMORY = "1g"
"""The default heap. Sorting spills to disk: this heap sorts three million rows of 116 bytes."""

RANGE_SAMPLE_ROWS = 1000
"""Rows sampled per partition to find range borders. Spark's 100 leave files uneven."""

WORKER_START_SECONDS = 60
"""The longest start of a Python worker. Spark's 15 s are too short on a busy machine. The process
that plans a stream has ten seconds: Spark has that number in its code, and no setting for it."""

_PYTHON = "spark.pyspark.python"
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
"""Errors only. A Python session takes the gateway's level for all loggers; its default is WARN."""


def session(
    app_name: str = "kvstore",
    *,
    cores: int | None = None,
    memory: str | None = None,
    **conf: object,
) -> SparkSession:
    """Return the running session, or start one: local, unless `spark.master` names a cluster.

    A new session runs on `cores` threads (default 2) with `memory` of heap (default 1g). On a
    cluster `memory` is the heap of the driver, and the cluster's own settings tell the cores.
    `conf` holds Spark settings under their full names, and overrides the defaults of this module.
    The caller may `stop()` the session; otherwise the end of the process stops it. Starting takes
    about five seconds, most of them in the JVM.

    Raises `UsageError` on a name that is no Spark setting, on a setting that the running JVM cannot
    change, on `cores` for a cluster, and if no Java is found.
    """
    settings = {**_asked(cores, memory), **_checked(conf)}
    if SparkContext._active_spark_context is not None:
        # getActiveSession() is None in threads that did not start the session.
        running = SparkSession.builder.getOrCreate()
        return _adjust(running, settings)
    master = settings.get("spark.master", "local")
    if not is_local(master) and cores is not None:
        raise UsageError(
            f"cores is for a local session, and spark.master is {master}", "pass spark.cores.max"
        )
    cores = CORES if cores is None else cores
    if cores < 1:
        raise UsageError(f"cores is {cores}", "give at least one")
    scratch = Path(tempfile.mkdtemp(prefix="kvstore-spark-"))
    atexit.register(remove_scratch, scratch, os.getpid())
    defaults = default_settings(scratch, cores=cores, memory=MEMORY)
    if not is_local(master):
        defaults = {name: value for name, value in defaults.items() if name in _FOR_CLUSTERS}
    started = _start(app_name, {**defaults, **settings}, scratch)
    # Runs before the removal: the handler that is registered last runs first.
    atexit.register(_stop, started, os.getpid())
    return started


def _asked(cores: int | None, memory: str | None) -> dict[str, str]:
    """The settings that the caller has given: a running session must have the same."""
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
    """Apply all of `settings` to a running session, or none."""
    fixed = running.sparkContext.getConf()
    changes = {}
    for name, value in settings.items():
        if running.conf.isModifiable(name):
            changes[name] = value
        elif fixed.get(name) != value:
            raise UsageError(
                f"{name} is {fixed.get(name)!r} in the running Spark session, not {value!r}",
                "set it where the session is started; a JVM keeps its settings",
            )
    for name, value in changes.items():
        running.conf.set(name, value)
    return running


def is_local(master: str) -> bool:
    """Whether a session with this master runs in one JVM."""
    return master == "local" or master.startswith("local[")


_FOR_CLUSTERS = frozenset(
    [
        "spark.driver.memory",
        "spark.ui.showConsoleProgress",
        "spark.sql.session.timeZone",
        "spark.sql.execution.rangeExchange.sampleSizePerPartition",
        "spark.sql.execution.arrow.compression.codec",
        "spark.sql.streaming.stopTimeout",
        "spark.python.authenticate.socketTimeout",
    ]
)
"""The default settings that hold on a cluster too. The others name directories and addresses of
this machine, or count its cores."""


def default_settings(scratch: Path, *, cores: int, memory: str) -> dict[str, str]:
    """The settings of a session that its caller does not override. Its files go to `scratch`."""
    return {
        "spark.master": f"local[{cores}]",
        "spark.driver.memory": memory,
        # No traffic leaves this machine, and nothing looks up its name.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        # Spark's default of 200 would make mostly empty tasks, which cost more than the shuffle.
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.execution.rangeExchange.sampleSizePerPartition": str(RANGE_SAMPLE_ROWS),
        # Batches stay on this machine: with lz4 the whole job took 3.5 times as long.
        "spark.sql.execution.arrow.compression.codec": "none",
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.python.authenticate.socketTimeout": f"{WORKER_START_SECONDS}s",
        **_sockets(scratch),
    }


def _sockets(scratch: Path) -> dict[str, str]:
    """Settings that connect the JVM to its Python workers by Unix sockets, where there are any.

    On TCP each Python task waits some 40 ms for a delayed acknowledgement: a hundred small tasks on
    two cores take 2.8 s, and 1.2 s on Unix sockets.
    """
    if not has(UNIX_SOCKETS) or not hasattr(socket, "AF_UNIX"):
        return {}
    if len(os.fsencode(scratch)) > _SOCKET_FOLDER_BYTES_MAX:
        return {}
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(scratch),
        "spark.python.daemon.module": "pyspark_kvstore.daemon",
    }


_SOCKET_FOLDER_BYTES_MAX = 56
"""The path of a Unix socket has at most 104 bytes on macOS, of which Spark's names take 43."""


def _start(app_name: str, settings: Mapping[str, str], scratch: Path) -> SparkSession:
    (scratch / "local").mkdir()
    log4j = scratch / "log4j2.properties"
    log4j.write_text(_LOG4J)
    options = f"-Dlog4j2.configurationFile={log4j.as_uri()} {settings.get(_JAVA_OPTIONS, '')}"
    builder = SparkSession.builder.appName(app_name)
    for name, value in {**settings, _JAVA_OPTIONS: options.strip()}.items():
        builder = builder.config(name, value)
    environment = _process_environment()
    if is_local(settings.get("spark.master", "local")):
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    if (python := settings.get(_PYTHON)) is not None:
        environment["PYSPARK_PYTHON"] = python  # PySpark takes the setting from spark-submit only
    with _environment(environment):
        return builder.getOrCreate()


def _process_environment() -> dict[str, str]:
    """Environment variables of the JVM and its Python workers."""
    # Workers import our packages, and do not start in the caller's folder. They find installed
    # packages anyway, and site-packages must not precede the standard library.
    root = Path(__file__).resolve().parent.parent
    paths = [os.environ.get("PYTHONPATH", "")]
    if root.name not in ("site-packages", "dist-packages"):
        paths.insert(0, str(root))
    return {
        "JAVA_HOME": str(java_for_spark().home),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Apply `changes` to `os.environ` for the block: the JVM inherits them, the caller does not."""
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


def remove_scratch(scratch: Path, owner: int) -> None:
    """Remove the folder of a session when the process `owner` ends."""
    if os.getpid() == owner:  # a forked child runs these handlers too
        shutil.rmtree(scratch, ignore_errors=True)


def _stop(started: SparkSession, owner: int) -> None:
    if os.getpid() == owner and SparkContext._active_spark_context is started.sparkContext:
        started.stop()
