"""Read every part of a collection in parallel, and compare it with what was written.

    python -m spark_connector.jobs.verify COLLECTION [--cores N]

As `Collection.verify()` does in one process. Exit status 1, and the damaged parts by name, if any.
Also for `spark-submit`, which brings a session of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

from backup import Collection, VerifyReport
from backup.shard import Part
from kvstore.errors import CorruptionError
from spark_connector.session import session


def verify(spark: SparkSession, url: str) -> VerifyReport:
    """Check all parts of all chains, each in a task of its own.

    Raises `CorruptionError` naming every part that is missing or damaged.
    """
    collection = Collection(url)
    chains = collection.chains()
    parts = [part for batches in chains for batch in batches for part in batch.parts]
    found = _checked(spark, url, parts) if parts else []
    damaged = [problem for problem in found if problem is not None]
    if damaged:
        raise CorruptionError(
            url, "; ".join(damaged), "restore an instant before it, and make a new full backup"
        )
    size = sum(part.size for part in parts)
    return VerifyReport(len(chains), sum(map(len, chains)), len(parts), size, rows=0)


def _checked(spark: SparkSession, url: str, parts: Sequence[Part]) -> list[str | None]:
    def check(part: Part) -> str | None:
        return Collection(url).check_part(part)

    # Largest first: the last task to start should not be the longest.
    ordered = sorted(parts, key=lambda part: -part.size)
    checked: list[str | None] = (
        spark.sparkContext.parallelize(ordered, len(ordered)).map(check).collect()
    )
    return checked


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spark_connector.jobs.verify",
        description="Verify a backup collection's parts with Spark.",
    )
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    parser.add_argument("--cores", type=int, default=2, help="of a local session (default: 2)")
    given = parser.parse_args(arguments)
    spark = session("verify", cores=given.cores)
    try:
        report = verify(spark, given.collection)
    except CorruptionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{report.parts} parts, {report.bytes:,} bytes: as they were written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
