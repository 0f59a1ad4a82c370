"""Columns and rows of tables for the world outside: words of the shell, the types of other systems,
Parquet files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.bulk.seed import appearing_file
from kvstore.cli.options import Encoding, to_json
from kvstore.errors import UsageError, storage_errors
from kvstore.tables import TableCodec
from kvstore.tables.codec import dicts
from kvstore.tables.definition import Column, kind_of, parse_type

# --------------------------------------------------------------------------------------------------
# Values of columns as words of the shell, and rows as people and programs read them.


def to_values(codec: TableCodec, columns: Sequence[Column], words: Sequence[str]) -> list[Any]:
    """Words as the values of the first columns. Raises `UsageError` that names the column."""
    if len(words) > len(columns):
        names = ", ".join(column.name for column in columns)
        raise UsageError(
            f"{codec.definition.where}: {len(words)} values", f"pass at most {names}, in this order"
        )
    found = []
    for column, word in zip(columns, words, strict=False):
        where = f"{codec.definition.where}, column {column.name!r}"
        found.append(to_value(column.type, word, where))
    return found


def to_value(kind: pa.DataType, word: str, where: str) -> Any:
    """A word as a value of a type: binary in hex, times as ISO-8601, durations as integers."""
    try:
        if isinstance(kind, pa.UuidType):
            return UUID(word)
        if _is_binary(kind):
            return bytes.fromhex(word)
        if pa.types.is_duration(kind):
            array = pa.array([int(word)], pa.int64()).cast(kind)
        else:
            array = pa.array([word]).cast(kind)
    except (ValueError, OverflowError, pa.ArrowException) as error:
        told = str(error).partition("\n")[0]
        raise UsageError(f"{where}: {word!r} is no {kind}: {told}", "correct the word") from None
    return dicts(pa.record_batch([array], names=["value"]))[0]["value"]


def to_type(word: str) -> pa.DataType:
    """A type by the name that `kvstore table show` prints, or by another name that Arrow has."""
    for parse in (parse_type, pa.type_for_alias):
        try:
            found = parse(word)
        except ValueError:
            continue
        kind_of(found)  # raises if a table has no such columns
        return found
    raise UsageError(f"{word!r} is no type", "write int64, double, string, timestamp[us, tz=UTC]")


def json_row(schema: pa.Schema, row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON: decimals, times and UUIDs are texts; binary is as in `kvstore get --json`."""
    return {field.name: _json(field.type, row[field.name]) for field in schema}


def shown_row(schema: pa.Schema, row: dict[str, Any]) -> list[str]:
    """A row for people."""
    return [
        "null" if row[field.name] is None else _text(field.type, row[field.name])
        for field in schema
    ]


def _json(kind: pa.DataType, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, bytes):
        return to_json(value, Encoding.TEXT)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and not pa.types.is_temporal(kind):
        return value
    return _text(kind, value)


def _text(kind: pa.DataType, value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return f"{value.total_seconds()} s"
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, int) and pa.types.is_temporal(kind):
        return str(pa.array([value], pa.int64()).cast(kind).cast(pa.string())[0].as_py())
    return str(value)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


# --------------------------------------------------------------------------------------------------
# Columns of tables for systems that have fewer types: Spark, Delta, and programs that read them.
#
#     uint8, uint16, uint32     the next wider integer
#     uint64                    decimal(20,0)
#     UUID, fixed binary        binary
#     timestamps                of microseconds, in UTC or without a zone
#     time of day, and every type of nanoseconds      int64 of nanoseconds
#     all other types           as they are
#
# Invariants
# 1. No value is changed. A value that the other type does not hold is refused.

PRECISION_MAX: Final = 38
"""Digits of a decimal in Spark and Delta."""

_WIDER: Final = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}


def outside_type(kind: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of a column elsewhere. None if none does."""
    if kind == pa.large_string():
        return pa.string()
    if is_binary(kind):
        return pa.binary()
    if getattr(kind, "unit", "") == "ns" or pa.types.is_time(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0)
    if pa.types.is_decimal(kind):
        is_held = 0 <= kind.scale <= kind.precision <= PRECISION_MAX
        return pa.decimal128(kind.precision, kind.scale) if is_held else None
    return _WIDER.get(kind, kind)


def is_binary(kind: pa.DataType) -> bool:
    """Whether values of the type are bytes."""
    return isinstance(kind, pa.UuidType) or bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def outside_values(array: pa.Array, wanted: pa.DataType, named: Callable[[int], str]) -> pa.Array:
    """A column of a table in another type. Raises `UsageError` for the first value that the type
    does not hold; `named` names the value by its number."""
    try:
        return _converted(array, wanted)
    except pa.ArrowInvalid:
        row = next(at for at in range(len(array)) if not _converts(array[at : at + 1], wanted))
        raise UsageError(
            f"{named(row)}: the value fits {array.type}, and not {wanted}",
            "leave the column out: name the other columns in columns",
        ) from None


def _converted(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    kind = array.type
    if kind == wanted:
        return array
    if isinstance(kind, pa.UuidType):
        return array.storage.cast(pa.binary()).cast(wanted)
    if pa.types.is_time(kind):
        return array.cast(pa.time64("ns")).cast(pa.int64())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary()).cast(wanted)
    return array.cast(wanted)


def _converts(array: pa.Array, wanted: pa.DataType) -> bool:
    try:
        _converted(array, wanted)
    except pa.ArrowInvalid:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# A table's state as one Parquet file of typed columns.
#
# Invariants
# 1. The file has the rows of one time, which stays readable while they are written.
# 2. The file appears under its name when it is whole and on disk.

_GROUP_ROWS: Final = 128 << 10
"""Rows of a row group: DuckDB's and Polars' own size, so that their threads each take one."""


class ExportReport(NamedTuple):
    """The rows of an export, and the time at which it has them."""

    as_of: Timestamp
    rows: int
    bytes: int


def export_parquet(
    store: Any,
    table: str,
    path: Path,
    as_of: TimeLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = True,
    progress: Callable[[int], None] = lambda rows: None,
) -> ExportReport:
    """Write the rows of a table as of a time, in key order. A file that is there is replaced if
    `overwrite` is true, and else refused.

    Nanoseconds, decimals and zones stay as they are. The file's metadata has the time and the table
    (`kvstore.as_of`, `kvstore.table`). Memory is bounded. Raises as `Table.scan`.
    """
    with store.snapshot(as_of) as snapshot:
        reader = snapshot.table(table).scan(columns=columns)
        return write_parquet(
            path, reader.schema, reader, table, snapshot.as_of, progress, overwrite
        )


def write_parquet(
    path: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    table: str,
    as_of: Timestamp,
    progress: Callable[[int], None],
    overwrite: bool = True,
) -> ExportReport:
    """Write batches of rows of `table` as of a time. See `export_parquet`."""
    for field in schema:
        if pa.types.is_decimal(field.type) and not 0 <= field.type.scale <= field.type.precision:
            raise UsageError(
                f"table {table!r}, column {field.name!r} is {field.type}, which Parquet lacks",
                "leave the column out: name the other columns in columns=",
            )
    rows = 0
    told = {"kvstore.as_of": str(int(as_of)), "kvstore.table": table}
    schema = schema.with_metadata(told)
    with (
        appearing_file(path, overwrite=overwrite) as passing,
        pq.ParquetWriter(passing, schema, compression="zstd") as writer,
    ):
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            if sum(each.num_rows for each in waiting) >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(waiting).cast(schema))
                waiting = []
                progress(rows)
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting).cast(schema))
    with storage_errors(str(path)):
        return ExportReport(as_of, rows, path.stat().st_size)
