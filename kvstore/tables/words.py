"""Values of columns as words that a person writes, and rows as people and programs read them."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa

from kvstore.codec.json import bytes_json
from kvstore.errors import UsageError
from kvstore.tables.definition import Column, kind_of, parse_type
from kvstore.tables.exact import is_text
from kvstore.tables.nested import is_list, is_nested, parse_nested
from kvstore.tables.row_codec import TableCodec, dicts, nested_array


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
    """A word as a value of a type: binary in hex, times as ISO-8601, durations as a number of the
    units of the column, and lists, structs and maps as JSON. Raises `UsageError` for a word that
    the column does not hold: a fraction is rounded to the nearest float, and nothing else is."""

    def read() -> Any:
        if is_nested(kind):
            return _of_json(kind, _parsed(word))
        if _is_binary(kind):
            return bytes.fromhex(word)
        return word if is_text(kind) else _of_word(kind, word)

    return _checked(kind, word, read, where)


class NumberText(str):
    """A number of JSON that is no integer, as the text that it has there."""

    __slots__ = ()


def read_row(
    types: Mapping[str, pa.DataType], fields: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The fields of a JSON object as a row. Raises `UsageError` that names the column."""
    found = {}
    for name, given in fields.items():
        if name not in types:
            raise UsageError(f"{where}: no column {name!r}", f"there are {', '.join(types)}")
        found[name] = read_value(types[name], given, f"{where}: column {name!r}")
    return found


def read_value(kind: pa.DataType, given: Any, where: str) -> Any:
    """A value of JSON as a value of a column: what `json_row` writes, and what means the same.

    A text stands for a value of any type, as a word does; in a column of bytes it is its UTF-8. A
    number that is no integer comes as `NumberText`. Raises `UsageError` for a value that the column
    does not hold.
    """
    return None if given is None else _checked(kind, given, lambda: _of_json(kind, given), where)


def column_of(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Values of a column, as `read_value` gives them, as an array."""
    found = kind_of(kind)
    if found.node is not None:
        cells = [None if value is None else found.stored(value) for value in values]
        return nested_array(found.node, pa.array(cells, pa.binary()), f"{kind}")
    if isinstance(kind, pa.UuidType):
        stored = pa.array([value and value.bytes for value in values], kind.storage_type)
        return pa.ExtensionArray.from_storage(kind, stored)
    if pa.types.is_temporal(kind) and found.value is None:  # integers of nanoseconds
        return pa.array(values, pa.int64()).view(kind)
    return pa.array(values, kind)


def _of_json(kind: pa.DataType, given: Any) -> Any:
    if is_nested(kind):
        return _nested_of_json(kind, given)
    if isinstance(given, str):
        if not isinstance(given, NumberText):
            if _is_binary(kind):
                return given.encode()
            if is_text(kind):
                return given
        elif not _is_number(kind):
            raise ValueError("it is a number")
        return _of_word(kind, given)
    if isinstance(given, Mapping) and list(given) == ["base64"] and _is_binary(kind):
        return base64.b64decode(given["base64"], validate=True)
    if isinstance(given, Mapping | list):
        raise ValueError(f"a column holds no {'list' if isinstance(given, list) else 'object'}")
    if pa.types.is_duration(kind) and type(given) is int:
        return _length(kind, given)
    return given


def _nested_of_json(kind: pa.DataType, given: Any) -> Any:
    """A list, or an object of a struct or a map. A map may also be a list of pairs."""

    def inner(type_: pa.DataType, value: Any) -> Any:
        return None if value is None else _of_json(type_, value)

    if isinstance(given, str) and not isinstance(given, NumberText):
        given = _parsed(given)
    if pa.types.is_struct(kind):
        if not isinstance(given, Mapping):
            raise ValueError("write an object")
        types = {field.name: field.type for field in kind}
        for name in given:
            if name not in types:
                raise ValueError(f"there is no field {name!r}, but {', '.join(types)}")
        return {name: inner(types[name], value) for name, value in given.items()}
    if pa.types.is_map(kind):
        pairs = list(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError("write an object, or a list of pairs")
        return [(inner(kind.key_type, key), inner(kind.item_type, item)) for key, item in pairs]
    if not isinstance(given, list):
        raise ValueError("write a list")
    return [inner(kind.value_type, item) for item in given]


def _parsed(word: str) -> Any:
    """The JSON that a word is."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object has a field twice")
        return found

    return json.loads(
        word, object_pairs_hook=distinct, parse_float=NumberText, parse_constant=NumberText
    )


def _of_word(kind: pa.DataType, word: str) -> Any:
    """A word as a value of a type that is neither text nor binary."""
    if isinstance(kind, pa.UuidType):
        return UUID(word)
    if pa.types.is_floating(kind):
        return _float(kind, word)
    if pa.types.is_decimal(kind) or pa.types.is_integer(kind):
        if _NUMBER.fullmatch(word) is None:
            raise ValueError("it is no number")
        exact = Decimal(word)
        is_whole = pa.types.is_integer(kind) and exact == exact.to_integral_value()
        return int(exact) if is_whole else exact
    if pa.types.is_duration(kind):
        return _length(kind, int(word))
    if pa.types.is_time(kind):
        return _time_of_day(kind, word)
    # Arrow takes no zeros behind the last digit that a column has: 12:00:00.005000 in one of ms.
    array = pa.array([_ZEROS.sub(r"\1", word)]).cast(kind)
    return dicts(pa.record_batch([array], names=["value"]))[0]["value"]


def _time_of_day(kind: pa.DataType, word: str) -> int | time:
    """`12:30:01.000000001` as a value of a column: Arrow casts no text to a time of seconds."""
    match = _TIME.fullmatch(word)
    if match is None:
        raise ValueError("write HH:MM:SS")
    hour, minute, second = (int(each or 0) for each in match.groups()[:3])
    nanos = int((match[4] or "").ljust(9, "0"))
    micros, rest = divmod(nanos, 1000)
    found = time(hour, minute, second, micros)
    if kind.unit == "ns":
        return ((hour * 60 + minute) * 60 + second) * 10**9 + nanos
    if rest:
        raise ValueError(f"it has more than {kind.unit} tell")
    return found


def _float(kind: pa.DataType, word: str) -> float:
    found, width = float(word), kind.bit_width
    if width == 32 and math.isfinite(found):
        with np.errstate(over="ignore"):
            single = float(np.float32(found))
        # JSON has a float32 with the digits of a double.
        found, width = single, 64 if single == found else 32
    if not is_float_of(word, found, FLOAT_DIGITS[width]):
        raise ValueError("the column does not hold it exactly")
    return found


def _length(kind: pa.DataType, units: int) -> int | timedelta:
    """A number of the units of a column of durations as a value of the column."""
    if kind.unit == "ns":
        return units
    return timedelta(microseconds=units * {"s": 10**6, "ms": 1000, "us": 1}[kind.unit])


def _checked(kind: pa.DataType, given: Any, read: Callable[[], Any], where: str) -> Any:
    """What `read` gives, if the column holds it."""
    try:
        found = read()
        kind_of(kind).stored(found)
    except (ValueError, TypeError, ArithmeticError, RecursionError, pa.ArrowException) as error:
        told = str(error).partition("\n")[0]
        shown = repr(str(given) if isinstance(given, str) else given)
        raise UsageError(f"{where}: {shown:.100} is no {kind}: {told}", "correct it") from None
    return found


FLOAT_DIGITS: Final = {32: 9, 64: 17}
"""Digits that tell a float of so many bits from all others."""

_TIME: Final = re.compile(r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?", re.ASCII)
_ZEROS: Final = re.compile(r"(?:(\.\d*[1-9])|\.)0+(?!\d)", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


def is_float_of(text: str, number: float, digits: int) -> bool:
    """Whether a float holds the number of its text, so that it comes out again.

    A fraction is rounded to the nearest float, as all readers do: 0.1 is no float. A whole number
    must be exact. Written with an exponent, it may also be what the float prints in so many
    digits: 1e23 is no float either, and every program writes one of them so. A finite number never
    becomes infinite, and no other number becomes zero.
    """
    try:
        exact = Decimal(text.strip(" \t"))
    except InvalidOperation:  # inf, in the words that Arrow takes
        return True
    if not exact.is_finite() or (math.isfinite(number) and Decimal(number) == exact):
        return True
    if number == 0 or not math.isfinite(number):
        return False
    is_whole = exact == exact.to_integral_value()
    if is_whole and "e" not in text.lower():
        return False
    if not is_whole and abs(number) > 1:
        return True
    written = len("".join(map(str, exact.as_tuple().digits)).strip("0"))
    last = Decimal(1).scaleb(exact.adjusted() - written + 1)
    # Half of the last digit: programs round a float that lies in the middle up or down.
    return written <= digits and 2 * abs(Decimal(number) - exact) <= last


_TYPES: Final = {
    "int": pa.int64(),
    "text": pa.string(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "uuid": pa.uuid(),
}
"""Types by words that Arrow lacks."""


def to_type(word: str) -> pa.DataType:
    """A type by the name that `kvstore table show` prints, by another name that Arrow has, or by
    one of `int`, `text`, `bytes`, `date`, `timestamp` and `uuid`."""
    if word in _TYPES:
        return _TYPES[word]
    if "<" in word and word != str(pa.uuid()):
        try:
            nested = parse_nested(word, to_type)
        except ValueError as error:
            raise UsageError(
                f"{word!r:.200} is no type: {error}",
                "write list<double>, fixed_size_list<float>[3], struct<a: int64, b: string>, "
                "map<string, int64>",
            ) from None
        kind_of(nested)
        return nested
    for parse in (parse_type, pa.type_for_alias):
        try:
            found = parse(word)
        except ValueError:
            continue
        kind_of(found)  # raises if a table has no such columns
        return found
    raise UsageError(
        f"{word!r} is no type",
        "write int64, double, string, bool, binary, date, timestamp, uuid, decimal128(9, 2), or "
        "another type of Arrow",
    )


def json_row(schema: pa.Schema, row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON: decimals, times and UUIDs are texts; binary is as in `kvstore get --json`; a
    duration is a number of the units of its column; NaN and infinity are texts; a struct is an
    object, and so is a map whose keys are texts; another map is a list of pairs."""
    return {field.name: _json(field.type, row[field.name]) for field in schema}


def shown_row(schema: pa.Schema, row: dict[str, Any]) -> list[str]:
    """A row for people."""
    return [shown_value(field.type, row[field.name]) for field in schema]


def shown_value(kind: pa.DataType, value: Any) -> str:
    """A value of a column for people."""
    return "null" if value is None else _text(kind, value)


def cell_text(kind: pa.DataType, value: Any) -> str | None:
    """The JSON of a value of a column, None for a null."""
    return None if value is None else json.dumps(_json(kind, value), ensure_ascii=False)


def _json(kind: pa.DataType, value: Any) -> Any:
    if is_list(kind) and value is not None:
        return [_json(kind.value_type, item) for item in value]
    if pa.types.is_struct(kind) and value is not None:
        return {field.name: _json(field.type, value[field.name]) for field in kind}
    if pa.types.is_map(kind) and value is not None:
        pairs = [[_json(kind.key_type, key), _json(kind.item_type, value[key])] for key in value]
        return dict(pairs) if is_text(kind.key_type) else pairs
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, bytes):
        return bytes_json(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if pa.types.is_duration(kind):
        return kind_of(kind).stored(value)
    if isinstance(value, int) and not pa.types.is_temporal(kind):
        return value
    return _text(kind, value)


def _text(kind: pa.DataType, value: Any) -> str:
    if is_nested(kind):
        return json.dumps(_json(kind, value), ensure_ascii=False)
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


def _is_number(kind: pa.DataType) -> bool:
    is_whole = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    return bool(is_whole or pa.types.is_floating(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
