"""What the command lines of the jobs share: how a collection is opened, and which session runs.

Under `spark-submit` the session is the one that it sets up; else a local one is started.
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
from spark_connector.access import Access, local
from spark_connector.session import session

_P = ParamSpec("_P")


def parser_of(job: str, description: str) -> argparse.ArgumentParser:
    """A parser that has the options every job takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m spark_connector.jobs.{job}",
        description=description,
        epilog="Credentials of an object store come from the environment, as its own tools take "
        "them. Files named here are read on every machine. Also for spark-submit.",
    )
    parser.add_argument(
        "--cores", type=int, help="of the local session that is started (default: all)"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key-file", help="of an encrypted collection: 32 bytes or 64 hex digits")
    keys.add_argument("--passphrase-env", help="the environment variable with its passphrase")
    keys.add_argument("--passphrase-file", help="the file with its passphrase")
    parser.add_argument("--endpoint", help="of an object store")
    parser.add_argument("--region", help="of an object store")
    parser.add_argument(
        "--skip-signature", action="store_true", help="an object store that asks for no credentials"
    )
    return parser


def access_of(given: argparse.Namespace) -> Access:
    """How to open the collection that a command line names."""
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
    """A command that writes its errors to stderr, and then has the exit status 1."""

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
    """The session to run a job in; one that was there before goes on afterwards."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has begun, and says where to run
        yield SparkSession.builder.appName(f"kvstore {job}").getOrCreate()
        return
    cores: int | None = given.cores
    if cores is None and SparkContext._active_spark_context is None:
        cores = os.cpu_count()
    yield session(job, cores=cores)
