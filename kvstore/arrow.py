"""Rows as Arrow record batches, built from whole buffers rather than row by row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import pyarrow as pa

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
    chunks: Iterable[tuple[pa.Array, list[bytes]]], batch_rows: int
) -> pa.RecordBatchReader:
    """Record batches of at most `batch_rows` rows and about `ARROW_BYTES_MAX` bytes.

    A chunk has at most `batch_rows` rows. One that is large enough becomes a batch as it is;
    small ones, as keys with many old versions leave them, are put together.
    """
    assert batch_rows > 0
    return pa.RecordBatchReader.from_batches(ROWS_SCHEMA, _batches(chunks, batch_rows))


def _batches(
    chunks: Iterable[tuple[pa.Array, list[bytes]]], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.Array] = []
    values: list[bytes] = []
    for chunk_keys, chunk_values in chunks:
        if values and len(values) + len(chunk_values) > batch_rows:
            yield from _cut(waiting, values)
            waiting, values = [], []
        waiting.append(chunk_keys)
        values += chunk_values
        if len(values) * 2 > batch_rows:
            yield from _cut(waiting, values)
            waiting, values = [], []
    if values:
        yield from _cut(waiting, values)


def _cut(waiting: list[pa.Array], values: list[bytes]) -> Iterator[pa.RecordBatch]:
    """One batch, or several where the values are too large for one."""
    keys = waiting[0] if len(waiting) == 1 else pa.concat_arrays(waiting)
    first = 0
    for last in _cuts(values):
        columns = [keys.slice(first, last - first), binary_array(values[first:last])]
        yield pa.RecordBatch.from_arrays(columns, schema=ROWS_SCHEMA)
        first = last


def _cuts(values: list[bytes]) -> Iterator[int]:
    """Where to cut so that no piece has more than `ARROW_BYTES_MAX` bytes, or has one row."""
    if sum(map(len, values)) <= ARROW_BYTES_MAX:
        yield len(values)
        return
    size = 0
    for row, value in enumerate(values):
        if size and size + len(value) > ARROW_BYTES_MAX:
            yield row
            size = 0
        size += len(value)
    yield len(values)
