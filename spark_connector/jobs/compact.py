"""Compact a collection with Spark: `Collection.compact`, with tasks that merge the parts.

    python -m kvstore.spark.jobs.compact COLLECTION [--cores N]

The driver cuts the key space of the batches to merge. Each task merges its span of all batches and
writes the parts. Then the driver replaces the inputs by one command, if they are still there.
`spark-submit` runs this job too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

if not __package__:
    del sys.path[0]  # see the package

from pyspark.sql import SparkSession

from kvstore.backup.chains import no_backup
from kvstore.backup.shard import (
    BatchDesc,
    Compact,
    ShardBatch,
    part_names,
    read_batches,
    split_batches,
    write_batch,
)
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.base.meters import Tally
from kvstore.base.span import Span
from kvstore.spark.access import Access, Address
from kvstore.spark.jobs.command import access_of, job_session, parser_of, reporting_errors
from kvstore.spark.jobs.spread import run_tasks, task_count


@dataclass(frozen=True, slots=True)
class CompactTask:
    """The rows that one task merges: the rows of `span` in `inputs`."""

    access: Access
    chain: str
    span: Span
    inputs: tuple[ShardBatch, ...]
    since: int
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SparkMerge:
    """A merge of batches by tasks; see `backup.shard.slot_compaction.Merge`."""

    spark: SparkSession
    access: Access
    tasks: int | None = None

    def __call__(
        self, log: StateLog, inputs: tuple[ShardBatch, ...], since: int, tally: Tally
    ) -> ShardBatch:
        count = task_count(self.spark, sum(batch.size for batch in inputs), self.tasks)
        kept = log.state.kept_below(since)
        spans = split_batches(log.blob, inputs, count)
        work = [CompactTask(self.access, log.shard, span, inputs, since, kept) for span in spans]
        merged = run_tasks(
            self.spark,
            work,
            merge_parts,
            doing=f"compacting {self.access.url}",
            sees=self.access.directories(),
        )
        parts = tuple(part for batch in merged for part in batch.parts)
        tally.add(sum(part.rows for part in parts))
        return ShardBatch(inputs[0].lower, inputs[-1].upper, since, parts)


def merge_parts(task: CompactTask) -> ShardBatch:
    """Merge the rows of one task."""
    blob = task.access.storage().blob
    lower, upper = task.inputs[0].lower, task.inputs[-1].upper
    rows = read_batches(
        blob,
        task.inputs,
        view=Compact(lower, task.since, task.kept),
        span=task.span,
        whole=Span(),
    )
    desc = BatchDesc(lower, upper, task.since)
    names = part_names(task.chain)
    return write_batch(blob, desc, rows, names=names, beside=False)


def compact(spark: SparkSession, access: Address, *, tasks: int | None = None) -> None:
    """Merge the batches of the newest chain into one; see `Collection.compact`."""
    found = Access.of(access)
    found.open().compact(merge=SparkMerge(spark, found, tasks))


@reporting_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("compact", "Merge the backups of a collection into one, in parallel.")
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    parser.add_argument("--tasks", type=int, help="number of tasks (default: by size)")
    given = parser.parse_args(arguments)
    access = access_of(given)
    before = access.open().show()
    if not before.batches:
        raise no_backup(access.url)
    with job_session("compact", given) as spark:
        compact(spark, access, tasks=given.tasks)
        after = access.open().show()
    sys.stdout.write(
        f"{before.batches} backups became {after.batches}, "
        f"{before.bytes:,} bytes became {after.bytes:,}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
