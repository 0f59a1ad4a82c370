"""Rows of versions: made from changes, and turned into entries of the `data` family.

The columns are `backup.shard.VERSIONS_SCHEMA`. Rows are sorted by key, then newest first; at one
key and time the range tombstone comes first. Imports and reverts are expanded to the versions that
they made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from backup.shard import OP_DELETE, OP_DELETE_RANGE, OP_PUT, VERSIONS_SCHEMA
from bulk.entries import kinds_of, suffixes_of
from kvstore.changes import Change
from kvstore.limits import ARROW_BYTES_MAX, ARROW_ROWS_MAX

_OP_CODE = {"delete": OP_DELETE, "put": OP_PUT, "delete_range": OP_DELETE_RANGE}


def row_batches(changes: Iterable[Change]) -> Iterator[pa.RecordBatch]:
    """Turn changes, which come by key, into record batches bounded in rows and bytes."""
    return batches_in_order(_newest_first(changes))


def batches_in_order(changes: Iterable[Change]) -> Iterator[pa.RecordBatch]:
    """As `row_batches`, in the order in which the changes come. Holds one batch."""
    rows: list[Change] = []
    size = 0
    for change in changes:
        rows.append(change)
        size += len(change.key) + len(change.value or b"")
        if len(rows) >= ARROW_ROWS_MAX or size >= ARROW_BYTES_MAX:
            yield _batch(rows)
            rows, size = [], 0
    if rows:
        yield _batch(rows)


class Points(NamedTuple):
    """Puts and deletes, as `bulk.sst.SstFile.add_rows` takes them."""

    keys: pa.Array
    values: pa.Array
    suffixes: bytes
    kinds: bytes


def points_of(batch: pa.RecordBatch) -> Points:
    """The puts and deletes of a batch, in their order."""
    are_ranges = pc.equal(batch.column("op"), OP_DELETE_RANGE)
    if are_ranges.true_count:
        batch = batch.filter(pc.invert(are_ranges))
    suffixes = suffixes_of(batch.column("timestamp").to_numpy())
    kinds = kinds_of(pc.equal(batch.column("op"), OP_PUT))
    return Points(batch.column("key"), batch.column("value"), suffixes, kinds)


def range_rows(batch: pa.RecordBatch) -> list[tuple[bytes, bytes, int]]:
    """Start, end and timestamp of the range tombstones in a batch."""
    ranges = batch.filter(pc.equal(batch.column("op"), OP_DELETE_RANGE))
    columns = (ranges.column(name).to_pylist() for name in ("key", "end_key", "timestamp"))
    return list(zip(*columns, strict=True))


def _newest_first(changes: Iterable[Change]) -> Iterator[Change]:
    """Reverse the changes of each key, which come oldest first."""
    group: list[Change] = []
    for change in changes:
        if group and group[0].key != change.key:
            yield from sorted(group, key=_row_order)
            group = []
        group.append(change)
    yield from sorted(group, key=_row_order)


def _row_order(change: Change) -> tuple[int, bool]:
    return -change.timestamp, change.op != "delete_range"


def _batch(rows: list[Change]) -> pa.RecordBatch:
    timestamps, ops, keys, ends, values = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(keys, pa.binary()),
            pa.array(timestamps, pa.int64()),
            pa.array([_OP_CODE[op] for op in ops], pa.uint8()),
            pa.array(values, pa.binary()),
            pa.array(ends, pa.binary()),
        ],
        schema=VERSIONS_SCHEMA,
    )
