"""Rows as they arrive, in the types of a table: Arrow batches, checked column by column.

`exact.py` has the rule of the values that a column takes.

Invariants
1. No value is changed.
2. An error names the column, and the row if one row is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import UsageError
from kvstore.tables.codec import default_array
from kvstore.tables.definition import Column, Definition
from kvstore.tables.exact import plain, same_values

_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")
"""The column that pandas makes of an index without a name."""


def conform(
    definition: Definition, batch: pa.RecordBatch, first: int = 0, what: str = ""
) -> pa.RecordBatch:
    """A batch with the columns of a table, in their order and types. `first` is the number of its
    first row. Raises `UsageError`."""
    where = what or definition.where
    names = batch.schema.names
    for name in names:
        if name not in definition.by_name and _PANDAS_INDEX.fullmatch(name):
            raise UsageError(
                f"{where} has no column for the index of the frame, {name!r}",
                "leave the index out: frame.reset_index(drop=True); or name it as a column",
            )
        definition.column(name)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{where}: two columns {double!r}", "pass one")
    columns = [_column(definition, column, batch, first) for column in definition.columns]
    return pa.RecordBatch.from_arrays(columns, schema=definition.schema)


def _column(definition: Definition, column: Column, batch: pa.RecordBatch, first: int) -> pa.Array:
    where = f"{definition.where}, column {column.name!r}"
    at = batch.schema.get_field_index(column.name)
    if at < 0:
        if column.default is None and not column.is_nullable:
            raise UsageError(f"{where} is missing", "it takes no null: give each row a value")
        return default_array(column, batch.num_rows)
    rule = ""
    if not column.is_nullable:
        is_key = column.id in definition.key_ids
        rule = "a key is never null" if is_key else "it takes no null: give each row a value"
    return same_values(batch.column(at), column.type, where, first, no_null=rule)


def key_values(
    batches: Sequence[pa.RecordBatch], first: int, name: str, type_: pa.DataType
) -> pa.Array:
    """Column `name` of the labels in `batches`, of which the first is row `first`, in the type of a
    column of a key. Raises `UsageError` for a null, and as `same_values` does."""
    found: list[pa.Array] = []
    for batch in batches:
        column = plain(batch.column(name), f"column {name!r}")
        if column.null_count:
            row = first + pc.index(column.is_null(), True).as_py()
            raise UsageError(f"column {name!r} has a null in row {row}", "drop such labels first")
        found.append(same_values(column, type_, f"the key of column {name!r}", first))
        first += batch.num_rows
    return pa.concat_arrays(found)


def batches_of(definition: Definition, data: object) -> Iterator[pa.RecordBatch]:
    """The rows of anything that speaks Arrow, in batches with the columns of a table."""
    first = 0
    for batch in record_batches(data):
        yield conform(definition, batch, first)
        first += batch.num_rows


def record_batches(data: object) -> Iterator[pa.RecordBatch]:
    """The batches of anything that speaks Arrow. Raises `UsageError` for anything else."""
    try:
        if isinstance(data, pa.RecordBatch):
            return iter([data])
        if isinstance(data, pa.RecordBatchReader):
            return iter(data)
        if hasattr(data, "__arrow_c_stream__"):
            return iter(pa.RecordBatchReader.from_stream(data))
        if hasattr(data, "__arrow_c_array__"):
            return iter([pa.record_batch(data)])
        found = list(data) if isinstance(data, list | tuple | Iterator) else []
        if found and all(isinstance(each, pa.RecordBatch) for each in found):
            return iter(found)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(f"the rows are no table: {error}", "pass a table with columns") from error
    raise UsageError(
        f"rows must be Arrow data, not {type(data).__name__}",
        "pass a table, batches, a reader, or a frame of Polars, DuckDB or pandas",
    )
