"""Rows of a table as keys and values of the store, and back. Needs a definition and no store.

    codec = TableCodec(definition)
    keys, values = codec.encode(batch)                  # Arrow in, Arrow out
    for index in definition.indexes:
        entries = codec.entries(index, batch)           # keys of the index; their values are empty

Spark's tasks and imports build rows with it.

Invariants
1. `decode` returns the values that `encode` was given, in the types of the definition, even from
   rows of an older layout. A column that such a row lacks has its default.
2. A column that is not asked for is not decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from kvstore.errors import CorruptionError, UsageError
from kvstore.loops.single import RowDicts
from kvstore.tables.definition import Column, Definition, Index
from kvstore.tables.keys import KeyCodec
from kvstore.tables.kinds import kind_of
from kvstore.tables.rows import RowCodec, bytes_cell, schema_number, schema_numbers
from kvstore.tables.space import index_prefix, rows_prefix


class UnknownLayoutError(CorruptionError):
    """A row names a layout that the definition does not have: the definition is older."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(f"a row of {where}", f"its table has no layout {number}")


class TableCodec:
    """Encodes and decodes the rows of one definition. Keep one: making it takes 100 us."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.stored = definition.to_bytes()
        self.key = KeyCodec(definition, rows_prefix(definition.number), definition.key)
        self._rows: dict[int, RowCodec] = {}
        self._readers: dict[tuple[int, tuple[str, ...] | None], RowDicts] = {}
        self._writer = self._row_codec(definition.layout)
        self._newest = self._reader(definition.layout, None)
        self._indexes: dict[int, KeyCodec] = {}

    # -- whole batches ----------------------------------------------------------------------

    def encode(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Keys and values of the rows of a batch. The batch has the schema of the definition (see
        `conform`). Costs 30 to 100 ns a row."""
        by_id = self.definition.by_id
        columns = [batch.column(by_id[id_].name) for id_, _ in self._writer.layout]
        return self.key.keys(batch), self._writer.values(columns, batch.num_rows)

    def entries(self, index: Index, batch: pa.RecordBatch) -> pa.Array:
        """The keys of the entries that the rows of a batch have in an index."""
        return self.index_codec(index).keys(batch)

    def decode(
        self, keys: pa.Array, values: pa.Array, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """The rows of keys and values. `columns` chooses some of the columns, and their order.

        Raises `CorruptionError` for bytes that are no row, `UnknownLayoutError` for a newer layout.
        """
        wanted = self._columns(columns)
        found: dict[int, pa.Array] = {}
        key_ids = self.definition.key_ids
        if any(column.id in key_ids for column in wanted):
            for part, array in zip(self.definition.key, self.key.arrays(keys), strict=True):
                found[part.id] = array
        rest = [column for column in wanted if column.id not in key_ids]
        for column, array in zip(rest, self._decoded(values, rest), strict=True):
            found[column.id] = array
        schema = pa.schema([column.field for column in wanted])
        if not wanted:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(keys), pa.struct([])))
        return pa.RecordBatch.from_arrays([found[column.id] for column in wanted], schema=schema)

    def schema_of(self, columns: Sequence[str] | None) -> pa.Schema:
        """The schema of `decode`."""
        if columns is None:
            return self.definition.schema
        return pa.schema([column.field for column in self._columns(columns)])

    # -- single rows ------------------------------------------------------------------------

    def row(self, values: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """Key and value of a row. Raises `UsageError` that names the column."""
        definition = self.definition
        if not values.keys() <= definition.by_name.keys():
            for name in values:
                definition.column(name)
        key = self.key.whole_key([values.get(column.name) for column in self.key.columns])
        return key, self._writer.value([self.cell(column, values) for column in self._written])

    def entry(self, index: Index, row: Mapping[str, Any]) -> bytes:
        """The key of the entry that a row, with all columns, has in an index."""
        codec = self.index_codec(index)
        return codec.key([row[column.name] for column in codec.columns])

    def cell(self, column: Column, values: Mapping[str, Any]) -> Any:
        """The stored cell of a column in a row; its default where the row lacks it."""
        value = values.get(column.name)
        if value is None:
            if column.default is not None and column.name not in values:
                return bytes_cell(column.kind, column.default)
            if not column.is_nullable:
                what = "is null" if column.name in values else "is missing"
                raise UsageError(
                    f"{self.definition.where}, column {column.name!r} {what}",
                    "it takes no null: give it a value",
                )
            return None
        try:
            return column.kind.stored(value)
        except ValueError as error:
            raise UsageError(
                f"{self.definition.where}, column {column.name!r}: {error}", "correct the value"
            ) from None

    def to_dict(
        self, key: bytes, value: bytes, columns: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        """The row of a key and a value, by column. Raises as `decode`, and `UsageError` for a time
        that Python has no datetime for. Costs 0.4 us for eight columns."""
        try:
            row = self._newest.read(key, value) if columns is None else None
            return self._older(key, value, columns) if row is None else row
        except OverflowError as error:
            raise self._beyond(error) from None

    def to_dicts(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        columns: tuple[str, ...] | None = None,
    ) -> list[Any]:
        """The rows of keys and values as `to_dict` has them; None for a value that is None."""
        reader = self._newest
        if columns is not None:
            reader = self._reader(self.definition.layout, columns)

        def otherwise(key: bytes, value: bytes) -> dict[str, Any]:
            return self._older(key, value, columns)

        try:
            return reader.read_all(keys, values, otherwise)
        except OverflowError as error:
            raise self._beyond(error) from None

    # -- inside -----------------------------------------------------------------------------

    def index_codec(self, index: Index) -> KeyCodec:
        """The keys of an index: its columns, and the columns of the key."""
        codec = self._indexes.get(index.number)
        if codec is None:
            prefix = index_prefix(self.definition.number, index.number)
            parts = (*index.parts, *self.definition.key)
            codec = self._indexes[index.number] = KeyCodec(self.definition, prefix, parts)
        return codec

    def row_keys(self, index: Index, entries: Sequence[bytes]) -> list[bytes]:
        """The keys of the rows that entries of an index lead to. Raises `CorruptionError` for
        bytes that are no entry."""
        return self.index_codec(index).row_keys(entries, len(index.parts), self.key.prefix)

    def fits(
        self, index: Index, entries: Sequence[bytes], rows: Sequence[dict[str, Any] | None]
    ) -> list[bool]:
        """Whether each entry of an index has the values of its row. A row has the columns of the
        index."""
        names = self.definition.parts_named(index.parts)
        return self.index_codec(index).fits(entries, rows, names)

    @cached_property
    def _written(self) -> list[Column]:
        return [self.definition.by_id[id_] for id_, _ in self._writer.layout]

    def _columns(self, names: Sequence[str] | None) -> list[Column]:
        if names is None:
            return list(self.definition.columns)
        if isinstance(names, str | bytes) or not isinstance(names, Sequence):
            raise UsageError(f"columns={names!r}", "pass a list of names")
        found = [self.definition.column(name) for name in names]
        if len(set(names)) < len(found):
            raise UsageError(f"columns={names!r} names one twice", "name each column once")
        return found

    def _row_codec(self, number: int) -> RowCodec:
        codec = self._rows.get(number)
        if codec is None:
            if not 0 <= number < len(self.definition.layouts):
                raise UnknownLayoutError(self.definition.where, number)
            layout = self.definition.layouts[number]
            codec = self._rows[number] = RowCodec(number, layout, self.definition.where)
        return codec

    def _decoded(self, values: pa.Array, columns: Sequence[Column]) -> list[pa.Array]:
        """Columns beside the key of the rows of `values`, which may have several layouts."""
        if not columns:
            return []
        numbers = schema_numbers(values, self.definition.where)
        if not len(numbers):
            return [pa.array([], column.type) for column in columns]
        first = int(numbers[0])
        if (numbers == first).all():
            return self._of_layout(values, first, columns)
        parts, places = [], []
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            parts.append(self._of_layout(values.take(pa.array(at)), number, columns))
            places.append(at)
        order = pa.array(np.argsort(np.concatenate(places), kind="stable"))
        return [pa.concat_arrays(column).take(order) for column in zip(*parts, strict=True)]

    def _of_layout(
        self, values: pa.Array, number: int, columns: Sequence[Column]
    ) -> list[pa.Array]:
        codec = self._row_codec(number)
        there = [column for column in columns if column.id in codec.place]
        arrays = codec.arrays(values, [codec.place[column.id] for column in there])
        found = {
            column.id: _widened(array, column.type)
            for column, array in zip(there, arrays, strict=True)
        }
        return [
            found[column.id] if column.id in found else default_array(column, len(values))
            for column in columns
        ]

    def _older(self, key: bytes, value: bytes, columns: tuple[str, ...] | None) -> dict[str, Any]:
        """A row of any layout as a dict."""
        number = schema_number(value, self.definition.where)
        row = self._reader(number, columns).read(key, value)
        assert row is not None, "its number was read"
        return row

    def _reader(self, number: int, names: tuple[str, ...] | None) -> RowDicts:
        """The loop that makes dicts of the rows of one layout."""
        reader = self._readers.get((number, names))
        if reader is None:
            codec = self._row_codec(number)
            wanted = self._columns(names)
            row: dict[str, Any] = {}
            cells: list[tuple[str, int, Callable[[Any], Any] | None]] = []
            for column in wanted:
                row[column.name] = None
                if column.id in codec.place:
                    place = codec.place[column.id]
                    cells.append((column.name, place, _widening(codec.layout[place][1], column)))
                elif column.default is not None:
                    row[column.name] = default_value(column)
            keys = self.key.reads(row.keys())
            where = self.definition.where
            reader = self._readers[number, names] = RowDicts(
                where, row, self.key.prefix, keys, number, codec.widths, codec.reads(cells)
            )
        return reader

    def _beyond(self, error: OverflowError) -> UsageError:
        return UsageError(
            f"{self.definition.where}: a row has a value that Python cannot hold: {error}",
            "read the rows as Arrow, with scan",
        )


def dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as `to_dict` gives them: nanoseconds are integers."""
    columns = [
        column.cast(pa.int64()) if getattr(column.type, "unit", "") == "ns" else column
        for column in batch.columns
    ]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(
        columns, names=batch.schema.names
    ).to_pylist()
    return rows if columns else [{} for _ in range(batch.num_rows)]


def default_value(column: Column) -> Any:
    """The value that rows of older layouts have in a column."""
    if column.default is None:
        return None
    kind = column.kind
    cell = bytes_cell(kind, column.default)
    return cell if kind.value is None else kind.value(cell)


def default_array(column: Column, count: int) -> pa.Array:
    """`count` of the values that rows of older layouts have in a column."""
    if column.default is None:
        return pa.nulls(count, column.type)
    value = default_value(column)
    return pa.repeat(pa.array([value], column.type)[0], count)


def _widening(stored: pa.DataType, column: Column) -> Callable[[Any], Any] | None:
    """The function that turns a cell of the older type `stored` into a value of a column."""
    if stored == column.type:
        return None
    old, new = kind_of(stored), column.kind

    def widened(cell: Any) -> Any:
        cell = new.stored(cell if old.value is None else old.value(cell))
        return cell if new.value is None else new.value(cell)

    return widened


def _widened(array: pa.Array, type_: pa.DataType) -> pa.Array:
    return array if array.type == type_ else array.cast(type_)
