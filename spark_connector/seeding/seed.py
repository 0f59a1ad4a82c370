"""A new store or collection of a DataFrame whose rows carry their times."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import Column, DataFrame

from kvstore.arguments import require_count, require_path
from kvstore.clock import Clock
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp
from spark_connector.access import Access, Address
from spark_connector.loading.columns import Columns
from spark_connector.loading.rows import PARTITIONS_MAX, estimated_count
from spark_connector.seeding.collection import seed_collection
from spark_connector.seeding.rows import seed_rows
from spark_connector.seeding.store import SeedTimes, seed_store


def seed(
    df: DataFrame,
    url_or_path: Address,
    key: Columns,
    value: Column | str,
    at: Column | str = "ts",
    op: Column | str | None = None,
    *,
    since: TimeLike = 0,
    partitions: int | None = None,
) -> Timestamp:
    """Make a new store or collection whose versions have the times of the rows.

    A path names a store, on a file system that Spark's machines share. A URL (`file://` too) or an
    `Access` names a collection: the rows go through Spark's shuffle, and no disk is shared. `key`
    and `value` are as in `bulk_import`; `at` is a timestamp, or an integer of nanoseconds. `op`
    holds `"put"` or `"delete"`; a deletion needs no value. The history can be read from `since` on:
    pass the time from which the rows are complete. `partitions` is the number of tasks that write.
    Returns the newest time.

    Raises `UsageError` if a store or a collection is there, because history is never rewritten; for
    bad columns, nulls, and times below `since` or in the future; and for two rows of one key and
    time. After an error or a crash there is no history, and the call can be repeated.

    A collection that was seeded takes no backup of a store. Costs a sort of all rows on disk, by
    the tasks. A collection costs two computations of `df`, because Spark samples it first.
    """
    rows = seed_rows(df, key, value, at, op)
    now = Clock().wall_ns()
    times = SeedTimes(int(to_timestamp(since, name="since", now=lambda: now)), now)
    count = estimated_count(df) if partitions is None else partitions
    require_count(count, name="partitions", most=PARTITIONS_MAX)
    if isinstance(url_or_path, Access) or "://" in os.fspath(url_or_path):
        return Timestamp(seed_collection(rows, Access.of(url_or_path), times, count))
    require_path(url_or_path)
    return Timestamp(seed_store(rows, Path(os.path.abspath(url_or_path)), times, count))
