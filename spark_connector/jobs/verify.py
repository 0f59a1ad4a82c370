"""Read every part of a collection in parallel, and compare it with what was written.

    python -m spark_connector.jobs.verify COLLECTION [--cores N]

As `Collection.verify()` does in one process. Exit status 1, and the damaged parts by name, if any.
Also for `spark-submit`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

if not __package__:
    del sys.path[0]  # as the package says

from pyspark.sql import SparkSession

from backup import VerifyReport
from backup.shard import Part
from kvstore.errors import CorruptionError
from spark_connector.access import Access
from spark_connector.jobs.command import access_of, parser_of, running, told
from spark_connector.jobs.tasks import run_tasks


def verify(spark: SparkSession, access: Access | str) -> VerifyReport:
    """Check all parts of all chains, each in a task of its own.

    Raises `CorruptionError` naming every part that is missing or damaged.
    """
    found = Access(access) if isinstance(access, str) else access
    chains = found.open().chains()
    parts = [part for batches in chains for batch in batches for part in batch.parts]
    # Largest first: the last task to start should not be the longest.
    ordered = sorted(parts, key=lambda part: -part.size)
    problems = run_tasks(spark, ordered, partial(_check, found))
    damaged = [problem for problem in problems if problem is not None]
    if damaged:
        raise CorruptionError(
            found.url,
            "; ".join(damaged),
            "restore an instant before it, and make a new full backup",
        )
    size = sum(part.size for part in parts)
    return VerifyReport(len(chains), sum(map(len, chains)), len(parts), size, rows=0)


def _check(access: Access, part: Part) -> str | None:
    return access.open().check_part(part)


@told
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("verify", "Verify a backup collection's parts, in parallel.")
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    given = parser.parse_args(arguments)
    with running("verify", given) as spark:
        report = verify(spark, access_of(given))
    sys.stdout.write(f"{report.parts} parts, {report.bytes:,} bytes: as they were written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
