"""The changes of one store into another: `apply_changes`, for a window or for each micro-batch.

    stream.writeStream.foreachBatch(
        lambda batch, number: apply_changes(batch, store, position=b"feed/orders", batch_id=number))

A change feed has one row for each change (`reading/schema.py`). Its rows are one commit in the
store that takes them: this process collects them, puts them in the order in which they took effect,
and writes them as one batch.

    order    _commit_version, and within one commit    delete_range < delete < put
    images   update_preimage has the value before; it changes nothing

Invariants
1. After the call, each key that the feed names, by itself or by a range, is as in the source at the
   end of the window. Applying a window again leaves the same state.
2. The number of the micro-batch lies under `position`, in the commit of its changes. So a batch
   that Spark repeats makes no second commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

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


def apply_changes(
    changes: DataFrame,
    store: StoreOrClient,
    *,
    position: bytes | None = None,
    batch_id: int | None = None,
) -> Timestamp | None:
    """Apply a change feed to `store`. Returns the time of the commit, or None if there is none.

    `changes` is a read or a micro-batch of `format("kvstore")` with `readChangeFeed`, with or
    without images. It needs the columns `key`, `value`, `_change_type`, `_commit_version`, and
    `end_key` unless the feed has images. Filters may choose keys.

    `store` is open in this process, or a client. All changes become visible at once. `position` is
    a key of the store that no other stream uses: it holds the number of the last micro-batch. Pass
    it with the `batch_id` that `foreachBatch` tells; then a repeated micro-batch is skipped.
    Without them a repeated window leaves the same state, and is one more commit.

    The rows are collected in this process. Bound the micro-batches of a stream by
    `maxBytesPerTrigger`, and start a large store from a restored backup. Raises `UsageError` for a
    frame that is no change feed, and above `BATCH_BYTES_MAX`.
    """
    if (position is None) != (batch_id is None):
        raise UsageError("one of position and batch_id is given", "pass both, or neither")
    if position is not None:
        require_key(position, name="position")
        found = store.get(position)
        if found is not None and batch_id is not None and batch_id <= _number(found, position):
            return None
    require(SOURCES, "apply_changes")
    rows = _ordered(changes)
    if not rows.num_rows:
        return None
    with store.batch() as batch:
        for step in _steps(rows):
            step.add_to(batch)
        if position is not None:
            batch.put(position, str(batch_id).encode())
    return batch.timestamp


class _Step:
    """A range delete, or the puts and deletes up to the next one: the last change of each key."""

    def __init__(self, cleared: tuple[bytes, bytes] | None = None) -> None:
        self._cleared = cleared
        self._values: dict[bytes, bytes | None] = {}

    def change(self, key: bytes, value: bytes | None) -> None:
        self._values[key] = value

    def add_to(self, batch: Batch) -> None:
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


def _number(found: bytes, position: bytes) -> int:
    if not found.isdigit():
        raise UsageError(
            f"the key {position!r} holds {found[:20]!r}, and no number of a micro-batch",
            "pass a key of its own as position",
        )
    return int(found)
