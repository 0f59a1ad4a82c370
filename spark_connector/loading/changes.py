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
   entry of the push. So a batch that Spark repeats makes no second commit, and no second push.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, overload

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from sortedcontainers import SortedDict

from bulk.part import PartWriter
from bulk.pushes import Push, Pushes, shard_of
from bulk.pushes.log import MicroBatch
from kvstore.arguments import require_count
from kvstore.batch import Batch
from kvstore.control.scripts import StoreOrClient
from kvstore.errors import UsageError
from kvstore.span import require_key
from kvstore.timestamp import Timestamp
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
    tells; then a repeated micro-batch is skipped. A stream with a new checkpoint location counts
    anew and needs a position of its own: a number below the last one is refused. A store that was
    restored from a backup needs such a stream, from a time before the backup: a number above the
    next one is taken. Without `position` and `batch_id` a repeated window leaves the same state,
    but is one more commit or push.

    The rows are collected in this process. Bound the micro-batches of a stream by
    `maxBytesPerTrigger`, and start a large store from a restored backup. Raises `UsageError` for a
    frame that is no change feed, above `BATCH_BYTES_MAX`, for a micro-batch below the last one, and
    for a push that clears more than 1,000 ranges of keys.
    """
    feed = _feed(position, batch_id)
    require(SOURCES, "apply_changes")
    if isinstance(store, Pushes):
        return _pushed(changes, store, shards, feed)
    if shards != 1:
        raise UsageError(f"shards={shards} and a store", "pass shards with bulk.Pushes")
    if feed is not None:
        found = store.get(feed.position)
        if found is not None and _is_repeated(feed, _number(found, feed.position)):
            return None
    rows = _ordered(changes)
    if not rows.num_rows:
        return None
    with store.batch() as batch:
        for step in _steps(rows):
            step.add_to(batch)
        if feed is not None:
            batch.put(feed.position, str(feed.number).encode())
    return batch.timestamp


def _feed(position: bytes | None, batch_id: int | None) -> MicroBatch | None:
    """The micro-batch that the caller names; None if he names none."""
    if (position is None) != (batch_id is None):
        raise UsageError("one of position and batch_id is given", "pass both, or neither")
    if position is None:
        return None
    require_key(position, name="position")
    return MicroBatch(position, require_count(batch_id, name="batch_id", least=0))


def _pushed(
    changes: DataFrame, pushes: Pushes, shards: int, feed: MicroBatch | None
) -> Push | None:
    """Push the last change of each key, and the ranges that were cleared."""
    made = None if feed is None else pushes.of_feed(feed)
    newest = None if made is None else made.feed
    if feed is not None and newest is not None and _is_repeated(feed, newest.number):
        return None
    last = LastChanges()
    for step in _steps(_ordered(changes)):
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
    return rows.sort_by([("_commit_version", "ascending"), ("_rank", "ascending")])


def _is_repeated(feed: MicroBatch, last: int) -> bool:
    """Whether a micro-batch is the last one again. Spark repeats no other one, so a lower number
    belongs to a stream that counts anew, whose rows would be lost."""
    if feed.number < last:
        raise UsageError(
            f"micro-batch {feed.number} of {feed.position!r} comes behind micro-batch {last}",
            "pass another position: a new checkpoint location makes another stream",
        )
    return feed.number == last


def _number(found: bytes, position: bytes) -> int:
    if not found.isdigit():
        raise UsageError(
            f"the key {position!r} holds {found[:20]!r}, and no number of a micro-batch",
            "pass a key of its own as position",
        )
    return int(found)
