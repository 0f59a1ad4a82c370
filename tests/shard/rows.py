"""Rows for shard tests, and the model for comparison: plain Python, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from kvstore.backup.shard.rows.rules import OP_DELETE, OP_DELETE_RANGE, OP_PUT, VERSIONS_SCHEMA


class Row(NamedTuple):
    """One row of a `versions` shard."""

    key: bytes
    timestamp: int
    op: int = OP_PUT
    value: bytes | None = None
    end_key: bytes | None = None


def put(key: bytes, timestamp: int, value: bytes = b"v") -> Row:
    return Row(key, timestamp, OP_PUT, value)


def delete(key: bytes, timestamp: int) -> Row:
    return Row(key, timestamp, OP_DELETE)


def delete_range(start: bytes, end: bytes, timestamp: int) -> Row:
    return Row(start, timestamp, OP_DELETE_RANGE, None, end)


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.key, -row.timestamp, -row.op, row.end_key or b""))


def versions(rows: Iterable[Row], *, size: int = 1 << 30) -> list[pa.RecordBatch]:
    """The rows, sorted, as record batches of at most `size` rows."""
    return _batches(in_order(rows), VERSIONS_SCHEMA, size)


def _batches(
    rows: Sequence[tuple[object, ...]], schema: pa.Schema, size: int
) -> list[pa.RecordBatch]:
    batches = []
    for start in range(0, len(rows), size):
        columns = zip(*rows[start : start + size], strict=True)
        arrays = [pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return batches


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    return [
        Row(*values)
        for batch in batches
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]


def state_of(batches: Iterable[pa.RecordBatch]) -> dict[bytes, bytes | None]:
    rows = rows_of(batches)
    assert [row.key for row in rows] == sorted({row.key for row in rows})
    assert all(row.op == OP_PUT for row in rows)
    return {row.key: row.value for row in rows}


def model_state(rows: Iterable[Row], as_of: int) -> dict[bytes, bytes | None]:
    """The state at `as_of` by definition, row by row."""
    visible = [row for row in rows if row.timestamp <= as_of]
    state: dict[bytes, bytes | None] = {}
    for row in sorted(visible, key=lambda row: (row.timestamp, row.op != OP_DELETE_RANGE)):
        if row.op == OP_PUT:
            state[row.key] = row.value
        elif row.op == OP_DELETE:
            state.pop(row.key, None)
        else:
            assert row.end_key is not None
            for key in [k for k in state if row.key <= k < row.end_key]:
                del state[key]
    return dict(sorted(state.items()))
