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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from kvstore.arrow import binary_array
from kvstore.errors import CorruptionError, FormatVersionError, UsageError
from kvstore.loops import contract
from kvstore.loops.single import RowDicts
from kvstore.tables.definition import Column, Definition, Index
from kvstore.tables.exact import is_held, require_held, shown, unheld
from kvstore.tables.keys import KeyCodec
from kvstore.tables.kinds import kind_of
from kvstore.tables.rows import RowCodec, bytes_cell, schema_number, schema_numbers
from kvstore.tables.space import index_prefix, rows_prefix


class UnknownLayoutError(CorruptionError):
    """A row names a layout that the definition does not have: the definition is older."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(f"a row of {where}", f"its table has no layout {number}")


class UnreadableRowError(CorruptionError):
    """A row holds a value that its column does not hold: an older release took it, or its bytes
    are damaged. `row` is its place among the rows that were decoded."""

    def __init__(self, where: str, problem: str, row: int) -> None:
        remedy = "delete the row or put it anew: `kvstore verify` lists all such rows"
        super().__init__(where, problem, remedy)
        self.row = row


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
        `conform`). Raises `UsageError` for a value that its column does not hold. Costs 30 to 100
        ns a row."""
        by_id = self.definition.by_id
        for column in self.definition.columns:
            where = f"{self.definition.where}, column {column.name!r}"
            require_held(batch.column(column.name), column.type, where, 0)
        columns = [batch.column(by_id[id_].name) for id_, _ in self._writer.layout]
        return self.key.keys(batch), self._writer.values(columns, batch.num_rows)

    def entries(self, index: Index, batch: pa.RecordBatch) -> pa.Array:
        """The keys of the entries that the rows of a batch have in an index."""
        return self.index_codec(index).keys(batch)

    def decode(
        self,
        keys: pa.Array,
        values: pa.Array,
        columns: Sequence[str] | None = None,
        *,
        is_checked: bool = True,
    ) -> pa.RecordBatch:
        """The rows of keys and values. `columns` chooses some of the columns, and their order.

        Raises `CorruptionError` for bytes that are no row, `UnreadableRowError` for a text that is
        no UTF-8 unless `is_checked` is false, `UnknownLayoutError` for a newer layout. A time that
        Python does not have is given as Arrow has it.
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
        batch = pa.RecordBatch.from_arrays([found[column.id] for column in wanted], schema=schema)
        fault = self._first_no_text(batch) if is_checked else None
        if fault is not None:
            raise self._unreadable(keys[fault[0]].as_py(), fault[1], fault[0])
        return batch

    def decoded(
        self, batches: Iterable[pa.RecordBatch], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of batches of keys and values. Raises as `decode`, behind the rows that come
        before the one that cannot be read."""
        for batch in batches:
            keys, values = batch.column(0), batch.column(1)
            try:
                yield self.decode(keys, values, columns)
            except UnknownLayoutError:
                raise
            except CorruptionError as error:
                row = next((row for row, _ in self.faults(keys, values)), 0)
                if row:
                    yield self.decode(keys.slice(0, row), values.slice(0, row), columns)
                if isinstance(error, UnreadableRowError):
                    raise
                raise self._unreadable(keys[row].as_py(), error.problem, row) from error

    def require_texts(self, batch: pa.RecordBatch) -> None:
        """Raise `UnreadableRowError` for a text that is no UTF-8 in rows that were decoded without
        a check."""
        fault = self._first_no_text(batch)
        if fault is not None:
            row, problem = fault
            told = (f"{name}={shown(batch.column(name), row)}" for name in batch.schema.names[:3])
            where = f"{self.definition.where}, the row with {', '.join(told)}"
            raise UnreadableRowError(where, problem, row)

    def faults(self, keys: pa.Array, values: pa.Array) -> Iterator[tuple[int, str]]:
        """The rows that cannot be read as their columns say, by place, each with the reason.
        Costs what decoding costs, and a search by halves for each such row."""
        try:
            batch = self.decode(keys, values, is_checked=False)
        except (CorruptionError, FormatVersionError) as error:
            if len(keys) == 1:
                if isinstance(error, CorruptionError):  # a newer release reads its own format
                    yield 0, error.problem
                return
            middle = len(keys) // 2
            yield from self.faults(keys.slice(0, middle), values.slice(0, middle))
            for row, why in self.faults(keys.slice(middle), values.slice(middle)):
                yield middle + row, why
            return
        found: dict[int, str] = {}
        for column in self.definition.columns:
            array = batch.column(column.name)
            for row in unheld(array):
                found.setdefault(row, _unheld(column, array, row))
        yield from sorted(found.items())

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

    def entries_of(self, key: bytes, value: bytes) -> list[bytes]:
        """The entries of a stored row, in the order of the indexes: also of a row that holds what
        its columns do not. None of them for bytes that are no row: what they led to is unknown, and
        entries that no row fits find nothing."""
        indexes = self.definition.indexes
        try:
            row = self.to_dict(key, value)
            return [self.entry(index, row) for index in indexes]
        except (UnknownLayoutError, FormatVersionError):
            raise
        except (CorruptionError, UsageError):
            pass
        try:
            batch = self.decode(binary_array([key]), binary_array([value]), is_checked=False)
        except CorruptionError:
            return []
        return [self.entries(index, batch)[0].as_py() for index in indexes]

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
        """The row of a key and a value, by column. Raises as `decode`, and `UnreadableRowError` for
        a time that Python does not have. Costs 0.4 us for eight columns."""
        try:
            row = self._newest.read(key, value) if columns is None else None
            return self._older(key, value, columns) if row is None else row
        except UnknownLayoutError:
            raise
        except (CorruptionError, OverflowError) as error:
            problem = error.problem if isinstance(error, CorruptionError) else str(error)
            raise self._unreadable(key, self._fault(key, value) or problem) from error

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
        except UnknownLayoutError:
            raise
        except (CorruptionError, OverflowError):  # one by one, so that the error names the row
            return [
                None if value is None else self.to_dict(key, value, columns)
                for key, value in zip(keys, values, strict=True)
            ]

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
            column.id: _widened(array, column) for column, array in zip(there, arrays, strict=True)
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

    def _first_no_text(self, batch: pa.RecordBatch) -> tuple[int, str] | None:
        """The first row of a batch with a text that is no UTF-8, and the reason."""
        faults = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            column = self.definition.by_name[name]
            if column.kind.way == contract.TEXT and not is_held(array, column.kind):
                row = next(unheld(array))
                faults.append((row, _unheld(column, array, row)))
        return min(faults, default=None)

    def _fault(self, key: bytes, value: bytes) -> str | None:
        found = self.faults(binary_array([key]), binary_array([value]))
        return next((problem for _, problem in found), None)

    def _unreadable(self, key: bytes, problem: str, row: int = 0) -> UnreadableRowError:
        where = f"{self.definition.where}, row {self.key.named(key)}"
        return UnreadableRowError(where, problem, row)


def _unheld(column: Column, array: pa.Array, row: int) -> str:
    return f"column {column.name!r} is {column.type}, which does not hold {shown(array, row)}"


def dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as `to_dict` gives them: nanoseconds are integers. Raises
    `CorruptionError` for a time that Python does not have."""
    return list(each_dict(batch))


def each_dict(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of `dicts`, one by one: an error comes behind the rows before it."""
    if not batch.num_columns:
        yield from ({} for _ in range(batch.num_rows))
        return
    columns, rows = [], batch.num_rows
    problem = ""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        row = next(unheld(column), rows) if pa.types.is_temporal(column.type) else rows
        if row < rows:
            rows, problem = row, f"column {name!r} has {shown(column, row)}"
        columns.append(_values(column))
    whole = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).slice(0, rows)
    yield from whole.to_pylist()
    if problem:
        told = (f"{name}={shown(batch.column(name), rows)}" for name in batch.schema.names[:3])
        raise CorruptionError(
            f"the row with {', '.join(told)}",
            f"{problem}, and Python has no such value",
            "read the rows as Arrow, with scan; delete the row, or put it anew",
        )


def _values(column: pa.Array) -> pa.Array:
    """A column in a type that Arrow turns into values of Python, wherever the zone lies: its local
    time may lie behind the year 9999, and its name may be unknown here."""
    kind = column.type
    if getattr(kind, "unit", "") == "ns":
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind) and kind.tz not in (None, "UTC") and not _has_local(column):
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    return column


def _has_local(column: pa.Array) -> bool:
    """Whether the least and the greatest instant have a local time in the zone of the column."""
    import pyarrow.compute as pc

    try:
        pc.min_max(column).as_py()
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        return False
    return True


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


def _widened(array: pa.Array, column: Column) -> pa.Array:
    if array.type == column.type:
        return array
    try:
        return array.cast(column.type)
    except pa.ArrowInvalid as error:  # only a value that its own column did not hold
        raise CorruptionError(f"column {column.name!r}", str(error)) from error
