"""Changes of rows: keys and values that are set, entries of indexes that are set and deleted.

An entry of an index is a hint, and the row decides (`finding.py`). So a write need not find every
older entry of a row: it deletes the entry of the row that it replaces, as far as it knows it, and
GC of tables deletes the others.

Invariants
1. A commit that sets a row sets its entries too, in every index of the newest definition.
2. An entry is deleted only by a commit that sets its row to other values, or deletes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kvstore.errors import NotUniqueError
from kvstore.limits import SCAN_CHUNK
from kvstore.span import Span
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Index
from kvstore.tables.sources import RowChange, RowReader


def put_row(codec: TableCodec, reader: RowReader, row: Mapping[str, Any]) -> RowChange:
    """Set one row."""
    key, value = codec.row(row)
    change = RowChange([key], [value])
    if codec.definition.indexes:
        whole = codec.to_dict(key, value)
        _replace(codec, reader, change, key, whole)
    return change


def delete_row(codec: TableCodec, reader: RowReader, key: bytes) -> RowChange:
    """Delete one row."""
    change = RowChange(gone=[key])
    if codec.definition.indexes and (old := reader.get(key)) is not None:
        row = codec.to_dict(key, old)
        change.gone += [codec.entry(index, row) for index in codec.definition.indexes]
    return change


def _replace(
    codec: TableCodec, reader: RowReader, change: RowChange, key: bytes, row: dict[str, Any]
) -> None:
    """Add the entries of a row that is set, and delete the entries of the row that it replaces."""
    old = reader.get(key)
    before = None if old is None else codec.to_dict(key, old)
    for index in codec.definition.indexes:
        entry = codec.entry(index, row)
        if index.is_unique:
            _require_unique(codec, reader, index, row, key)
        change.keys.append(entry)
        change.values.append(b"")
        if before is not None and (stale := codec.entry(index, before)) != entry:
            change.gone.append(stale)


def put_batches(
    codec: TableCodec,
    reader: RowReader,
    batches: Iterable[pa.RecordBatch],
    replaced: Container[bytes] = (),
) -> RowChange:
    """Set the rows of batches that have the columns of the table. The last row of a key wins. The
    same commit sets or deletes the rows of `replaced`: what they are now takes no value of a unique
    index."""
    change = RowChange()
    seen: dict[tuple[Any, ...], bytes] = {}
    indexes = codec.definition.indexes
    for batch in _pieces(batches):
        keys, values = (column.to_pylist() for column in codec.encode(batch))
        change.keys += keys
        change.values += values
        entries = [codec.entries(index, batch).to_pylist() for index in indexes]
        for index, found in zip(indexes, entries, strict=True):
            change.keys += found
            change.values += [b""] * len(found)
            if index.is_unique:
                _require_unique_batch(codec, reader, index, batch, keys, seen, replaced)
        if indexes:
            change.gone += _stale(codec, reader, keys, entries)
    return change


def put_rows(codec: TableCodec, reader: RowReader, rows: Iterable[Mapping[str, Any]]) -> RowChange:
    """Set rows. The last row of a key wins."""
    change = RowChange()
    seen: dict[tuple[Any, ...], bytes] = {}
    for row in rows:
        each = put_row(codec, reader, row)
        _require_distinct(codec, seen, each.keys[0], each.values[0])
        change.keys += each.keys
        change.values += each.values
        change.gone += each.gone
    return change


def _require_distinct(
    codec: TableCodec, seen: dict[tuple[Any, ...], bytes], key: bytes, value: bytes
) -> None:
    """Raise `NotUniqueError` if a row of `seen` has the values of this one in a unique index."""
    for index in codec.definition.indexes:
        if index.is_unique:
            row = codec.to_dict(key, value)
            values = [row[name] for name in codec.definition.parts_named(index.parts)]
            first = seen.setdefault((index.number, *values), key)
            if None not in values and first != key:
                raise not_unique(codec, index, values, _key_row(codec, first))


def _key_row(codec: TableCodec, key: bytes) -> dict[str, Any]:
    names = (column.name for column in codec.key.columns)
    return dict(zip(names, codec.key.values(key), strict=True))


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, batch.num_rows, SCAN_CHUNK):
            yield batch.slice(first, SCAN_CHUNK)


def _stale(
    codec: TableCodec, reader: RowReader, keys: list[bytes], entries: list[list[bytes]]
) -> list[bytes]:
    """The entries of the rows that are replaced."""
    pairs = [
        (key, value)
        for key, value in zip(keys, reader.get_many(keys), strict=True)
        if value is not None
    ]
    if not pairs:
        return []
    columns = [pa.array(list(column), pa.binary()) for column in zip(*pairs, strict=True)]
    batch = codec.decode(*columns)
    stale: list[bytes] = []
    for index in codec.definition.indexes:
        stale += codec.entries(index, batch).to_pylist()
    return stale


# -- unique indexes -----------------------------------------------------------------------------


def _require_unique(
    codec: TableCodec, reader: RowReader, index: Index, row: Mapping[str, Any], key: bytes
) -> None:
    """Raise `NotUniqueError` if another row has the values of `row` in a unique index. The reads
    count as reads of the transaction, so that two of them cannot both pass."""
    names = codec.definition.parts_named(index.parts)
    values = [row[name] for name in names]
    if None in values:
        return
    taken = other_row(codec, reader, index, values, key)
    if taken is not None:
        raise not_unique(codec, index, values, taken)


def other_row(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    values: Sequence[Any],
    key: bytes,
    replaced: Container[bytes] = (),
) -> dict[str, Any] | None:
    """A row with these values in an index, other than the rows of `key` and of `replaced`; None if
    there is none."""
    prefix = codec.index_codec(index).key(values)
    for batch in reader.batches(Span.of_prefix(prefix), None, reverse=False, limit=None):
        for entry in batch.column(0).to_pylist():
            found = codec.key.prefix + entry[len(prefix) :]
            if found == key or found in replaced:
                continue
            if (stored := reader.get(found)) is not None:
                row = codec.to_dict(found, stored)
                if codec.entry(index, row) == entry:
                    return row
    return None


def not_unique(
    codec: TableCodec, index: Index, values: Sequence[Any], taken: Mapping[str, Any]
) -> NotUniqueError:
    """The error of values that another row has."""
    definition = codec.definition
    named = zip(definition.parts_named(index.parts), values, strict=True)
    key = (f"{column.name}={taken[column.name]!r}" for column in definition.key_columns)
    return NotUniqueError(
        f"{definition.where}, index {index.name!r}",
        values=", ".join(f"{name}={value!r:.100}" for name, value in named),
        other=", ".join(key),
    )


def _require_unique_batch(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    batch: pa.RecordBatch,
    keys: list[bytes],
    seen: dict[tuple[Any, ...], bytes],
    replaced: Container[bytes],
) -> None:
    names = codec.definition.parts_named(index.parts)
    columns = [batch.column(name).to_pylist() for name in names]
    for key, *values in zip(keys, *columns, strict=True):
        if None in values:
            continue
        first = seen.setdefault((index.number, *values), key)
        taken = other_row(codec, reader, index, values, key, replaced)
        if first != key:
            raise not_unique(codec, index, values, _key_row(codec, first))
        if taken is not None:
            raise not_unique(codec, index, values, taken)
