"""The daemon of Python workers, spoken to as Spark's JVM speaks to it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")


@pytest.fixture
def folder() -> Iterator[str]:
    """A short path: the system has 104 bytes for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="kvstore-") as path:
        yield path


def test_a_worker_that_spark_ends_while_it_waits_says_nothing(folder: str) -> None:
    environment = {
        **os.environ,
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
        "SPARK_REUSE_WORKER": "1",
    }
    daemon = subprocess.Popen(
        [sys.executable, "-m", "pyspark_kvstore.daemon", "pyspark.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert daemon.stdout is not None
    (length,) = struct.unpack("!i", daemon.stdout.read(4))
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(daemon.stdout.read(length).decode())
        (worker,) = struct.unpack("!i", waiting.recv(4))
        waiting.shutdown(socket.SHUT_WR)
        assert waiting.recv(1) == b""  # the worker has ended, and has written nothing before
        assert worker != daemon.pid
    _, errors = daemon.communicate(timeout=120)  # closing its input ends it
    assert errors == b""


def test_sessions_use_it(spark: SparkSession) -> None:
    assert spark.conf.get("spark.python.daemon.module") == "pyspark_kvstore.daemon"
