"""A server of Spark Connect in a process of its own: `python -m tests.matrix.connect`.

It prints its port, which the system chose, and ends when its input ends. So several servers run on
one machine at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from kvstore.spark.java import java_for_spark
from kvstore.spark.sessions import WORKER_START_SECONDS


@contextmanager
def server() -> Iterator[str]:
    """Start a server, and yield the URL by which clients reach it."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "JAVA_HOME": str(java_for_spark().home),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"sc://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def main() -> None:
    settings = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.python.authenticate.socketTimeout": f"{WORKER_START_SECONDS}s",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    service = "org.apache.spark.sql.connect.service.SparkConnectService$"
    port = getattr(getattr(spark._jvm, service), "MODULE$").localPort()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main()
