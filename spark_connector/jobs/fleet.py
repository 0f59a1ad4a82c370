"""Back up many stores with Spark: `backup.fleet`, with a task for each store.

    python -m kvstore.spark.jobs.fleet backups.toml [--cores N]

The stores lie on a file system that all of Spark's machines see, and no other process has them
open. Paths in the file count from its directory. The bandwidth of the file is divided among the
tasks that run at once. `spark-submit` runs this job too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

if not __package__:
    del sys.path[0]  # see the package

from pyspark.sql import SparkSession

from kvstore.backup.fleet import FleetOutcome, FleetStore, back_up_one, read_fleet
from kvstore.spark.jobs.command import job_session, parser_of, reporting_errors
from kvstore.spark.jobs.spread import run_tasks
from kvstore.storage.wrapped import Bandwidth


@dataclass(frozen=True, slots=True)
class FleetTask:
    """The store that one task backs up, at `rate` bytes a second at most."""

    store: FleetStore
    rate: int | None


def back_up(task: FleetTask) -> FleetOutcome:
    """Back up the store of one task."""
    return back_up_one(task.store, None if task.rate is None else Bandwidth(task.rate))


def fleet(spark: SparkSession, config: str | os.PathLike[str]) -> list[FleetOutcome]:
    """Back up the stores that a file names, each by a task; returns their outcomes, in order.

    A store that fails stops no other one: its outcome has the error. At most `concurrency` of the
    file are backed up at once. Raises `UsageError` for a mistake in the file.
    """
    found = read_fleet(config)
    rate = None if found.bandwidth is None else max(found.bandwidth // found.concurrency, 1)
    outcomes: list[FleetOutcome] = []
    for at in range(0, len(found.stores), found.concurrency):
        some = found.stores[at : at + found.concurrency]
        work = [FleetTask(store, rate) for store in some]
        outcomes += run_tasks(spark, work, back_up, doing=f"backing up {len(some)} stores")
    return outcomes


@reporting_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("fleet", "Back up the stores that a file names, in parallel.")
    parser.add_argument("config", help="the file in TOML")
    given = parser.parse_args(arguments)
    read_fleet(given.config)
    with job_session("fleet", given) as spark:
        outcomes = fleet(spark, given.config)
    for name, info, error in outcomes:
        text = error if info is None else f"{info.rows:,} rows: [{info.lower}, {info.upper})"
        sys.stdout.write(f"{name}: {text}\n")
    return 0 if all(outcome.info is not None for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
