"""Rows of a table as Spark has them: the columns of a typed read, and batches of these columns.

    state     the columns of the table
    changes   the columns of the table, and behind them _change_type, _commit_version and
              _commit_timestamp, as `Table.changes` names them

    durations     interval day to second, unless they have nanoseconds
    other types   as `bulk.tables.outside` has them

Invariants
1. No value is changed: Spark's timestamps have microseconds, so nanoseconds come as integers. A
   column that Spark has no type for is refused by name, unless the read leaves it out.
2. Rows are decoded by the definition that the table has at the end of the read, which every task
   gets with its partition. It lists the layouts of all older rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import (
    DataType,
    DayTimeIntervalType,
    StructField,
    StructType,
)

from bulk.encoded import key_text
from bulk.tables.outside import is_binary, outside_type, outside_values
from kvstore.errors import UsageError
from kvstore.reserve import CATALOGUE
from kvstore.span import Span
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition
from kvstore.tables.space import definition_key, name_of
from spark_connector.origins.origin import Origin
from spark_connector.reading.schema import CHANGES, arrow_schema, column_of_change

CHANGE_FIELDS: Final = [
    StructField(name, CHANGES[name].dataType, nullable=False)
    for name in ("_change_type", "_commit_version", "_commit_timestamp")
]
_CHANGE_NAMES: Final = frozenset(field.name for field in CHANGE_FIELDS)


def spark_type(kind: pa.DataType) -> DataType | None:
    """The type of Spark for a column of a table. None if Spark has none."""
    if pa.types.is_duration(kind) and kind.unit != "ns":
        return DayTimeIntervalType()
    found = outside_type(kind)
    return None if found is None else from_arrow_type(found, prefer_timestamp_ntz=True)


@dataclass(frozen=True)
class TypedRows:
    """A table as the tasks of a read need it: its name and its stored definition."""

    name: str
    stored: bytes

    def __reduce__(self) -> tuple[type[TypedRows], tuple[str, bytes]]:
        return TypedRows, (self.name, self.stored)  # without the codec

    @cached_property
    def codec(self) -> TableCodec:
        """The definition's codec, made once in each process."""
        return TableCodec(Definition.from_bytes(self.name, self.stored))

    @property
    def where(self) -> str:
        """The table in the words of an error."""
        return self.codec.definition.where

    def offered(self, *, changes: bool, columns: Sequence[str] | None) -> StructType:
        """The schema of a read without a schema from the user.

        Raises `UsageError` for a column that the table lacks, and for one that Spark has no type
        for.
        """
        added = CHANGE_FIELDS if changes else []
        named = {field.name: field for field in added}
        definition = self.codec.definition
        names = [*definition.by_name, *named] if columns is None else columns
        ours = [name for name in named if name in definition.by_name]
        if columns is None and ours:
            raise UsageError(
                f"{self.where} has a column {ours[0]!r}, and so have its changes",
                "name the other columns by the option columns",
            )
        if len(set(names)) != len(names):
            raise UsageError(f"columns={','.join(names)}", "name each column once")
        fields = []
        for name in names:
            if name in named:
                fields.append(named[name])
                continue
            column = definition.column(name)
            found = spark_type(column.type)
            if found is None:
                raise UsageError(
                    f"{self.where}, column {name!r}: Spark has no type for {column.type}",
                    "name the other columns by the option columns",
                )
            fields.append(StructField(name, found, column.is_nullable))
        return StructType(fields)

    def require_known(self, asked: pa.Schema, *, changes: bool) -> None:
        """Raise `UsageError` if the table lacks a column of the asked schema, or has it in another
        type, as after an alteration."""
        offered = arrow_schema(self.offered(changes=changes, columns=asked.names))
        for wanted, found in zip(asked, offered, strict=True):
            if wanted.type != found.type and not _same_but_for_width(wanted.type, found.type):
                raise UsageError(
                    f"{self.where}, column {found.name!r} is {found.type}, not {wanted.type}",
                    "leave the schema out, or begin the stream anew after an alteration",
                )

    def stored_columns(self, names: Sequence[str], *, changes: bool) -> list[str]:
        """The stored columns that the asked columns are made of. The columns of the key need no
        value."""
        definition = self.codec.definition
        keys = {column.name for column in definition.key_columns}
        of_rows = [name for name in names if not changes or name not in _CHANGE_NAMES]
        return ["key"] if keys.issuperset(of_rows) else ["key", "value"]

    def shaped(
        self, batch: pa.RecordBatch, schema: pa.Schema, *, changes: bool = False
    ) -> pa.RecordBatch:
        """A batch of stored columns, turned into the asked columns. A table may have columns that
        are called as those of `changes`."""
        ours = _CHANGE_NAMES if changes else frozenset[str]()
        names = [name for name in schema.names if name not in ours]
        keys = batch.column("key")
        has_values = "value" in batch.schema.names
        values = batch.column("value") if has_values else pa.nulls(len(keys), pa.binary())
        rows = self.codec.decode(keys, values, names)
        columns = [
            column_of_change(batch, field.name)
            if field.name in ours
            else self._cast(rows.column(field.name), field, keys)
            for field in schema
        ]
        if not columns:  # for a count of rows Spark asks for no column
            return rows
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _cast(self, array: pa.Array, field: pa.Field, keys: pa.Array) -> pa.Array:
        def named(row: int) -> str:
            return f"{key_text(self.codec, keys[row].as_py())}, column {field.name!r}"

        return outside_values(array, field.type, named)


def _same_but_for_width(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types differ in the width of Arrow's offsets alone, which a session chooses."""
    return all(map(is_binary, (one, other))) or all(
        kind in (pa.string(), pa.large_string()) for kind in (one, other)
    )


# -- in an origin ---------------------------------------------------------------------------


def table_at(origin: Origin, name: str, at: int) -> TypedRows:
    """The table `name` as it is at a time. Raises `UsageError` if the origin has none then."""
    key = definition_key(name)
    for batch in origin.state(Span.of_key(key), at, ["key", "value"], 1):
        if batch.num_rows:
            return TypedRows(name, batch.column("value")[0].as_py())
    found = [
        name_of(each)
        for batch in origin.state(Span.of_prefix(CATALOGUE), at, ["key"], 100)
        for each in batch.column("key").to_pylist()
    ]
    hint = f"there are {', '.join(found[:20])}" if found else "it has no table at that time"
    raise UsageError(f"there is no table {name!r} in {origin.place.path}", hint)
