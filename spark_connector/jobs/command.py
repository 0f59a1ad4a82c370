"""The options that all jobs share, how they open a collection, and the session that they run in.

`spark-submit` sets the session up; otherwise a job starts a local one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from pyspark import SparkContext
from pyspark.sql import SparkSession

from kvstore.errors import KVStoreError
from kvstore.spark.access import Access, local
from kvstore.spark.sessions import session

_P = ParamSpec("_P")


def parser_of(job: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every job takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m kvstore.spark.jobs.{job}",
        description=description,
        epilog="Credentials of an object store come from the environment, as for its own tools. "
        "Every machine reads the files that are named here. spark-submit runs this job too.",
    )
    parser.add_argument(
        "--cores", type=int, help="cores of the local session that is started (default: all)"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--key-file", help="key of an encrypted collection: 32 bytes or 64 hex digits"
    )
    keys.add_argument("--passphrase-env", help="the environment variable with its passphrase")
    keys.add_argument("--passphrase-file", help="the file with its passphrase")
    parser.add_argument("--endpoint", help="URL of an object store")
    parser.add_argument("--region", help="region of an object store")
    parser.add_argument(
        "--skip-signature", action="store_true", help="the object store asks for no credentials"
    )
    return parser


def access_of(given: argparse.Namespace) -> Access:
    """The access to the collection that a command line names."""
    return Access(
        local(given.collection),
        key_file=given.key_file,
        passphrase_env=given.passphrase_env,
        passphrase_file=given.passphrase_file,
        endpoint=given.endpoint,
        region=given.region,
        skip_signature=given.skip_signature,
    )


def reporting_errors(main: Callable[_P, int]) -> Callable[_P, int]:
    """Wrap a command: it writes its errors to stderr, and then returns the exit status 1."""

    @wraps(main)
    def reporting(*args: _P.args, **named: _P.kwargs) -> int:
        try:
            return main(*args, **named)
        except KVStoreError as error:
            sys.stderr.write(f"{error}\n")
            return 1

    return reporting


@contextmanager
def job_session(job: str, given: argparse.Namespace) -> Iterator[SparkSession]:
    """The session to run a job in. A running session stays open afterwards."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has set the session up
        yield SparkSession.builder.appName(f"kvstore {job}").getOrCreate()
        return
    cores: int | None = given.cores
    if cores is None and SparkContext._active_spark_context is None:
        cores = os.cpu_count()
    yield session(job, cores=cores)
