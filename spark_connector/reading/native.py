"""A collection's state by Spark's own Parquet scan, if this scan gives the right rows.

A Python data source is slower: turning Arrow batches into rows of the JVM alone costs as much as
Spark's whole scan of a Parquet file. But a filter over the columns of a part selects the rows that
are alive at a time (`backup/shard/rows/part_format.py`), and most chains are one large batch with a
few small batches behind it:

    base     the files of the oldest batch that has rows, and the terms of that filter that are not
             true of all rows by statistics
    newer    the newest change of each key in the batches behind the base: read by the driver, and
             broadcast
    cover    the range deletes of all batches, as filters on the base

    state = the rows of the base without the keys of newer, and the puts of newer

Invariants
1. The rows are the same as with `format("kvstore")` at the same time. If footers and statistics
   leave a doubt, the read goes to that source; `plan` returns the reason.
2. The call fixes files and time. If a file is missing when Spark reads it, because the chain has
   been compacted meanwhile, the query fails; it never returns fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from backup.shard import OP_PUT, UNTIL, FileBlob, ShardPart
from backup.shard.rows.part_reader import touches
from kvstore.clock import Clock
from kvstore.commit import require_readable
from kvstore.errors import UsageError
from kvstore.limits import ARROW_ROWS_MAX
from kvstore.mvcc import Cover
from kvstore.span import Span
from kvstore.timestamp import TimeLike, reached, to_timestamp
from spark_connector.access import Access, Address
from spark_connector.options import require_nanoseconds
from spark_connector.origins.collection import CollectionOrigin
from spark_connector.origins.place import find
from spark_connector.origins.row_groups import Group
from spark_connector.reading.schema import STATE, offered
from spark_connector.releases import SOURCES, has, require

NEWER_SHARE: Final = 32
"""The scan is native if the base has at least this many rows for each change behind it. Reading and
broadcasting a change costs 7 us, and a native scan saves 0.25 us for each row of the base."""

NEWER_ROWS_FEW: Final = 1_000
"""With at most this many changes behind the base a scan is native, however small the base is."""

NEWER_ROWS_MAX: Final = 200_000
NEWER_BYTES_MAX: Final = 64 << 20
"""Bounds of the changes that the driver reads and keeps in the plan."""

COVER_MAX: Final = 32
"""Range deletes that become filters. Each costs two comparisons per row."""

_PART_COLUMNS: Final = "key binary, timestamp long, op short, value binary, until long"
_NEWER_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary()), pa.field("op", pa.int8()), pa.field("value", pa.binary())]
)
_PARQUET: Final = {
    # The session may ignore such files; here this would leave out rows.
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    # The check of checksums costs too little to measure.
    "parquet.page.verify-checksum.enabled": "true",
}
_GLOB_CHARACTERS: Final = str.maketrans({mark: f"\\{mark}" for mark in "\\{}[]*?"})


@dataclass(frozen=True, slots=True)
class Scan:
    """The scan that Spark runs: `paths` as of a time, without the rows that `cover` deletes and the
    keys that `newer` replaces. `groups` are the row groups of the paths."""

    paths: tuple[str, ...]
    groups: Sequence[Group]
    span: Span
    as_of: int
    cover: Cover
    newer: pa.Table


def read_collection(
    spark: SparkSession,
    collection: Address,
    as_of: TimeLike | None = None,
    prefix: bytes | None = None,
    *,
    start: bytes | None = None,
    end: bytes | None = None,
    columns: Sequence[str] | None = None,
    native: bool | None = None,
) -> DataFrame:
    """The keys and values of a collection as of a time, by Spark's Parquet scan if possible.

    Rows and schema are as with `spark.read.format("kvstore")`. The scan is a fifth to a half faster
    if few changes lie behind the base, and no faster if many do. Spark pushes filters and prunes
    columns as with any Parquet file. `as_of` defaults to the newest time of the collection.

    This call fixes the time and the files. If the chain is compacted or expired before a query of
    this frame has ended, the query fails; a new call gives a frame that works. `format("kvstore")`
    looks for the files in each task instead.

    The scan is native for an unencrypted collection on a file system that all of Spark's machines
    see, if its oldest backup has most of the rows (the changes behind it are at most 1,000, or a
    thirty-second part of it; `compact()` merges them into it) and at most 32 range deletes apply.
    All other reads go through `format("kvstore")`. With `native=True` they raise a `UsageError`
    that tells the reason; with `native=False` every read goes there.

    Costs a look at the footers of all parts and a read of the changes behind the oldest backup,
    both in this process. Raises `HistoryGoneError` or `NotYetWrittenError` for a time outside the
    history that is kept.
    """
    access = Access.of(collection)
    span = Span.of(start, end, prefix)
    asked = None if as_of is None else to_timestamp(as_of, name="as_of", now=Clock().wall_ns)
    names = offered(changes=False, columns=columns).names
    place = find(access)
    if not place.is_collection:
        raise UsageError(f"{access.url} is no collection", 'use spark.read.format("kvstore")')
    with CollectionOrigin(place, [] if asked is None else [asked]) as origin:
        oldest, upper, _ = origin.frontiers()
        require_nanoseconds("as_of", as_of, upper)
        at = upper - 1 if asked is None else reached(int(asked), upper - 1)
        require_readable(at, since=oldest, upper=upper)
        span = origin.narrow(span)
        found = "native is False" if native is False else plan(origin, access, span, at)
    if isinstance(found, Scan):
        return _frame(spark, found).select(*names)
    if native:
        raise UsageError(f"{access.url} has no native scan: {found}", "leave native out")
    return _by_the_source(spark, access, span, at, names)


def plan(origin: CollectionOrigin, access: Access, span: Span, as_of: int) -> Scan | str:
    """The scan of a state, or the reason why Spark cannot scan it."""
    blob = access.storage().blob
    if not isinstance(blob, FileBlob):
        return "it is encrypted or in an object store"
    wanted = [
        (batch.upper, parts)
        for batch in origin.batches
        if (parts := [p for p in batch.parts if p.time_min <= as_of and touches(p, span)])
    ]
    if not wanted:
        return Scan((), (), span, as_of, Cover([], []), _NEWER_SCHEMA.empty_table())
    (upper, base), *behind = wanted
    newer = [part for _, parts in behind for part in parts]
    reason = _unfit_base(base, origin) or _unfit_newer(newer, base, origin)
    if reason is not None:
        return reason
    cover = origin.cover(span, as_of)
    if sum(map(bool, cover.newest)) > COVER_MAX:
        return f"more than {COVER_MAX} range deletes"
    paths = tuple(f"file://{blob.path(part.name)}" for part in base)
    groups = [group for part in base for group in origin.groups(part)]
    newest = _newest_of(newer, origin, span, upper - 1, as_of)
    return Scan(paths, groups, span, as_of, cover, newest)


def _unfit_base(parts: Sequence[ShardPart], origin: CollectionOrigin) -> str | None:
    """The reason why the filter would not give the state of these parts, if there is one."""
    bounds: list[tuple[bytes, bytes]] = []
    for part in parts:
        if part.inline is not None or part.drop_below:
            return "a part is not a file of its own, or some of its rows do not count"
        groups = origin.groups(part)
        if UNTIL.name not in groups[0].file.schema_arrow.names:
            return "a part is of an older format"
        known = _bounds(groups)
        if known is None:
            return "a part does not tell its least and greatest key"
        bounds.append(known)
    bounds.sort()
    if any(before[1] >= after[0] for before, after in pairwise(bounds)):
        return "the versions of a key are in two parts"
    return None


def _bounds(groups: Sequence[Group]) -> tuple[bytes, bytes] | None:
    """The exact least and greatest key of a part. None if its statistics do not tell them."""
    first, last = groups[0].first, groups[-1].last
    if first is None or last is None:
        return None
    return first, last


def _unfit_newer(
    parts: Sequence[ShardPart], base: Sequence[ShardPart], origin: CollectionOrigin
) -> str | None:
    """The reason why these are too many changes to lay over the base, if they are."""
    rows, below = (sum(part.rows for part in each) for each in (parts, base))
    if rows > min(max(below // NEWER_SHARE, NEWER_ROWS_FEW), NEWER_ROWS_MAX):
        return f"{rows:,} changes behind the oldest backup"
    size = sum(group.size_bytes for part in parts for group in origin.groups(part))
    return f"{size:,} bytes behind the oldest backup" if size > NEWER_BYTES_MAX else None


def _newest_of(
    parts: Sequence[ShardPart], origin: CollectionOrigin, span: Span, since: int, as_of: int
) -> pa.Table:
    """The newest change of each key behind the base."""
    batches: Iterable[pa.RecordBatch] = ()
    if parts:
        names, rows = _NEWER_SCHEMA.names, ARROW_ROWS_MAX
        batches = origin.points(
            span, since=since, upto=as_of, latest=True, columns=names, rows=rows
        )
    return pa.Table.from_batches([b.cast(_NEWER_SCHEMA) for b in batches], _NEWER_SCHEMA)


def _frame(spark: SparkSession, scan: Scan) -> DataFrame:
    if not scan.paths:
        return spark.createDataFrame([], STATE)
    paths = [path.translate(_GLOB_CHARACTERS) for path in scan.paths]
    base = spark.read.schema(_PART_COLUMNS).options(**_PARQUET).parquet(*paths)
    conditions = list(_conditions(scan))
    if conditions:  # one `where`: Spark spends 10 ms on analysing each
        base = base.where(reduce(and_, conditions))
    if not scan.newer.num_rows:
        return base
    newer = spark.createDataFrame(*_rows_of(scan.newer))
    puts = newer.where(F.col("op") == OP_PUT).select(*STATE.names)
    return _without(base, newer.select("key")).select(*STATE.names).unionByName(puts)


def _rows_of(newer: pa.Table) -> tuple[Any, ...]:
    """The arguments by which a release of Spark makes a frame of the table."""
    if has(SOURCES):
        return (newer,)
    columns = [column.to_pylist() for column in newer.columns]
    return list(zip(*columns, strict=True)), "key binary, op byte, value binary"


def _without(base: DataFrame, newer: DataFrame) -> DataFrame:
    """The rows of `base` whose key is not in `newer`, which is broadcast.

    The join is by a hash of the key. Spark looks up a number in a table of longs; for any other
    value it makes a row first. With the hash a read with five increments takes 0.9 times as long.
    Two comparisons stand for the equality of the keys, because Spark would join by an equality too.
    """
    replaced = F.broadcast(newer.withColumnRenamed("key", "newer"))
    same = F.expr("xxhash64(key) = xxhash64(newer) and key >= newer and key <= newer")
    return base.join(replaced, same, "left_anti")


def _conditions(scan: Scan) -> Iterable[Column]:
    """The conditions under which a row of the base is alive, by its own columns and by `cover`.

    A condition that is true of all rows is left out: reading its column costs time.
    """
    key, timestamp, until = F.col("key"), F.col("timestamp"), F.col(UNTIL.name)
    groups, span, as_of = scan.groups, scan.span, scan.as_of
    if any(not group.op_min == group.op_max == OP_PUT for group in groups):
        yield F.col("op") == OP_PUT
    if any(group.newest > as_of for group in groups):
        yield timestamp <= as_of
    if any(group.replaced <= as_of for group in groups):
        yield until.isNull() | (until > as_of)
    if not all(group.lies_in(span) for group in groups):
        yield key >= F.lit(span.start)
        if span.end is not None:
            yield key < F.lit(span.end)
    for (start, end), deleted in zip(pairwise(scan.cover.starts), scan.cover.newest, strict=False):
        if deleted:
            yield (key < F.lit(start)) | (key >= F.lit(end)) | (timestamp >= deleted)


def _by_the_source(
    spark: SparkSession, access: Access, span: Span, as_of: int, names: Sequence[str]
) -> DataFrame:
    require(SOURCES, "a read without a native scan")
    options = access.as_options() | {"versionAsOf": str(as_of), "columns": ",".join(names)}
    if span.start:
        options["startKey"] = span.start.hex()
    if span.end is not None:
        options["endKey"] = span.end.hex()
    if span != Span():
        options["keyEncoding"] = "hex"
    return spark.read.format("kvstore").options(**options).load(access.url)
