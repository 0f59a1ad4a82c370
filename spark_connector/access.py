"""What drivers, planning workers and tasks need: checks of what executors lack, worker set-up, and
access to a collection or a server.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kvstore.backup import Collection
from kvstore.backup.place import find_place
from kvstore.backup.sealed import Secret
from kvstore.backup.shard import Storage
from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.staging import staging_place
from kvstore.errors import KVStoreError, UsageError
from kvstore.spark.releases import CONNECT, require
from kvstore.storage.address import file_path, require_address

if TYPE_CHECKING:
    from kvstore.remote.client import Client


# --------------------------------------------------------------------------------------------------
# Checks for things that executors of a cluster may lack: directories that this process sees, and
# this library.
#
# A task that does not see a directory must not make one of the same name: its files would lie on
# the disk of one machine, where no other process finds them. So a task looks first, and the error
# names its machine. Another attempt would help only by chance, so the error ends the job.

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


# --------------------------------------------------------------------------------------------------
# The set-up of a Python worker of Spark before its first task, and its errors.
#
# Spark's worker runs Python's garbage collector after each task and each step of planning, and the
# next task waits for it: 60 ms for the 90,000 objects of the modules that a task imports. The
# collector skips frozen objects.

_OF_WORKERS: Final = ("PYTHON_UNIX_DOMAIN_ENABLED", "PYTHON_WORKER_FACTORY_SECRET")
"""Variables that Spark sets in the environment of its Python workers alone."""

_print_error: Final = traceback.print_exc
_HIDES_STACK: Final = "SPARK_HIDE_TRACEBACK"


@cache
def freeze_objects() -> None:
    """Keep all present objects out of garbage collection. Only the first call does anything.

    Call it in Spark's workers only, after their imports. It runs no collection before: imports
    leave no garbage, and the first call of each worker would wait 22 ms.
    """
    gc.freeze()
    if _is_worker():
        traceback.print_exc = _print_other


@contextmanager
def plain_errors() -> Iterator[None]:
    """In a worker of Spark, errors of the library leave the block without the worker's stack.

    Spark sends the text of an error to the driver. The error says what to do, and a stack of thirty
    lines would hide it. The worker ends with the error, so no error of other code is cut short.
    """
    try:
        yield
    except KVStoreError:
        if _is_worker():
            os.environ[_HIDES_STACK] = "1"  # PySpark looks when it writes the error
        raise


def _is_worker() -> bool:
    return any(name in os.environ for name in _OF_WORKERS)


def _print_other(*args: Any, **named: Any) -> None:
    """Print the error that ends a worker, in the place of `traceback.print_exc`, which PySpark's
    daemon calls for it.

    Spark closes the socket of a planner, or of a task with a limit, as soon as it has its answer.
    The worker then fails to write, which is no error of anyone.
    """
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        _print_error(*args, **named)


# --------------------------------------------------------------------------------------------------
# How the driver, the planning workers and the tasks open a collection, or call a server.
#
# An `Access` holds references, never secrets: the name of an environment variable, or the path of a
# file that every machine of the cluster has. The credentials of an object store come from where its
# own tools find them: the environment, a profile, or the machine's role.

Address: TypeAlias = "Access | str | os.PathLike[str]"
"""An `Access`, the path or URL of an unencrypted collection, or the URL of a server that asks for
no token."""

LEASE_SECONDS: Final = 3600
"""The default time for which history of a live store outlasts the last task that reads it."""

_SERVERS: Final = ("http://", "https://")
_FOR_SERVERS: Final = ("token_env", "token_file", "ca_file", "lease_seconds")
_FOR_COLLECTIONS: Final = (
    "key_file",
    "passphrase_env",
    "passphrase_file",
    "endpoint",
    "region",
    "skip_signature",
)

_OPTIONS: Final[Mapping[str, str]] = {
    "key_file": "keyFile",
    "passphrase_env": "passphraseEnv",
    "passphrase_file": "passphraseFile",
    "endpoint": "endpoint",
    "region": "region",
    "skip_signature": "skipSignature",
    "token_env": "tokenEnv",
    "token_file": "tokenFile",
    "ca_file": "caFile",
    "lease_seconds": "leaseSeconds",
}
"""The names of the fields as options of `format("kvstore")`."""


@dataclass(frozen=True, slots=True)
class Access:
    """The address of a collection with references to at most one key, or of a server with a
    reference to at most one token.

    `endpoint`, `region` and `skip_signature` are for object stores; their defaults come from the
    environment. `ca_file` has the certificates of the server's issuers, unless the machine trusts
    them anyway. `lease_seconds` is the time for which a live store keeps history after the last
    task has read it.
    """

    url: str
    key_file: str | None = None
    passphrase_env: str | None = None
    passphrase_file: str | None = None
    endpoint: str | None = None
    region: str | None = None
    skip_signature: bool = False
    token_env: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    lease_seconds: int = LEASE_SECONDS

    def __post_init__(self) -> None:
        if self.url.startswith("memory://"):
            raise UsageError(
                f"{self.url} is in the memory of one process", "Spark has several: use a path"
            )
        keys = [self.key_file, self.passphrase_env, self.passphrase_file]
        if sum(key is not None for key in keys) > 1:
            raise UsageError(
                "more than one of keyFile, passphraseEnv, passphraseFile is given", "pass one"
            )
        if self.token_env is not None and self.token_file is not None:
            raise UsageError("tokenEnv and tokenFile are both given", "pass one")
        foreign = _FOR_COLLECTIONS if self.is_server else _FOR_SERVERS
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        for name in given:
            if name in foreign:
                what = "a server" if self.is_server else "no server"
                raise UsageError(f"{_OPTIONS[name]} is given, and the path is {what}", "remove it")
        if self.is_server and "@" in self.url.partition("://")[2].partition("/")[0]:
            raise UsageError("the URL of a server has a password in it", "pass tokenFile")

    @property
    def is_server(self) -> bool:
        """Whether the URL is one of a server."""
        return self.url.startswith(_SERVERS)

    @classmethod
    def of(cls, access: Address) -> Access:
        """An `Access` with absolute paths: Spark's processes run in other directories."""
        found = access if isinstance(access, Access) else cls(os.fspath(access))
        return replace(
            found,
            url=absolute(found.url),
            key_file=_absolute(found.key_file),
            passphrase_file=_absolute(found.passphrase_file),
            token_file=_absolute(found.token_file),
            ca_file=_absolute(found.ca_file),
        )

    def directories(self) -> list[str]:
        """The directories that a task must see to use the collection: its state, if it is local."""
        return [] if "://" in self.url else [os.path.join(self.url, "consensus")]

    def as_options(self) -> dict[str, str]:
        """The fields but `url`, as options of `format("kvstore")`."""
        texts: dict[str, str] = {}
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                texts[_OPTIONS[each.name]] = "true" if value is True else str(value)
        return texts

    def connect(self) -> Client:
        """A client of the server. Raises `UsageError` if the token is missing, and the errors of
        `kvstore.connect`."""
        token = None
        if self.token_file is not None:
            token = _first_line(self.token_file, "token")
        elif self.token_env is not None:
            token = _variable(self.token_env, "a token file")
        from kvstore.remote.client import (
            connect,  # brings TLS with it, which most tasks do not need
        )

        return connect(self.url, token, ca=self.ca_file)

    def open(self) -> Collection:
        """Open the collection. Raises `UsageError` if the key is missing or wrong."""
        return Collection(
            self.url, self._passphrase(), key_file=self.key_file, options=self.bucket_options()
        )

    def storage(self) -> Storage:
        """The collection's storage, which decrypts with the key. Raises as `open` does."""
        passphrase, secret = self._passphrase(), None
        if passphrase is not None or self.key_file is not None:
            secret = Secret(passphrase=passphrase, key_file=self.key_file)
        return find_place(self.url, secret, options=self.bucket_options()).storage

    def _passphrase(self) -> str | None:
        if self.passphrase_file is not None:
            return _first_line(self.passphrase_file, "passphrase")
        if self.passphrase_env is None:
            return None
        return _variable(self.passphrase_env, "a key file")

    def bucket_options(self) -> dict[str, Any]:
        """The options by which the object store is opened."""
        options: dict[str, Any] = {}
        if self.endpoint is not None:
            options["endpoint"] = self.endpoint
        if self.region is not None:
            options["region"] = self.region
        if self.skip_signature:
            options["skip_signature"] = True
        return options


def local(path: str) -> str:
    """The path that a `file:` URL names, also in Hadoop's form `file:/a`; other texts unchanged."""
    return file_path(path) if path.lower().startswith("file:/") else path


def absolute(path: str) -> str:
    """A path or the path of a `file:` URL as an absolute path; another URL unchanged.

    Tasks run in directories of their own, so a path is made absolute before it is sent to one.
    Raises `UsageError` for a text that is empty, or a URL with one slash, as `dbfs:/folder`.
    """
    path = require_address(local(path))
    return path if "://" in path else os.path.abspath(path)


def staging_at(given: Address) -> Path | BucketUrl:
    """The staging place that `given` names: a directory with an absolute path, or a URL.

    Spark's machines write there and the store's process reads there. Raises `UsageError` for the
    memory of one process, and for any other text.
    """
    access = given if isinstance(given, Access) else None
    text = access.url if access is not None else local(os.fspath(given))  # type: ignore[arg-type]
    if text.startswith("memory:"):
        raise UsageError(f"{text} is in the memory of one process", "pass a directory or a bucket")
    options = {} if access is None else access.bucket_options()
    return staging_place(given if text == given else text, options)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _variable(name: str, other: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise UsageError(
            f"environment variable {name} is not set in Spark's processes",
            f"set it before the session starts, or spark.executorEnv; or use {other}",
        )
    return value


def _first_line(path: str, what: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0].rstrip("\r")
    except OSError as error:
        what = f"{what} file {path} cannot be read: {error}"
        raise UsageError(what, "check the path, and that all machines see it") from error
