"""Back a store up with Spark: `Collection.backup`, with tasks that write the parts.

    python -m kvstore.spark.jobs.backup STORE COLLECTION [--full] [--token T] [--cores N]

The driver has the store open. It takes one timestamp and a checkpoint beside the store (hard links,
so the tasks must see the store's file system), and cuts the key space. Each task writes the parts
of its span from the checkpoint, and the driver appends all of them as one batch. So the collection
has the same rows as after a backup by one process, and a backup of either kind continues where the
last one ended.

If the change index shows that the window is small, the driver writes it alone. `spark-submit` runs
this job too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    del sys.path[0]  # see the package

from pyspark.sql import SparkSession

from kvstore import Store
from kvstore.backup.rows import RowPosition, exported
from kvstore.backup.shard import BatchDesc, Shard, ShardBatch, part_names, write_batch
from kvstore.backup.window import Attempt, BackupInfo, Uploaded, upload_window
from kvstore.base.meters import OnProgress
from kvstore.base.span import Span
from kvstore.base.timestamp import AgeLike
from kvstore.opening import open_read_only
from kvstore.remote.control import StoreOrClient, reach
from kvstore.spark.access import Access, Address
from kvstore.spark.jobs.command import access_of, job_session, parser_of, reporting_errors
from kvstore.spark.jobs.copies import copy_of
from kvstore.spark.jobs.spread import run_tasks, task_count


@dataclass(frozen=True, slots=True)
class BackupTask:
    """The rows that one task writes: the rows of `span` in the window, behind `after`."""

    access: Access
    chain: str
    copy: str
    span: Span
    since: int | None
    upto: int
    desc: BatchDesc
    after: RowPosition | None


@dataclass(frozen=True, slots=True)
class SparkUpload:
    """An upload of windows by tasks; see `kvstore.backup.window.Upload`."""

    spark: SparkSession
    access: Access
    tasks: int | None = None
    copies: Path | None = None

    def __call__(
        self, store: Store, shard: Shard, attempt: Attempt, progress: OnProgress | None
    ) -> Uploaded:
        upto = attempt.upper - 1
        window = exported(store, since=attempt.since, upto=upto, after=attempt.after)
        if window.is_small:
            return upload_window(window, shard, attempt, progress)
        del window  # ends the pass that it has begun
        with copy_of(store, self.copies) as copy:
            with open_read_only(copy) as reader:
                # GC may have run before the copy was taken: then the copy keeps less history.
                newest = min(upto, int(reader.upper) - 1)
                whole_since = exported(reader, since=attempt.since, upto=newest).whole_since
                size = sum(file.size_bytes for file in reader.layout.files())
                spans = reader.layout.splits(
                    task_count(self.spark, size, self.tasks),
                    None if attempt.after is None else Span(attempt.after.key),
                    with_tables=True,
                )
            work = [
                BackupTask(
                    self.access,
                    shard.name,
                    str(copy),
                    span,
                    attempt.since,
                    newest,
                    BatchDesc(attempt.lower, attempt.upper),
                    attempt.after,
                )
                for span in spans
            ]
            written = run_tasks(
                self.spark,
                work,
                write_parts,
                doing=f"backing up into {self.access.url}",
                sees=[str(copy), *self.access.directories()],
            )
        parts = tuple(part for batch in written for part in batch.parts)
        if progress is not None:
            progress(sum(part.rows for part in parts))
        return Uploaded(whole_since, ShardBatch(attempt.lower, attempt.upper, parts=parts))


def write_parts(task: BackupTask) -> ShardBatch:
    """Write the parts of one task."""
    blob = task.access.storage().blob
    with open_read_only(task.copy) as copy:
        window = exported(copy, since=task.since, upto=task.upto, after=task.after, span=task.span)
        names = part_names(task.chain)
        return write_batch(blob, task.desc, window.rows, names=names, beside=False)


def backup(
    spark: SparkSession,
    store: StoreOrClient,
    access: Address,
    *,
    full: bool = False,
    token: str | None = None,
    max_age: AgeLike | None = None,
    tasks: int | None = None,
    copies: Path | None = None,
) -> BackupInfo:
    """Append the commits of `store` since the last backup, with tasks that write the parts.

    Parameters and errors are as in `Collection.backup`. `copies` is a directory for the checkpoint
    that the tasks read, on the store's file system and seen by all of Spark's machines (default:
    beside the store). `tasks` is the number of tasks (default: by size).
    """
    found = Access.of(access)
    upload = SparkUpload(spark, found, tasks, copies)
    return found.open().backup(store, full=full, token=token, max_age=max_age, upload=upload)


@reporting_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("backup", "Back a store up into a collection, in parallel.")
    parser.add_argument(
        "store", help="directory; a process that has it open must listen (control=True)"
    )
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    parser.add_argument("--full", action="store_true", help="begin a chain beside the present one")
    parser.add_argument("--token", help="name of this backup: running it again makes no second one")
    parser.add_argument("--tasks", type=int, help="number of tasks (default: by size)")
    given = parser.parse_args(arguments)
    with job_session("backup", given) as spark, reach(given.store) as store:
        info = backup(
            spark,
            store,
            access_of(given),
            full=given.full,
            token=given.token,
            tasks=given.tasks,
        )
    sys.stdout.write(
        f"{info.rows:,} rows in {info.parts} parts, {info.bytes:,} bytes: "
        f"[{info.lower}, {info.upper})\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
