"""Tables of a collection for readers that do not know this library: their rows, typed.

A snapshot of a chain has the stored rows of all tables, and the definitions that decode them.

Invariants
1. Rows are decoded by the table's definition at the time of the read.
2. The rows of a window are decided by the state at its end alone: a key that the window touched has
   its row then, or is gone. So a window that is read again gives the same rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backup.shard import OP_DELETE_RANGE, ShardSnapshot, Window
from bulk.tables.outside import outside_type, outside_values
from kvstore.errors import UsageError
from kvstore.joins.order import in_order
from kvstore.limits import SCAN_CHUNK
from kvstore.reserve import CATALOGUE
from kvstore.span import Span, merge_spans
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition
from kvstore.tables.exact import require_held
from kvstore.tables.space import definition_key, name_of
from kvstore.timestamp import TIMESTAMP_MAX

GONE: Final = "kvstore_gone"
"""The column of a window that tells whether a row is deleted."""


class TableRows:
    """The rows of one table in a snapshot."""

    def __init__(
        self,
        snapshot: ShardSnapshot,
        name: str,
        columns: Sequence[str] | None,
        before: TableRows | None = None,
    ) -> None:
        """`before` has the rows of an earlier snapshot, whose definition is taken if the table was
        not altered since: that costs a read of the window between. A search for the definition
        costs a look into each batch of the snapshot.

        Raises `UsageError` if the snapshot has no such table, or the table no such column.
        """
        self._snapshot = snapshot
        if before is None or _is_altered(snapshot, name, before._snapshot.as_of):
            self.codec = TableCodec(_definition(snapshot, name))
        else:
            self.codec = before.codec
        self.span = Span.of_prefix(self.codec.key.prefix)
        self._columns = None if columns is None else list(columns)
        self.typed = self.codec.schema_of(self._columns)
        """The chosen columns, in the types of the table."""

    @staticmethod
    def has(snapshot: ShardSnapshot, name: str) -> bool:
        """Whether the snapshot has a table of this name."""
        span = Span.of_key(definition_key(name))
        return any(batch.num_rows for batch in snapshot.read(span))

    def outside(self) -> pa.Schema:
        """The chosen columns in the types that other systems have (`bulk.tables.outside`).

        Raises `UsageError` for a column that has none, and where a column of the key is left out.
        """
        where = self.codec.definition.where
        for column in self.codec.key.columns:
            if column.name not in self.typed.names:
                raise UsageError(
                    f"{where}: columns without {column.name!r}, of its key", "add it to columns="
                )
        fields = []
        for field in self.typed:
            found = outside_type(field.type)
            if found is None or field.name == GONE:
                raise UsageError(
                    f"{where}, column {field.name!r}: no other system has a {field.type} like it",
                    "name the other columns: columns=",
                )
            if pa.types.is_duration(found):
                found = pa.int64()  # in the unit of the column
            fields.append(pa.field(field.name, found, field.nullable))
        return pa.schema(fields)

    def state(self) -> Iterator[pa.RecordBatch]:
        """All rows, in the types of the table, in key order."""
        for batch in self._snapshot.read(self.span):
            yield self.codec.decode(batch.column("key"), batch.column("value"), self._columns)

    def to_outside(self, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Rows in the types of `outside`."""
        columns = [
            outside_values(rows.column(field.name), field.type, self._named(field.name))
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def window(self, since: int, before: ShardSnapshot) -> Iterator[pa.RecordBatch]:
        """The rows that the window from `since` to the snapshot touched, each key once, in key
        order, with the column `GONE`. `before` is a snapshot at `since`.

        A deleted row has the columns of its key alone. Costs a pass over the window, a look-up for
        each key of it, and a pass over the rows of `before` that range deletes cover.
        """
        schema = self.outside()
        ranges = self._ranges(since)
        touched = self._points(since)
        covered = (
            key
            for span in ranges
            for batch in before.read(span)
            for key in batch.column("key").to_pylist()
        )
        keys = _once(heapq.merge(touched, covered) if ranges else touched)
        while piece := list(islice(keys, SCAN_CHUNK)):
            yield self._rows_of(pa.array(piece, pa.binary()), schema)

    def flagged(self, schema: pa.Schema) -> pa.Schema:
        """The schema of `window`, for the schema of `outside`: a deleted row has nulls."""
        fields = [field.with_nullable(True) for field in schema]
        return pa.schema([*fields, pa.field(GONE, pa.bool_())])

    # -- inside -----------------------------------------------------------------------------

    def _named(self, column: str) -> Callable[[int], str]:
        return lambda row: f"{self.codec.definition.where}, column {column!r}, row {row} of a batch"

    def _changes(self, since: int) -> Iterator[pa.RecordBatch]:
        return self._snapshot.view(Window(since, self._snapshot.as_of), self.span)

    def _points(self, since: int) -> Iterator[bytes]:
        """The keys of puts and deletes of the window, ascending."""
        for batch in self._changes(since):
            is_point = np.asarray(batch.column("op")) != OP_DELETE_RANGE
            yield from batch.column("key").filter(pa.array(is_point)).to_pylist()

    def _ranges(self, since: int) -> list[Span]:
        """The spans of the rows that range deletes of the window cover."""
        found = []
        for batch in self._changes(since):
            is_range = np.asarray(batch.column("op")) == OP_DELETE_RANGE
            if is_range.any():
                rows = batch.filter(pa.array(is_range))
                bounds = (rows.column(name).to_pylist() for name in ("key", "end_key"))
                for key, end in zip(*bounds, strict=True):
                    inside = self.span.intersect(key, end)
                    found += [] if inside is None else [inside]
        return merge_spans(found)

    def _rows_of(self, keys: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
        """The rows of keys at the end of the window, the gone ones behind the others."""
        times = np.full(len(keys), self._snapshot.as_of, np.int64)
        found = self._snapshot.find(
            in_order(keys, times), age_max=TIMESTAMP_MAX, bytes_max=TIMESTAMP_MAX
        )
        assert found is not None, "no bound was given"
        alive = found.values.is_valid()
        rows = self.codec.decode(keys.filter(alive), found.values.drop_null(), self._columns)
        here = self.to_outside(rows, schema)
        dead = keys.filter(pc.invert(alive))
        names = [column.name for column in self.codec.key.columns]
        parts = dict(zip(names, self.codec.key.arrays(dead), strict=True))
        for name, array in parts.items():
            require_held(array, array.type, f"{self.codec.definition.where}, column {name!r}", 0)
        gone = [
            outside_values(parts[field.name], field.type, self._named(field.name))
            if field.name in parts
            else pa.nulls(len(dead), field.type)
            for field in schema
        ]
        columns = [pa.concat_arrays(pair) for pair in zip(here.columns, gone, strict=True)]
        flags = pa.array(np.arange(len(keys)) >= rows.num_rows)
        return pa.RecordBatch.from_arrays([*columns, flags], schema=self.flagged(schema))


def _is_altered(snapshot: ShardSnapshot, name: str, since: int) -> bool:
    """Whether the definition of a table was written after `since`."""
    window = Window(since, snapshot.as_of)
    found = snapshot.view(window, Span.of_key(definition_key(name)))
    return any(batch.num_rows for batch in found)


def _definition(snapshot: ShardSnapshot, name: str) -> Definition:
    for batch in snapshot.read(Span.of_key(definition_key(name))):
        if batch.num_rows:
            return Definition.from_bytes(name, batch.column("value")[0].as_py())
    names = [
        name_of(key)
        for batch in snapshot.read(Span.of_prefix(CATALOGUE))
        for key in batch.column("key").to_pylist()
    ]
    hint = f"there are {', '.join(names[:20])}" if names else "it has no table at that time"
    raise UsageError(f"there is no table {name!r} in the collection", hint)


def _once(keys: Iterable[bytes]) -> Iterator[bytes]:
    """The distinct keys of ascending ones."""
    last = None
    for key in keys:
        if key != last:
            yield key
            last = key
