"""The history of a store as a frame: its commits, imports, reverts and backups.

    version bigint         the time in nanoseconds: `versionAsOf` takes it
    timestamp timestamp    the same in microseconds, rounded up
    operation string       commit | import | revert | backup
    id string              the id of an import
    rows bigint            the changed keys of a commit, and the rows of an import or a backup
    bytes bigint           the size of an import or a backup

The version of a backup is the last time that it holds.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it

from kvstore.span import RESERVED
from kvstore.timestamp import TIMESTAMP_MAX
from spark_connector.access import Access, Address
from spark_connector.executors import asked
from spark_connector.origins.opening import open_origin
from spark_connector.origins.origin import HistoryEntry
from spark_connector.origins.place import find
from spark_connector.releases import SOURCES, require

_EVENTS: Final = "version long, operation string, id string, rows long, bytes long"


class _Known(NamedTuple):
    """The window of history that is kept, `(since, upto]`, and its events."""

    since: int
    upto: int
    events: list[HistoryEntry]


def history(spark: SparkSession, source: Address) -> DataFrame:
    """The history of a checkpoint, a collection or a server, newest first: see the module's table.

    A checkpoint tells commits, imports and reverts, a collection commits and backups, and a server
    commits. The commits begin with the history that is kept. They hold the rows of tables, with
    their index entries, and the rows of imports that GC has settled.

    The call costs a small task. A query of the frame passes over the changes of the history that is
    kept. Raises `NotAStoreError`, `LockedError` or `UsageError` if nothing readable lies there.
    """
    require(SOURCES, "history")
    access = Access.of(source)
    known = asked(spark, partial(_known, access), f"looking at the history of {access.url}")
    commits = (
        _changes(spark, access, known)
        .unionByName(_changes(spark, access, known, startKey=RESERVED.hex(), keyEncoding="hex"))
        .groupBy(F.col("_commit_version").alias("version"))
        .agg(F.count("*").alias("changed"))
    )
    told = [(int(event.version), *event[1:]) for event in known.events]
    events = spark.createDataFrame(told, _EVENTS)
    backups = events.where("operation = 'backup'")
    of_commits = events.where("operation <> 'backup'")
    joined = commits.join(of_commits, "version", "full_outer").select(
        "version",
        F.coalesce("operation", F.lit("commit")).alias("operation"),
        "id",
        F.coalesce("rows", "changed").alias("rows"),
        "bytes",
    )
    rounded = F.least(F.expr("(version + 999) div 1000"), F.lit(TIMESTAMP_MAX // 1000))
    at = F.timestamp_micros(rounded).alias("timestamp")
    rows = joined.unionByName(backups).select("version", at, "operation", "id", "rows", "bytes")
    return rows.orderBy(F.col("version").desc(), "operation")


def _known(access: Access) -> _Known:
    with open_origin(find(access)) as origin:
        since, upper, _ = origin.frontiers()
        return _Known(since, upper - 1, origin.events())


def _changes(spark: SparkSession, access: Access, known: _Known, **more: str) -> DataFrame:
    window = {"startingTimestamp": str(known.since), "endingTimestamp": str(known.upto)}
    options = {"readChangeFeed": "true", "columns": "_commit_version", **window, **more}
    return spark.read.format("kvstore").options(**access.as_options(), **options).load(access.url)
