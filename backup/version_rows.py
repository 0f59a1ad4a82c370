"""Rows of versions: made from changes, and turned into entries of the `data` family.

The columns are `backup.shard.VERSIONS_SCHEMA`. Rows are sorted by key, then newest first; at one
key and time the range tombstone comes first. Imports and reverts are expanded to the versions that
they made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from backup.shard import OP_DELETE, OP_DELETE_RANGE, OP_PUT, VERSIONS_SCHEMA
from bulk.entries import version_prefixes, with_kinds
from kvstore.changes import Change
from kvstore.limits import ARROW_BYTES_MAX, ARROW_ROWS_MAX, SCAN_CHUNK

_OP_CODE = {"delete": OP_DELETE, "put": OP_PUT, "delete_range": OP_DELETE_RANGE}


def row_batches(changes: Iterable[Change]) -> Iterator[pa.RecordBatch]:
    """Turn changes, which come by key, into record batches bounded in rows and bytes."""
    rows: list[Change] = []
    size = 0
    for change in _newest_first(changes):
        rows.append(change)
        size += len(change.key) + len(change.value or b"")
        if len(rows) >= ARROW_ROWS_MAX or size >= ARROW_BYTES_MAX:
            yield _batch(rows)
            rows, size = [], 0
    if rows:
        yield _batch(rows)


def data_entries(batch: pa.RecordBatch) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield keys and values of the `data` family for the puts and deletes in a batch.

    The chunks are small enough to stay in the processor's cache until they are written.
    """
    points = batch.filter(pc.not_equal(batch.column("op"), OP_DELETE_RANGE))
    times = points.column("timestamp").to_numpy()
    is_put = pc.equal(points.column("op"), OP_PUT)
    keys = with_kinds(version_prefixes(points.column("key"), times), is_put)
    values = pc.fill_null(points.column("value"), pa.scalar(b"", pa.binary()))
    for at in range(0, len(keys), SCAN_CHUNK):
        yield keys.slice(at, SCAN_CHUNK).to_pylist(), values.slice(at, SCAN_CHUNK).to_pylist()


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
