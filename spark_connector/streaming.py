"""Micro-batches into a store or a table: the sink, `apply_changes`, and the writer of
`format("kvstore")`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, overload

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType
from sortedcontainers import SortedDict

from kvstore.base.arguments import NUMBER
from kvstore.base.span import require_key
from kvstore.base.timestamp import Timestamp
from kvstore.batch import Batch
from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.building import BucketPlace, BuildingPlace, DirectoryPlace, Import
from kvstore.bulk.ingest import OnConflict
from kvstore.bulk.micro_batches import BatchOrigin
from kvstore.bulk.part import COMPRESSION, Part, PartWriter
from kvstore.bulk.pushes import Push, Pushes, shard_of
from kvstore.bulk.pushes.push_log import MicroBatch
from kvstore.bulk.sort import Duplicates
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import UsageError
from kvstore.remote.control import StoreOrClient, imports_of
from kvstore.spark.access import freeze_objects, plain_errors, require_seen
from kvstore.spark.interfaces import DataSourceArrowWriter, WriterCommitMessage
from kvstore.spark.load import PLAN_DIGITS, Columns, OfBatch, load, planned_origin, sent_part
from kvstore.spark.releases import SOURCES, require
from kvstore.tables import Table

# --------------------------------------------------------------------------------------------------
# `df.write.format("kvstore").mode("append").save(staging)`: a write that stages an import.
#
# The process that has the store open adds the import by `bulk.ingest`.
#
# A writer cannot ask Spark for an order. So the rows must be partitioned and sorted by key, as
# `sorted_rows` makes them. Each task writes one part. When all tasks have ended, the driver writes
# the manifest, which commits the import.
#
# Invariants
# 1. `commit` may run twice, and `abort` after it. Neither undoes a sealed import.
# 2. Failed and repeated tasks leave parts that no message names. Such a part is never added.

_TYPES: Final[dict[str, list[DataType]]] = {
    "key": [BinaryType()],
    "value": [BinaryType()],
    "op": [StringType()],
    "expires": [TimestampType(), LongType()],
}


@dataclass(frozen=True)
class PartWritten(WriterCommitMessage):
    """The part that one task has written. None if the task had no rows."""

    part: Part | None


class StagingWriter(DataSourceArrowWriter):
    """The writer of one import in a staging directory or an object store."""

    def __init__(self, place: Path | BucketUrl, schema: StructType, *, compression: str) -> None:
        _require_columns(schema)
        COMPRESSION.check("compression", compression)
        self._place = place
        if isinstance(place, Path):
            made = Import.create(place)
        else:
            made = Import.create(place.url, options=place.options, patience=place.patience_s)
        self._import_id = made.import_id
        self._compression = compression

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        freeze_objects()
        place = self._place
        if isinstance(place, BucketUrl):
            [(part, _)] = sent_part(place, self._import_id, iterator, self._compression)
            return PartWritten(part)
        require_seen([place])
        with PartWriter(place, self._import_id, compression=self._compression) as writer:
            for batch in iterator:
                writer.write(batch)
            return PartWritten(writer.finish())

    @plain_errors()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        freeze_objects()
        build = self._build()
        known = build.sealed_id()
        if known is not None:
            if known != self._import_id:
                raise UsageError(f"{self._where()} is sealed", "stage into another place")
            return
        parts = [m.part for m in messages if isinstance(m, PartWritten) and m.part is not None]
        build.seal(self._import_id, parts, ())

    @plain_errors()
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        freeze_objects()
        self._build().discard()

    def _build(self) -> BuildingPlace:
        place = self._place
        return DirectoryPlace(place) if isinstance(place, Path) else BucketPlace(place.open())

    def _where(self) -> str:
        return str(self._place) if isinstance(self._place, Path) else self._place.open().where


def _require_columns(schema: StructType) -> None:
    for field in schema.fields:
        if field.dataType not in _TYPES.get(field.name, []):
            raise UsageError(
                f"column {field.name} {field.dataType.simpleString()} cannot be imported",
                "pass key binary, value binary and, if need be, op string and expires timestamp; "
                "sorted_rows makes them",
            )
    if not {"key", "value"} <= set(schema.names):
        raise UsageError(f"columns {schema.names}", "pass key and value")


# --------------------------------------------------------------------------------------------------
# A stream into a store or a table: each micro-batch is one import, which the store adds once.
#
#     stream.writeStream.foreachBatch(batch_importer(store, "orders", "key", "value")).start()
#     stream.writeStream.foreachBatch(batch_importer(store.table("trips"), "trips")).start()
#
# Spark repeats a micro-batch if it crashed before it recorded the end of the batch. The id of an
# import follows from the name of the stream and the number of the batch, and a store adds an id
# once. So the store skips the repetition, even if its rows come in another order.
#
# The record of the import keeps the id of the stream and a digest of the offsets of its
# micro-batch. Invariant: a micro-batch that is skipped has the number, the stream and the offsets
# of one that was added. Another micro-batch of a known number is refused: its rows would be lost.


def batch_importer(
    store: StoreOrClient | Table,
    name: str,
    key: Columns | None = None,
    value: Column | str | None = None,
    *,
    op: Column | str | None = None,
    on_conflict: OnConflict = "overwrite",
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    expires: Column | str | None = None,
    partitions: int | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that imports each micro-batch into `store`, or into
    a table of it.

    `name` belongs to one stream for ever. With a new checkpoint location a stream is another one,
    which numbers its batches anew; with a checkpoint location that was put back to an older state
    it plans known numbers with other rows. Such a batch would be skipped under an id that the store
    knows, so the function raises `UsageError` for it, and for a batch if the store has the next
    one. A store that was restored from a backup lacks batches, which Spark does not repeat. In all
    these cases start a stream with another name and a new checkpoint location, from a time before.
    The other parameters are as in `bulk_import`.
    """
    if not name:
        raise UsageError("the stream has no name", "pass one that no other stream has")

    def add(batch: DataFrame, batch_id: int) -> None:
        origin = planned_origin(batch, batch_id)
        _require_last(store, name, batch_id, origin)
        load(
            batch,
            store,
            key,
            value,
            partitions=partitions,
            on_conflict=on_conflict,
            op=op,
            duplicates=duplicates,
            order_by=order_by,
            expires=expires,
            import_id=import_id_of(name, batch_id),
            of_batch=OfBatch(name, batch_id, origin),
        )

    return _OfThisProcess(add)


def _require_last(
    store: StoreOrClient | Table, name: str, batch_id: int, origin: BatchOrigin
) -> None:
    """Raise `UsageError` if the store has the batch behind this one, because Spark repeats the last
    one alone, or if the batch before this one came from another stream."""
    target = store.import_target().store if isinstance(store, Table) else store
    imports = imports_of(target)
    before = imports.get(import_id_of(name, batch_id - 1))
    is_last = imports.get(import_id_of(name, batch_id + 1)) is None
    if before is not None:
        known = BatchOrigin.of_text(before.origin)
        origin.require_same_query(repr(name), batch_id, known, batch_id - 1)
    if is_last:
        return
    raise UsageError(
        f"micro-batch {batch_id} of {name!r} comes behind micro-batch {batch_id + 1}",
        "pass another name: a new checkpoint location makes another stream",
    )


class _OfThisProcess:
    """A function that runs in the process of the store. Spark Connect would send it elsewhere."""

    def __init__(self, add: Callable[[DataFrame, int], None]) -> None:
        self._add = add

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self._add(batch, batch_id)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "Spark Connect runs foreachBatch on its server, and the store is open in this process",
            "run the stream in a classic session",
        )


def import_id_of(name: str, batch_id: int) -> int:
    """The import id of one micro-batch of a stream: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{name}\0{batch_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % IMPORT_ID_MAX + 1


# --------------------------------------------------------------------------------------------------
# The changes of one store into others: `apply_changes`, for a window or for each micro-batch.
#
#     stream.writeStream.foreachBatch(
# lambda batch, number: apply_changes(batch, store, position=b"feed/orders", batch_id=number))
#
# A change feed has one row for each change (`read.py`). Its rows are one commit in the
# store that takes them: this process collects them, puts them in the order in which they took
# effect, and writes them as one batch. Or they are one push (`bulk.pushes`), which each store takes
# as one commit.
#
#     order    _commit_version, and within one commit    delete_range < delete < put
#     images   update_preimage has the value before; it changes nothing
#
# Invariants
# 1. After the call, each key that the feed names, by itself or by a range, is as in the source at
#    the end of the window. Applying a window again leaves the same state.
# 2. The number of the micro-batch lies under `position`, in the commit of its changes, or in the
#    log entry of the push, with the stream and the plan of the micro-batch
#    (`bulk/micro_batches.py`). So a batch that Spark repeats makes no second commit, and no second
#    push, and a batch of another stream, or with other rows, is refused.
#
#     the key `position` := number | number " " query " " plan

_RANKS: Final[Mapping[str, int]] = {
    "delete_range": 0,
    "delete": 1,
    "put": 2,
    "insert": 2,
    "update_postimage": 2,
    "update_preimage": -1,
}
_NEEDED: Final = ("key", "value", "_change_type", "_commit_version")
_END: Final = "end_key"
_ORDER: Final = ("_commit_version", "_rank")
"""The columns by which changes are sorted: the order in which they took effect."""

_DIGESTED_ROWS: Final = 1000
"""Rows that are Python objects at one time while the plan is made of them."""


@overload
def apply_changes(
    changes: DataFrame,
    store: StoreOrClient,
    *,
    position: bytes | None = None,
    batch_id: int | None = None,
) -> Timestamp | None: ...
@overload
def apply_changes(
    changes: DataFrame,
    store: Pushes,
    *,
    position: bytes | None = None,
    batch_id: int | None = None,
    shards: int = 1,
) -> Push | None: ...
def apply_changes(
    changes: DataFrame,
    store: StoreOrClient | Pushes,
    *,
    position: bytes | None = None,
    batch_id: int | None = None,
    shards: int = 1,
) -> Timestamp | Push | None:
    """Apply a change feed to `store`, or push it to all stores that pull. Returns the time of the
    commit, or the push; None if there is nothing to do.

    `changes` is a read or a micro-batch of `format("kvstore")` with `readChangeFeed`, with or
    without images. It needs the columns `key`, `value`, `_change_type`, `_commit_version`, and
    `end_key` unless the feed has images. Filters may choose keys.

    `store` is open in this process, or a client, or the `bulk.Pushes` of a root, for which the
    number of `shards` is as in `push`. All changes become visible at once, on each store.
    `position` is a key of the store that no other stream uses: it holds the number of the last
    micro-batch. In a push it names the stream. Pass it with the `batch_id` that `foreachBatch`
    tells; then a repeated micro-batch is skipped. A stream with a new checkpoint location is
    another one, which counts anew and needs a position of its own: its micro-batches are refused,
    and so are a number below the last one, and the last number with other rows, as after a
    checkpoint location was put back. A store that was restored from a backup needs a new stream,
    from a time before the backup: a number above the next one is taken. Without `position` and
    `batch_id` a repeated window leaves the same state, but is one more commit or push.

    The rows are collected in this process. Bound the micro-batches of a stream by
    `maxBytesPerTrigger`, and start a large store from a restored backup. Raises `UsageError` for a
    frame that is no change feed, above `BATCH_BYTES_MAX`, for a micro-batch that is neither the
    last one again nor a later one of its stream, and for a push that clears more than 1,000
    ranges of keys.
    """
    feed = _feed(changes, position, batch_id)
    require(SOURCES, "apply_changes")
    if isinstance(store, Pushes):
        return _pushed(changes, store, shards, feed)
    if shards != 1:
        raise UsageError(f"shards={shards} and a store", "pass shards with bulk.Pushes")
    rows = None
    if feed is not None:
        found = store.get(feed.position)
        if found is not None:
            last = _last(found, feed.position)
            feed, rows = _with_plan(feed, last, changes)
            if _is_repeated(feed, last):
                return None
    rows = _ordered(changes) if rows is None else rows
    if not rows.num_rows:
        return None
    with store.batch() as batch:
        for step in _steps(rows):
            step.add_to(batch)
        if feed is not None:
            origin = _planned(feed, rows).origin
            batch.put(feed.position, f"{feed.number} {origin.text}".encode())
    return batch.timestamp


def _feed(changes: DataFrame, position: bytes | None, batch_id: int | None) -> MicroBatch | None:
    """The micro-batch that the caller names; None if he names none."""
    if (position is None) != (batch_id is None):
        raise UsageError("one of position and batch_id is given", "pass both, or neither")
    if position is None:
        return None
    require_key(position, name="position")
    number = NUMBER.check("batch_id", batch_id)
    return MicroBatch(position, number, planned_origin(changes, number))


def _with_plan(
    feed: MicroBatch, last: MicroBatch, changes: DataFrame
) -> tuple[MicroBatch, pa.Table | None]:
    """The micro-batch with its plan, and its rows if they make the plan. Only a repetition that
    Spark tells no offsets of is compared by its rows, which costs collecting them."""
    if feed.origin.plan or feed.number != last.number:
        return feed, None
    rows = _ordered(changes)
    return _planned(feed, rows), rows


def _planned(feed: MicroBatch, rows: pa.Table) -> MicroBatch:
    """The micro-batch, with a digest of its rows where Spark tells no offsets."""
    if feed.origin.plan:
        return feed
    digest = hashlib.sha256()
    ordered = rows.sort_by([(name, "ascending") for name in (*_ORDER, "key")])
    for batch in ordered.to_batches(max_chunksize=_DIGESTED_ROWS):
        digest.update(repr(batch.to_pydict()).encode())
    plan = f"rows-{digest.hexdigest()[:PLAN_DIGITS]}"
    return feed._replace(origin=feed.origin._replace(plan=plan))


def _pushed(
    changes: DataFrame, pushes: Pushes, shards: int, feed: MicroBatch | None
) -> Push | None:
    """Push the last change of each key, and the ranges that were cleared."""
    rows = None
    if feed is not None:
        made = pushes.of_feed(feed)
        if made is not None and made.feed is not None:
            feed, rows = _with_plan(feed, made.feed, changes)
            if _is_repeated(feed, made.feed):
                return None
    rows = _ordered(changes) if rows is None else rows
    feed = None if feed is None else _planned(feed, rows)
    last = LastChanges()
    for step in _steps(rows):
        step.add_to(last)
    if not last.values and not last.cleared:
        return None
    with pushes.begin_changes(shards, cleared=last.cleared, feed=feed) as building:
        keys: list[list[bytes]] = [[] for _ in range(shards)]
        for key in last.values:
            keys[shard_of(key, shards)].append(key)
        for shard, chosen in enumerate(keys):
            with building.writer(shard) as writer:
                for key in chosen:
                    last.write(key, writer)
        return building.seal()


class LastChanges:
    """The changes of a window as one push has them: `cleared` before `values`, None for a delete.

    A key that was written before its range was cleared is in no row: the range deletes it.
    """

    def __init__(self) -> None:
        self.cleared: list[tuple[bytes, bytes]] = []
        self.values: SortedDict[bytes, bytes | None] = SortedDict()

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Clear the keys from `start` up to `end`, which is excluded."""
        self.cleared.append((start, end))
        for key in list(self.values.irange(start, end, inclusive=(True, False))):
            del self.values[key]

    def put(self, key: bytes, value: bytes) -> None:
        """Give `key` a value."""
        self.values[key] = value

    def delete(self, key: bytes) -> None:
        """Delete `key`."""
        self.values[key] = None

    def write(self, key: bytes, writer: PartWriter) -> None:
        """Write the last change of a key."""
        value = self.values[key]
        if value is None:
            writer.delete(key)
        else:
            writer.put(key, value)


class _Step:
    """A range delete, or the puts and deletes up to the next one: the last change of each key."""

    def __init__(self, cleared: tuple[bytes, bytes] | None = None) -> None:
        self._cleared = cleared
        self._values: dict[bytes, bytes | None] = {}

    def change(self, key: bytes, value: bytes | None) -> None:
        self._values[key] = value

    def add_to(self, batch: Batch | LastChanges) -> None:
        if self._cleared is not None:
            batch.delete_range(*self._cleared)
        for key, value in self._values.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)


def _steps(rows: pa.Table) -> Iterator[_Step]:
    ends = rows[_END].to_pylist() if _END in rows.column_names else [None] * rows.num_rows
    names = ("key", "value", "_rank")
    columns = [rows[name].to_pylist() for name in names]
    step = _Step()
    for key, value, rank, end in zip(*columns, ends, strict=True):
        if rank == _RANKS["delete_range"]:
            yield step
            step = _Step((key, end))
        else:
            step.change(key, value if rank == _RANKS["put"] else None)
    yield step


def _ordered(changes: DataFrame) -> pa.Table:
    """The rows that change something, in the order in which they took effect."""
    missing = [name for name in _NEEDED if name not in changes.columns]
    if missing:
        raise UsageError(
            f"the frame has no column {missing[0]}, and is no change feed",
            'pass a read of format("kvstore") with readChangeFeed',
        )
    names = [*_NEEDED, *([_END] if _END in changes.columns else [])]
    rows = changes.select(*names).toArrow()
    kinds = pa.array(_RANKS)
    ranks = pc.index_in(rows["_change_type"], value_set=kinds)
    if ranks.null_count:
        unknown = rows["_change_type"].filter(pc.is_null(ranks))[0].as_py()
        raise UsageError(f"_change_type {unknown!r} is no change", f"pass {', '.join(_RANKS)}")
    ranks = pa.array(_RANKS.values(), pa.int8()).take(ranks.combine_chunks())
    rows = rows.append_column("_rank", ranks)
    rows = rows.filter(pc.greater_equal(rows["_rank"], 0))
    if _END not in names and pc.any(pc.equal(rows["_rank"], _RANKS["delete_range"])).as_py():
        raise UsageError("the feed has range deletes, and no column end_key", "keep the column")
    return rows.sort_by([(name, "ascending") for name in _ORDER])


def _is_repeated(feed: MicroBatch, last: MicroBatch) -> bool:
    """Whether a micro-batch is the last one again. Spark repeats no other one, so a lower number
    belongs to a stream that counts anew, whose rows would be lost."""
    feed.require_same_stream(last)
    if feed.number < last.number:
        raise UsageError(
            f"micro-batch {feed.number} of {feed.position!r} comes behind micro-batch "
            f"{last.number}",
            "pass another position: a new checkpoint location makes another stream",
        )
    return feed.number == last.number


def _last(found: bytes, position: bytes) -> MicroBatch:
    """The last micro-batch, as the key `position` tells it."""
    number, _, origin = found.partition(b" ")
    if not number.isdigit() or not origin.isascii():
        raise UsageError(
            f"the key {position!r} holds {found[:20]!r}, and no number of a micro-batch",
            "pass a key of its own as position",
        )
    return MicroBatch(position, int(number), BatchOrigin.of_text(origin.decode()))
