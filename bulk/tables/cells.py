"""Values of columns as words of the shell, and rows as people and programs read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from kvstore.cli.options import Encoding, to_json
from kvstore.errors import UsageError
from kvstore.tables import TableCodec
from kvstore.tables.codec import dicts
from kvstore.tables.definition import Column
from kvstore.tables.kinds import kind_of, parse_type


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
