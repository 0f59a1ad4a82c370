"""Changes of rows: keys and values that are set, entries of indexes that are set and deleted.

An entry of an index is a hint, and the row decides (`finding.py`). So a write need not find every
older entry of a row: it deletes the entry of the row that it replaces, as far as it knows it, and
GC of tables deletes the others.

Invariants
1. A commit that sets a row sets its entries too, in every index of the newest definition.
2. An entry is deleted only by a commit that sets its row to other values, or deletes it.
3. A row is deleted and replaced whatever it holds: the old row is read as its bytes, because an
   older release may have stored what no column holds.
4. Values of a unique index are compared as the bytes of its entries: all NaN are one value, and so
   are 0.0 and -0.0.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kvstore.errors import CorruptionError, NotUniqueError, UsageError
from kvstore.limits import SCAN_CHUNK
from kvstore.span import Span
from kvstore.tables.codec import TableCodec, UnknownLayoutError
from kvstore.tables.definition import Index
from kvstore.tables.exact import as_python
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
        change.gone += codec.entries_of(key, old)
    return change


def _replace(
    codec: TableCodec, reader: RowReader, change: RowChange, key: bytes, row: dict[str, Any]
) -> None:
    """Add the entries of a row that is set, and delete the entries of the row that it replaces."""
    old = reader.get(key)
    before = [] if old is None else codec.entries_of(key, old)
    entries = [codec.entry(index, row) for index in codec.definition.indexes]
    for index, entry in zip(codec.definition.indexes, entries, strict=True):
        if index.is_unique:
            _require_unique(codec, reader, index, row, key, entry)
        change.keys.append(entry)
        change.values.append(b"")
    change.gone += [stale for stale in before if stale not in entries]


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
    seen: dict[bytes, bytes] = {}
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
                _require_unique_batch(codec, reader, index, batch, keys, found, seen, replaced)
        if indexes:
            change.gone += _stale(codec, reader, keys, entries)
    return change


def put_rows(codec: TableCodec, reader: RowReader, rows: Iterable[Mapping[str, Any]]) -> RowChange:
    """Set rows. The last row of a key wins. An error names a row by its place, from 0 on."""
    change = RowChange()
    seen: dict[bytes, bytes] = {}
    for at, row in enumerate(rows):
        try:
            each = put_row(codec, reader, row)
        except NotUniqueError:
            raise
        except UsageError as error:
            raise UsageError(f"{error.what}, in row {at}", error.remedy) from error
        _require_distinct(codec, seen, each)
        change.keys += each.keys
        change.values += each.values
        change.gone += each.gone
    return change


def _require_distinct(codec: TableCodec, seen: dict[bytes, bytes], change: RowChange) -> None:
    """Raise `NotUniqueError` if a row of `seen` has the values of this one in a unique index."""
    key, *entries = change.keys
    for index, entry in zip(codec.definition.indexes, entries, strict=True):
        if index.is_unique:
            first = seen.setdefault(value_part(codec, key, entry), key)
            if first != key:
                row = codec.to_dict(key, change.values[0])
                values = [row[name] for name in codec.definition.parts_named(index.parts)]
                if None not in values:
                    raise not_unique(codec, index, values, first)


def value_part(codec: TableCodec, key: bytes, entry: bytes) -> bytes:
    """The beginning of the entry of a row: the prefix of the index, and the values of its
    columns."""
    return entry[: len(entry) - (len(key) - len(codec.key.prefix))]


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
    try:
        batch = codec.decode(*columns, is_checked=False)
    except UnknownLayoutError:
        raise
    except CorruptionError:
        return [entry for pair in pairs for entry in codec.entries_of(*pair)]
    stale: list[bytes] = []
    for index in codec.definition.indexes:
        stale += codec.entries(index, batch).to_pylist()
    return stale


# -- unique indexes -----------------------------------------------------------------------------


def _require_unique(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    row: Mapping[str, Any],
    key: bytes,
    entry: bytes,
) -> None:
    """Raise `NotUniqueError` if another row has the values of `row` in a unique index. The reads
    count as reads of the transaction, so that two of them cannot both pass."""
    values = [row[name] for name in codec.definition.parts_named(index.parts)]
    if None in values:
        return
    taken = other_row(codec, reader, index, value_part(codec, key, entry), key)
    if taken is not None:
        raise not_unique(codec, index, values, taken)


def other_row(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    values: bytes,
    key: bytes,
    replaced: Container[bytes] = (),
) -> bytes | None:
    """The key of a row whose entry in an index begins with `values`, other than the rows of `key`
    and of `replaced`; None if there is none."""
    at = codec.definition.indexes.index(index)
    for batch in reader.batches(Span.of_prefix(values), None, reverse=False, limit=None):
        for entry in batch.column(0).to_pylist():
            found: bytes = codec.key.prefix + entry[len(values) :]
            if found == key or found in replaced:
                continue
            stored = reader.get(found)
            if stored is not None and codec.entries_of(found, stored)[at : at + 1] == [entry]:
                return found
    return None


def not_unique(
    codec: TableCodec, index: Index, values: Sequence[Any], taken: bytes
) -> NotUniqueError:
    """The error of values that another row has, whose key is `taken`."""
    definition = codec.definition
    named = zip(definition.parts_named(index.parts), values, strict=True)
    return NotUniqueError(
        f"{definition.where}, index {index.name!r}",
        values=", ".join(f"{name}={value!r:.100}" for name, value in named),
        other=codec.key.named(taken),
    )


def _require_unique_batch(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    batch: pa.RecordBatch,
    keys: list[bytes],
    entries: list[bytes],
    seen: dict[bytes, bytes],
    replaced: Container[bytes],
) -> None:
    columns = [batch.column(name) for name in codec.definition.parts_named(index.parts)]
    for row, (key, entry) in enumerate(zip(keys, entries, strict=True)):
        if any(column.null_count and not column[row].is_valid for column in columns):
            continue
        values = value_part(codec, key, entry)
        first = seen.setdefault(values, key)
        taken = first
        if first == key:
            other = other_row(codec, reader, index, values, key, replaced)
            if other is None:
                continue
            taken = other
        raise not_unique(codec, index, [as_python(column, row) for column in columns], taken)
