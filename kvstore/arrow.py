"""Rows as Arrow record batches, and keys as numbers: whole buffers rather than row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Buffer

from kvstore.limits import ARROW_BYTES_MAX
from kvstore.loops import join

ROWS_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
)


def binary_array(items: Sequence[bytes]) -> pa.Array:
    """An Arrow binary array of `items`, which have less than 2 GiB together."""
    (array,) = binary_arrays(items)
    return array


def binary_arrays(items: Sequence[bytes]) -> list[pa.Array]:
    """As `binary_array`, in as many arrays as their bytes need."""
    if not isinstance(items, list):
        items = list(items)
    buffers = join(items)
    if buffers is None:
        middle = len(items) // 2
        return binary_arrays(items[:middle]) + binary_arrays(items[middle:])
    return [array_of(len(items), *buffers)]


def array_of(length: int, offsets: Buffer, joined: Buffer) -> pa.Array:
    """An Arrow binary array over these buffers, without a copy."""
    parts = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.binary(), length, parts, null_count=0)


_FIRST_BYTES: Final = np.array([(1 << 64) - (1 << 8 * (8 - n)) for n in range(9)], np.uint64)
"""Masks of the first n bytes of eight."""


def key_words(keys: pa.Array, *, skip: int) -> npt.NDArray[np.uint64]:
    """Eight bytes of each key after the first `skip` as an integer; short keys filled with zeros.

    Integers order as the keys do, except that different keys may give the same one. A gather.
    """
    if not len(keys):
        return np.empty(0, np.uint64)
    _, offsets, data = keys.buffers()
    places = np.frombuffer(offsets, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    first, last = int(places[0]), int(places[-1])
    lengths = places[1:] - places[:-1] - skip
    if lengths.min() >= 8:  # none needs filling: 0.04 ms for 10,000 keys against 0.07
        inside = np.ndarray((last - first - 7,), ">u8", data, offset=first, strides=(1,))
        whole: npt.NDArray[np.uint64] = inside[places[:-1] - (first - skip)].astype(np.uint64)
        return whole
    padded = np.zeros(last - first + skip + 8, np.uint8)
    if last > first:
        padded[: last - first] = np.frombuffer(data, np.uint8)[first:last]
    # A view that begins a word at every byte: one gather instead of a loop.
    every = np.ndarray((len(padded) - 7,), ">u8", padded.data, strides=(1,))
    words: npt.NDArray[np.uint64] = every[places[:-1] - first + skip].astype(np.uint64)
    words &= _FIRST_BYTES[np.clip(lengths, 0, 8)]
    return words


def row_batches(chunks: Iterable[tuple[pa.Array, pa.Array]]) -> pa.RecordBatchReader:
    """A record batch of each chunk, keys and values, or several of about `ARROW_BYTES_MAX` bytes
    of values."""
    return pa.RecordBatchReader.from_batches(ROWS_SCHEMA, _batches(chunks))


def _batches(chunks: Iterable[tuple[pa.Array, pa.Array]]) -> Iterator[pa.RecordBatch]:
    for columns in chunks:
        batch = pa.RecordBatch.from_arrays(list(columns), schema=ROWS_SCHEMA)
        if columns[1].nbytes <= ARROW_BYTES_MAX:
            yield batch
            continue
        first = size = 0
        for row, value in enumerate(columns[1]):
            length = len(value.as_buffer())
            if size and size + length > ARROW_BYTES_MAX:
                yield batch.slice(first, row - first)
                first, size = row, 0
            size += length
        yield batch.slice(first)
