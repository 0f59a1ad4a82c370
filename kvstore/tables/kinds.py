"""Types of columns: how a value lies in a row and in a key, and which Python values it takes.

    Arrow type                        in a row          in a key (kvstore.codec.tuples)   Python
    bool                              1 byte            02, 03                            bool
    int8 ... int64, uint8 ... uint64  their bytes       10 (18 from 2^63 on)              int
    float32, float64                  their bytes       20                                float
    decimal128, decimal256            16, 32 bytes      28                                Decimal
    string, large_string              bytes             40                                str
    binary, large_binary              bytes             30                                bytes
    fixed_size_binary(n)              n bytes           30                                bytes
    date32                            4 bytes           50                                date
    timestamp(us, zone)               8 bytes           60                                datetime
    other timestamps, time, duration  4 or 8 bytes      10                                see below
    uuid                              16 bytes          70                                UUID

A timestamp with a zone takes aware datetimes, one without takes naive ones. Columns that count
nanoseconds take `Timestamp` and other integers too, and give integers, because a datetime has
microseconds.

Invariants
1. A value that the type cannot hold exactly is refused. `exact.py` has the rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pyarrow as pa

from kvstore.codec import tuples
from kvstore.errors import UsageError
from kvstore.loops import contract
from kvstore.tables import cells


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of columns. `storage` is the Arrow type whose buffers have its bytes; `width` is 0 if
    it varies. `stored` makes of a Python value what `struct` packs with `code`, or bytes; `value`
    goes back."""

    type: pa.DataType
    storage: pa.DataType
    width: int
    code: str
    stored: Callable[[Any], Any]
    value: Callable[[Any], Any] | None
    key_kind: int
    tag: bytes
    least: int | None = None
    most: int | None = None
    """The least and the greatest number of days or units that a value of Python has, both included.
    None where the type of Arrow has the same range."""

    @property
    def remedy(self) -> str:
        """What to do with a value that a column of this kind does not hold."""
        if self.way == contract.TEXT:
            return "a text is UTF-8: decode it first, or make the column binary"
        if self.least is None or not pa.types.is_temporal(self.type):
            return "convert it first, or widen the column"
        if pa.types.is_time(self.type):
            return "a time of day lies below 24:00, in whole units of the column"
        if pa.types.is_duration(self.type):
            return "a duration has whole units of the column, and at most 999,999,999 days"
        return "use years 1 to 9999, in whole units of the column, and null for what never ends"

    @property
    def key_width(self) -> int:
        """The width of the column that the loops of keys take."""
        if self.key_kind in (contract.SIGNED, contract.UNSIGNED, contract.DOUBLE):
            return 8
        return self.width if self.key_kind in (contract.FIXED, contract.BOOLEAN) else 0

    @property
    def way(self) -> int:
        """The way by which the loops make a value of Python. The function `value` makes the same
        value."""
        if self.value is None:
            return contract.STORED
        if self.value is bool:
            return contract.TRUTH
        if self.value is cells.text_of:
            return contract.TEXT
        if pa.types.is_timestamp(self.type) and self.type.unit == "us":
            return contract.LOCAL if self.type.tz is None else contract.INSTANT
        return contract.CALLED

    @property
    def letter(self) -> str:
        """The last letter of `code`; `s` where the width varies."""
        return self.code[-1:] or "s"


@cache
def kind_of(type_: pa.DataType) -> Kind:
    """The kind of columns of an Arrow type. Raises `UsageError` for a type that has none."""
    for fits, make in _MAKERS:
        if fits(type_):
            return make(type_)
    raise UsageError(
        f"a table has no columns of type {type_}",
        "use booleans, numbers, decimals, text, binary, dates, times, timestamps or UUIDs",
    )


def parse_type(text: str) -> pa.DataType:
    """The type whose `str` is `text`. Raises `ValueError` for another text."""
    if text in _SIMPLE:
        return _SIMPLE[text]
    for pattern, make in _PATTERNS:
        if found := pattern.fullmatch(text):
            made = make(*found.groups())
            if str(made) == text:
                return made
    raise ValueError(f"unknown type {text!r}")


def _integer(type_: pa.DataType) -> Kind:
    width, is_signed = type_.bit_width // 8, pa.types.is_signed_integer(type_)
    code = "bhiq"[width.bit_length() - 1]
    key = contract.SIGNED if is_signed or width < 8 else contract.UNSIGNED
    stored = cells.integer(8 * width, is_signed=is_signed)
    code = code if is_signed else code.upper()
    return Kind(type_, type_, width, code, stored, None, key, tuples.INTEGER)


def _floating(type_: pa.DataType) -> Kind:
    width = type_.bit_width // 8
    code = "f" if width == 4 else "d"
    stored = cells.float_of(single=width == 4)
    return Kind(type_, type_, width, code, stored, None, contract.DOUBLE, tuples.DOUBLE)


def _boolean(type_: pa.DataType) -> Kind:
    return Kind(type_, pa.uint8(), 1, "B", cells.boolean, bool, contract.BOOLEAN, tuples.TRUE)


def _text(type_: pa.DataType) -> Kind:
    return Kind(type_, pa.string(), 0, "", cells.text, cells.text_of, contract.FRAMED, tuples.TEXT)


def _binary(type_: pa.DataType) -> Kind:
    return Kind(type_, pa.binary(), 0, "", cells.binary, None, contract.FRAMED, tuples.BYTES)


def _fixed(type_: pa.DataType) -> Kind:
    width = type_.byte_width
    stored = cells.fixed(width)
    return Kind(type_, type_, width, f"{width}s", stored, None, contract.FRAMED, tuples.BYTES)


def _unique(type_: pa.DataType) -> Kind:
    width = tuples.UUID_BYTES
    return Kind(
        type_,
        type_.storage_type,
        width,
        f"{width}s",
        cells.unique,
        cells.unique_of,
        contract.FIXED,
        tuples.UNIQUE,
    )


def _decimal(type_: pa.DataType) -> Kind:
    width = type_.byte_width
    return Kind(
        type_,
        type_,
        width,
        f"{width}s",
        cells.decimal(type_.precision, type_.scale, width),
        cells.decimal_of(type_.scale),
        contract.WHOLE,
        tuples.DECIMAL,
    )


def _day(type_: pa.DataType) -> Kind:
    made = cells.day, cells.day_of
    return Kind(type_, type_, 4, "i", *made, contract.SIGNED, tuples.DAY, *cells.DAYS)


def _timestamp(type_: pa.DataType) -> Kind:
    is_aware = type_.tz is not None
    tag = tuples.INSTANT if is_aware and type_.unit == "us" else tuples.INTEGER
    stored = cells.instant(type_.unit, is_aware=is_aware)
    value = cells.instant_of(type_.unit, is_aware=is_aware)
    bounds = cells.moments(type_.unit)
    return Kind(type_, type_, 8, "q", stored, value, contract.SIGNED, tag, *bounds)


def _time(type_: pa.DataType) -> Kind:
    width = type_.bit_width // 8
    stored, value = cells.time_of_day(type_.unit), cells.time_of_day_of(type_.unit)
    code = "i" if width == 4 else "q"
    bounds = 0, cells.day_units(type_.unit) - 1
    return Kind(type_, type_, width, code, stored, value, contract.SIGNED, tuples.INTEGER, *bounds)


def _duration(type_: pa.DataType) -> Kind:
    stored, value = cells.duration(type_.unit), cells.duration_of(type_.unit)
    bounds = cells.lengths(type_.unit)
    return Kind(type_, type_, 8, "q", stored, value, contract.SIGNED, tuples.INTEGER, *bounds)


def _is_text(type_: pa.DataType) -> bool:
    return type_ in (pa.string(), pa.large_string())


def _is_binary(type_: pa.DataType) -> bool:
    return type_ in (pa.binary(), pa.large_binary())


def _is_float(type_: pa.DataType) -> bool:
    return type_ in (pa.float32(), pa.float64())


def _is_unique(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.UuidType)


_MAKERS: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], Kind]], ...]] = (
    (pa.types.is_integer, _integer),
    (_is_float, _floating),
    (pa.types.is_boolean, _boolean),
    (_is_text, _text),
    (_is_binary, _binary),
    (pa.types.is_fixed_size_binary, _fixed),
    (_is_unique, _unique),
    (pa.types.is_decimal128, _decimal),
    (pa.types.is_decimal256, _decimal),
    (pa.types.is_date32, _day),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_time, _time),
    (pa.types.is_duration, _duration),
)

_SIMPLE: Final = {
    str(type_): type_
    for type_ in (
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.date32(), pa.uuid()),
        *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
        *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    )
}

_PATTERNS: Final[tuple[tuple[re.Pattern[str], Callable[..., pa.DataType]], ...]] = (
    (re.compile(r"timestamp\[(s|ms|us|ns), tz=([^\]]{1,100})\]"), pa.timestamp),
    (
        re.compile(r"decimal128\((\d{1,2}), (-?\d{1,2})\)"),
        lambda precision, scale: pa.decimal128(int(precision), int(scale)),
    ),
    (
        re.compile(r"decimal256\((\d{1,2}), (-?\d{1,2})\)"),
        lambda precision, scale: pa.decimal256(int(precision), int(scale)),
    ),
    (re.compile(r"fixed_size_binary\[(\d{1,9})\]"), lambda width: pa.binary(int(width))),
)
