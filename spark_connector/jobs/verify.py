"""Verify a collection with Spark: `Collection.verify`, with tasks that read parts and contents.

    python -m kvstore.spark.jobs.verify COLLECTION [--contents STORE] [--cores N]

The tasks read every part, and compare its bytes with the digest of the written ones. With a store
they also compare every version, by fingerprints of spans of the key space. They read a checkpoint
of the store, and compare older chains as far as the store's history reaches. If a part is damaged,
the job names it and exits with status 1. `spark-submit` runs this job too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

if not __package__:
    del sys.path[0]  # see the package

from pyspark.sql import SparkSession

from kvstore import Store
from kvstore.backup import VerifyReport
from kvstore.backup.chains import no_backup
from kvstore.backup.rows import row_batches
from kvstore.backup.shard import AsOf, ShardBatch, ShardPart, Split, Window
from kvstore.backup.verify import Compared, comparable, fingerprint, require_equal, together
from kvstore.base.span import Span
from kvstore.errors import CorruptionError
from kvstore.opening import open_read_only
from kvstore.remote.control import StoreOrClient, as_store, reach
from kvstore.spark.access import Access, Address
from kvstore.spark.jobs.command import access_of, job_session, parser_of, reporting_errors
from kvstore.spark.jobs.copies import copy_of
from kvstore.spark.jobs.spread import kept, run_tasks, task_count


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """The rows that one task compares: a split of a chain with the same keys of `copy`."""

    access: Access
    split: Split
    copy: str
    since: int


_Outcome: TypeAlias = tuple[Compared, Compared]
"""The changes of a task, and the state before them."""


def verify(
    spark: SparkSession,
    access: Address,
    store: StoreOrClient | None = None,
    *,
    tasks: int | None = None,
    copies: Path | None = None,
) -> VerifyReport:
    """Check all parts of all chains, one task each. With a `store`, compare the contents too.

    `copies` is a directory for the checkpoint that the tasks compare with, on the store's file
    system and seen by all of Spark's machines (default: beside the store).

    Raises a `CorruptionError` that names every missing or damaged part, or the difference, and
    `UsageError` if there is no backup.
    """
    found = Access.of(access)
    collection = found.open()
    with collection.snapshots() as held:  # keeps the parts until they are read
        chains = [batches for batches in collection.chains() if batches]
        if not chains:
            raise no_backup(found.url)
        parts = _parts(chains)
        # Largest first: the last task to start should not be the longest.
        ordered = sorted(parts, key=lambda part: -part.size)
        with kept(*held.values()):
            problems = run_tasks(
                spark,
                ordered,
                partial(_check, found),
                doing=f"verifying {found.url}",
                sees=found.directories(),
            )
    # Compaction may have replaced a part meanwhile, if the lease ran out. This is no damage.
    needed = {part.name for part in _parts(collection.chains())} if any(problems) else set()
    _require_sound(
        found.url,
        [
            problem
            for part, problem in zip(ordered, problems, strict=True)
            if problem is not None and part.name in needed
        ],
    )
    size = sum(part.size for part in parts)
    rows = sum(part.rows for part in parts)
    if store is not None and parts:
        with as_store(store) as source:
            rows = _compare(spark, found, source, tasks, copies)
    return VerifyReport(len(chains), sum(map(len, chains)), len(parts), size, rows)


def _require_sound(where: str, damaged: Sequence[str]) -> None:
    if damaged:
        remedy = "restore an instant before it, and make a new full backup"
        raise CorruptionError(where, "; ".join(damaged), remedy)


def _parts(chains: Sequence[Sequence[ShardBatch]]) -> list[ShardPart]:
    return [part for batches in chains for batch in batches for part in batch.parts]


def _compare(
    spark: SparkSession, access: Access, store: Store, tasks: int | None, copies: Path | None
) -> int:
    # The copy is taken last, so it has all versions of the chains.
    with access.open().snapshots() as chains, copy_of(store, copies) as copy:
        plan: list[list[VerifyTask]] = []
        for shard in comparable(list(chains), store):
            snapshot, since = chains[shard], max(shard.since, store.since)
            size = sum(batch.size for batch in snapshot.batches)
            count = task_count(spark, size, tasks)
            plan.append(
                [VerifyTask(access, split, str(copy), since) for split in snapshot.splits(count)]
            )
        with kept(*chains.values()):
            sees = [str(copy), *access.directories()]
            work = list(chain.from_iterable(plan))
            found = iter(
                run_tasks(spark, work, compare_rows, doing=f"comparing {access.url}", sees=sees)
            )
        return sum(_require_equal(access.url, each, found) for each in plan)


def _require_equal(where: str, tasks: Sequence[VerifyTask], found: Iterator[_Outcome]) -> int:
    """Compare one chain by the results of its tasks; see `backup.verify.require_equal`."""
    changes, state = (
        Compared(together(each.ours for each in side), together(each.theirs for each in side))
        for side in zip(*islice(found, len(tasks)), strict=True)
    )
    since, upto = tasks[0].since, tasks[0].split.as_of
    return require_equal(where, changes, state, since=since, upto=upto)


def compare_rows(task: VerifyTask) -> _Outcome:
    """Take fingerprints of one task's changes and of the state before them."""
    blob, span, since = task.access.storage().blob, task.split.span, task.since
    upto = task.split.as_of
    with open_read_only(task.copy) as copy:
        # The copy ends with its last commit; the collection may end later, without a commit.
        versions, newest = copy.replication.versions, int(copy.upper) - 1
        low, high = min(since, newest), min(upto, newest)
        ranges = [
            each for each in copy.replication.range_deletes(low, high, Span()) if each.key in span
        ]
        points = (
            change
            for change in versions(since=low, upto=high, span=span)
            if change.op != "delete_range"
        )
        state = versions(since=0, upto=low, span=span, revisions="latest")
        theirs = [
            together([fingerprint(row_batches(points)), fingerprint(row_batches(ranges))]),
            fingerprint(row_batches(state), at=since),
        ]
    ours = [
        fingerprint(task.split.read(blob, Window(since, upto), whole=Span())),
        fingerprint(task.split.read(blob, AsOf(since)), at=since),
    ]
    changes, states = (Compared(*each) for each in zip(ours, theirs, strict=True))
    return changes, states


def _check(access: Access, part: ShardPart) -> str | None:
    return access.open().check_part(part)


@reporting_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("verify", "Verify a backup collection's parts, in parallel.")
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    parser.add_argument("--contents", metavar="STORE", help="compare every version with this store")
    given = parser.parse_args(arguments)
    with job_session("verify", given) as spark, ExitStack() as stack:
        store: StoreOrClient | None = None
        if given.contents is not None:
            store = reach(given.contents)
            stack.push(store)
        report = verify(spark, access_of(given), store)
    compared = f", {report.rows:,} rows as in the store" if given.contents is not None else ""
    sys.stdout.write(f"{report.parts} parts, {report.bytes:,} bytes: as written{compared}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
