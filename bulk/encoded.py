"""Rows of a table as rows of an import: keys and values, and the entries of every index.

Invariants
1. A row and its index entries have one due time.
2. The batches of one call have the same number of rows, in the same order: the rows come first, and
   then the entries of each index.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.arrow import rows_schema
from kvstore.errors import printable
from kvstore.tables import TableCodec


def stored_batches(
    codec: TableCodec, batch: pa.RecordBatch, dues: pa.Array | None = None
) -> Iterator[pa.RecordBatch]:
    """Keys and values of the rows of a batch, and of their entries in each index. With `dues` they
    have the times at which the rows expire, and each entry has the key of the row with which it
    expires."""
    keys, values = codec.encode(batch)
    none = pa.nulls(len(keys), pa.binary())
    yield _timed(keys, values, dues, none)
    rows = none if dues is None else pc.if_else(dues.is_valid(), keys, none)
    for index in codec.definition.indexes:
        entries = codec.entries(index, batch)
        empty = pa.repeat(pa.scalar(b"", pa.binary()), len(entries))
        yield _timed(entries, empty, dues, rows)


def _timed(
    keys: pa.Array, values: pa.Array, dues: pa.Array | None, rows: pa.Array
) -> pa.RecordBatch:
    if dues is None:
        return pa.RecordBatch.from_arrays([keys, values], schema=stored_schema(expires=False))
    return pa.RecordBatch.from_arrays([keys, values, dues, rows], schema=stored_schema())


def stored_schema(*, expires: bool = True) -> pa.Schema:
    """The columns of `stored_batches`, of rows that expire or of rows that stay."""
    more = [("expires", pa.int64()), ("expires_with", pa.binary())]
    return pa.schema([*rows_schema(), *more]) if expires else rows_schema()


def key_text(codec: TableCodec, key: bytes) -> str:
    """A key of a row as its columns, for errors."""
    if not key.startswith(codec.key.prefix):
        return printable(key)
    return f"{codec.key.named(key)} of {codec.definition.where}"
