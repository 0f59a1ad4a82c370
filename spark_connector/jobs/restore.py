"""Restore a collection with Spark: `Collection.restore` and `restore_into`, by tasks.

    python -m kvstore.spark.jobs.restore COLLECTION PATH [--as-of TIME] [--prefix P]
                                           [--state-only | --into] [--cores N]

A new store at PATH gets the history with its original timestamps. The driver cuts the key space of
a snapshot, and each task writes sorted files of its span beside PATH, on a file system that Spark's
workers share. The driver takes the files into the store, which appears when it is whole. With
`--into`, PATH is a store that no other process has open. All rows that were alive at TIME become
visible in it at once, at the time when they are added. `spark-submit` runs this job too.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

if not __package__:
    del sys.path[0]  # see the package

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # Spark's habit

from kvstore.backup.expiries import some_expire
from kvstore.backup.restore import Built, built_from
from kvstore.backup.rows import tables_in
from kvstore.backup.shard import ShardSnapshot, Split, View
from kvstore.base.meters import Tally
from kvstore.base.span import Span
from kvstore.base.timestamp import ACCEPTED, TimeLike, Timestamp
from kvstore.errors import UsageError, storage_errors
from kvstore.mvcc.expiry_records import WAITING, Due, waiting_key
from kvstore.remote.control import StoreOrClient, reach
from kvstore.spark.access import Access, Address
from kvstore.spark.jobs.command import access_of, job_session, parser_of, reporting_errors
from kvstore.spark.jobs.spread import kept, run_tasks, task_count
from kvstore.spark.load import ImportReport, ImportRows, run_import
from kvstore.spark.releases import SOURCES, require
from kvstore.spark.source import FORMAT


@dataclass(frozen=True, slots=True)
class RestoreTask:
    """The files that one task builds: a split of `whole`, in a folder of `directory`."""

    access: Access
    split: Split
    view: View
    whole: Span
    directory: str


@dataclass(frozen=True, slots=True)
class SparkBuild:
    """A build of a store's files by tasks; see `backup.restore.Build`."""

    spark: SparkSession
    access: Access
    tasks: int | None = None

    def __call__(
        self, snapshot: ShardSnapshot, view: View, span: Span, directory: Path, tally: Tally
    ) -> Iterator[Built]:
        count = task_count(self.spark, sum(b.size for b in snapshot.batches), self.tasks)
        work = [
            RestoreTask(self.access, split, view, span, str(directory.absolute()))
            for split in snapshot.splits(count, span)
        ]
        with kept(snapshot):
            sees = [str(directory.absolute()), *self.access.directories()]
            found = run_tasks(
                self.spark, work, build_files, doing=f"restoring {self.access.url}", sees=sees
            )
        for built, rows in found:
            yield from built
            tally.add(rows)


def build_files(task: RestoreTask) -> tuple[list[Built], int]:
    """Write the files of one task, and count their rows. Each attempt has a folder of its own."""
    directory = Path(task.directory) / secrets.token_hex(8)
    with storage_errors(str(directory)):
        directory.mkdir()
    blob = task.access.storage().blob
    tally = Tally()
    rows = tally.over(task.split.read(blob, task.view, whole=task.whole))
    return list(built_from(rows, directory)), tally.rows


def restore(
    spark: SparkSession,
    access: Address,
    path: str | os.PathLike[str],
    *,
    as_of: TimeLike | None = None,
    prefix: bytes | None = None,
    start: bytes | None = None,
    end: bytes | None = None,
    history: bool = True,
    tasks: int | None = None,
) -> Timestamp:
    """Build a new store at `path`; see `Collection.restore` for parameters and errors."""
    found = Access.of(access)
    build = SparkBuild(spark, found, tasks)
    return found.open().restore(path, as_of, prefix, history, start=start, end=end, build=build)


def restore_into(
    spark: SparkSession,
    access: Address,
    store: StoreOrClient,
    *,
    as_of: TimeLike | None = None,
    prefix: bytes | str | None = None,
) -> ImportReport:
    """Import the state of a collection into `store`; see `Collection.restore_into`.

    A `prefix` of type str stands for its UTF-8 bytes.
    """
    found = Access.of(access)
    if isinstance(prefix, str):
        prefix = prefix.encode()
    require(SOURCES, "restore_into")
    reader = spark.read.format(FORMAT).options(**found.as_options())
    if prefix is not None:
        reader = reader.options(prefix=prefix.hex(), keyEncoding="hex")
    with found.open().snapshot(as_of) as (_, snapshot):
        if tables := tables_in(snapshot, Span() if prefix is None else Span.of_prefix(prefix)):
            raise UsageError(
                f"the collection has table {tables[0].table!r}",
                "restore into a new store, or with collection.restore_into, or pass a prefix",
            )
        expiring = some_expire(snapshot, Span() if prefix is None else Span.of_prefix(prefix))
        with kept(snapshot):
            if not expiring:
                rows = reader.option("versionAsOf", snapshot.as_of).load(found.url)
                return run_import(ImportRows(rows, "key", "value"), store)
            feed = {**_NEWEST, "endingTimestamp": str(snapshot.as_of)}
            records = spark.read.format(FORMAT).options(**found.as_options(), **feed)
            records = records.options(prefix=WAITING.hex(), keyEncoding="hex")
            rows = _expiring(reader.options(**feed).load(found.url), records.load(found.url))
            return run_import(ImportRows(rows, "key", "value", expires="expires"), store)


_NEWEST: Final = {"readChangeFeed": "true", "startingTimestamp": "0", "revisions": "latest"}
"""The options of a read of the state, whose rows have the times of their versions."""


def _expiring(rows: DataFrame, records: DataFrame) -> DataFrame:
    """Rows with their due times in a column `expires`, from the `waiting` records with the same
    times: see `kvstore.mvcc.expiry_records`. Costs a shuffle of both."""
    at, key_at = len(WAITING) + 1, len(waiting_key(Due(0), b"")) + 1
    dues = records.select(
        F.expr(f"substring(key, {key_at})").alias("key"),
        "_commit_version",
        F.conv(F.hex(F.substring("key", at, 8)), 16, 10).cast("bigint").alias("expires"),
    )
    found = rows.join(dues, ["key", "_commit_version"], "left")
    return found.select("key", "value", "expires")


@reporting_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("restore", "Restore a collection, or its state into a store, in parallel.")
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    parser.add_argument(
        "path", help="path of the store, on a file system that Spark's workers share"
    )
    parser.add_argument("--as-of", help=f"{ACCEPTED} (default: newest)")
    parser.add_argument("--prefix", help="only keys that begin with this text")
    parser.add_argument("--tasks", type=int, help="number of tasks (default: by size)")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--state-only", action="store_true", help="without history")
    ways.add_argument("--into", action="store_true", help="import into the store at PATH")
    given = parser.parse_args(arguments)
    access = access_of(given)
    if given.into and given.tasks is not None:
        raise UsageError("--tasks means nothing with --into", "leave it out")
    with job_session("restore", given) as spark:
        if given.into:
            with (
                access.open().snapshot(given.as_of),
                reach(given.path) as store,
            ):
                report = restore_into(spark, access, store, as_of=given.as_of, prefix=given.prefix)
            text = f"{report.rows:,} rows in {report.files} files, visible at {report.stamp}"
        else:
            at = restore(
                spark,
                access,
                given.path,
                as_of=given.as_of,
                prefix=None if given.prefix is None else given.prefix.encode(),
                history=not given.state_only,
                tasks=given.tasks,
            )
            text = f"{given.path} is the store as of {at}"
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
