"""The changes of one store into others: `apply_changes`, for a window or for each micro-batch.

    stream.writeStream.foreachBatch(
        lambda batch, number: apply_changes(batch, store, position=b"feed/orders", batch_id=number))

A change feed has one row for each change (`reading/schema.py`). Its rows are one commit in the
store that takes them: this process collects them, puts them in the order in which they took effect,
and writes them as one batch. Or they are one push (`bulk.pushes`), which each store takes as one
commit.

    order    _commit_version, and within one commit    delete_range < delete < put
    images   update_preimage has the value before; it changes nothing

Invariants
1. After the call, each key that the feed names, by itself or by a range, is as in the source at the
   end of the window. Applying a window again leaves the same state.
2. The number of the micro-batch lies under `position`, in the commit of its changes, or in the log
   entry of the push, with the stream and the plan of the micro-batch (`bulk/micro_batches.py`). So
   a batch that Spark repeats makes no second commit, and no second push, and a batch of another
   stream, or with other rows, is refused.

    the key `position` := number | number " " query " " plan
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Final, overload

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from sortedcontainers import SortedDict

from bulk.micro_batches import Origin
from bulk.part import PartWriter
from bulk.pushes import Push, Pushes, shard_of
from bulk.pushes.log import MicroBatch
from kvstore.arguments import require_count
from kvstore.batch import Batch
from kvstore.control.scripts import StoreOrClient
from kvstore.errors import UsageError
from kvstore.span import require_key
from kvstore.timestamp import Timestamp
from spark_connector.loading.planned import PLAN_DIGITS, planned_origin
from spark_connector.releases import SOURCES, require

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
    number = require_count(batch_id, name="batch_id", least=0)
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
    return MicroBatch(position, int(number), Origin.of_text(origin.decode()))
