"""Rows as they arrive, in the types of a table: Arrow batches, checked column by column.

Invariants
1. No value is changed: a type that cannot hold one exactly is refused, and so is a text for a
   number. Integers may be wider or narrower, texts and binaries may have another Arrow form.
2. An error names the column, and the row if one row is to blame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import UsageError
from kvstore.tables.codec import default_array
from kvstore.tables.definition import Column, Definition


def conform(
    definition: Definition, batch: pa.RecordBatch, first: int = 0, what: str = ""
) -> pa.RecordBatch:
    """A batch with the columns of a table, in their order and types. `first` is the number of its
    first row. Raises `UsageError`."""
    where = what or definition.where
    names = batch.schema.names
    for name in names:
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
    array = batch.column(at)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count and not column.is_nullable:
        row = first + pc.index(array.is_null(), True).as_py()
        is_key = column.id in definition.key_ids
        rule = "a key is never null" if is_key else "it takes no null: give each row a value"
        raise UsageError(f"{where} is null in row {row}", rule)
    return same_values(array, column.type, where, first)


def key_values(
    batches: Sequence[pa.RecordBatch], first: int, name: str, type_: pa.DataType
) -> pa.Array:
    """Column `name` of the labels in `batches`, of which the first is row `first`, in the type of a
    column of a key. Raises `UsageError` for a null, and as `same_values` does."""
    found: list[pa.Array] = []
    for batch in batches:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.null_count:
            row = first + pc.index(column.is_null(), True).as_py()
            raise UsageError(f"column {name!r} has a null in row {row}", "drop such labels first")
        found.append(same_values(column, type_, f"the key of column {name!r}", first))
        first += batch.num_rows
    return pa.concat_arrays(found)


def same_values(array: pa.Array, type_: pa.DataType, where: str, first: int) -> pa.Array:
    """The same values in another type. Raises `UsageError` that says `where`, for a type of another
    kind and for the first value that the type does not hold; `first` is the number of the first."""
    if array.type == type_:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), type_)
    found, wanted = _family(array.type), _family(type_)
    if found != wanted and (found, wanted) not in _CROSSINGS:
        raise UsageError(f"{where} is {type_}, not {array.type}", "convert it first")
    cast, error = _try_cast(array, type_)
    if cast is not None:
        return cast
    row = _first_lost(array, type_)
    value = array[row].as_py()
    raise UsageError(
        f"{where} is {type_}, which does not hold {value!r:.100} of row {first + row}",
        "convert it first, or widen the column",
    ) from error


def _try_cast(array: pa.Array, type_: pa.DataType) -> tuple[pa.Array | None, Exception | None]:
    try:
        if isinstance(type_, pa.BaseExtensionType):
            stored = array.cast(type_.storage_type)
            return pa.ExtensionArray.from_storage(type_, stored), None
        cast = array.cast(type_)
        is_narrower = pa.types.is_floating(array.type) and type_.bit_width < array.type.bit_width
        if is_narrower and not _same(cast.cast(array.type), array):
            return None, None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        return None, error
    return cast, None


def _same(one: pa.Array, other: pa.Array) -> bool:
    equal = pc.or_(pc.equal(one, other), pc.and_(pc.is_nan(one), pc.is_nan(other)))
    return bool(pc.all(equal, min_count=0).as_py())


def _first_lost(array: pa.Array, type_: pa.DataType) -> int:
    """The first row that does not cast, by halving."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if _try_cast(array.slice(low, middle - low), type_)[0] is None:
            high = middle
        else:
            low = middle
    return low


def _family(type_: pa.DataType) -> str:
    if pa.types.is_timestamp(type_):
        return "timestamp" if type_.tz is None else "instant"
    for fits, name in _FAMILIES:
        if fits(type_):
            return name
    return str(type_)


_FAMILIES: Final[tuple[tuple[Any, str], ...]] = (
    (pa.types.is_integer, "integer"),
    (pa.types.is_floating, "float"),
    (pa.types.is_decimal, "decimal"),
    (lambda type_: isinstance(type_, pa.UuidType), "uuid"),
    (pa.types.is_fixed_size_binary, "fixed"),
    *((check, "text") for check in (pa.types.is_string, pa.types.is_large_string)),
    (pa.types.is_string_view, "text"),
    *((check, "binary") for check in (pa.types.is_binary, pa.types.is_large_binary)),
    (pa.types.is_binary_view, "binary"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "duration"),
)

_CROSSINGS: Final = frozenset(
    [
        ("integer", "float"),
        ("integer", "decimal"),
        ("binary", "fixed"),
        ("fixed", "binary"),
        ("fixed", "uuid"),
        ("binary", "uuid"),
    ]
)


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
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"the rows are no table: {error}", "pass a table with columns") from error
    raise UsageError(
        f"rows must be Arrow data, not {type(data).__name__}",
        "pass a table, batches, a reader, or a frame of Polars, DuckDB or pandas",
    )
