"""Rows as Arrow record batches, built from whole buffers rather than row by row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import pyarrow as pa

from kvstore.errors import UsageError
from kvstore.limits import ARROW_BYTES_MAX, ARROW_ROWS_MAX

DEFAULT_BATCH_ROWS: Final = ARROW_ROWS_MAX

ROWS_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
)


def binary_array(items: Sequence[bytes]) -> pa.Array:
    """An Arrow binary array of `items`. A third of the time of `pa.array(items)`."""
    offsets = pa.py_buffer(array("i", accumulate(map(len, items), initial=0)).tobytes())
    data = pa.py_buffer(b"".join(items))
    return pa.Array.from_buffers(pa.binary(), len(items), [None, offsets, data])


def row_batches(
    chunks: Iterable[tuple[list[bytes], list[bytes]]], batch_rows: int
) -> pa.RecordBatchReader:
    """Record batches of at most `batch_rows` rows and about `ARROW_BYTES_MAX` bytes."""
    if batch_rows < 1:
        raise UsageError(f"batch_rows={batch_rows}", "pass a count of at least 1")
    return pa.RecordBatchReader.from_batches(ROWS_SCHEMA, _batches(chunks, batch_rows))


def _batches(
    chunks: Iterable[tuple[list[bytes], list[bytes]]], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    for chunk_keys, chunk_values in chunks:
        keys += chunk_keys
        values += chunk_values
        size += sum(map(len, chunk_keys)) + sum(map(len, chunk_values))
        while len(keys) >= batch_rows or (keys and size >= ARROW_BYTES_MAX):
            cut = min(batch_rows, len(keys))
            if size >= ARROW_BYTES_MAX:
                cut = min(cut, _rows_within(keys, values, ARROW_BYTES_MAX))
            yield _batch(keys[:cut], values[:cut])
            del keys[:cut], values[:cut]
            size = sum(map(len, keys)) + sum(map(len, values))
    if keys:
        yield _batch(keys, values)


def _rows_within(keys: Sequence[bytes], values: Sequence[bytes], size_max: int) -> int:
    """How many rows fit into `size_max` bytes; at least one."""
    size = 0
    for count, (key, value) in enumerate(zip(keys, values, strict=True)):
        size += len(key) + len(value)
        if size > size_max:
            return max(count, 1)
    return len(keys)


def _batch(keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [binary_array(keys), binary_array(values)], schema=ROWS_SCHEMA
    )
