"""The definition of a table: its name space, the values and types of columns, key, indexes and
layouts, also from classes.
"""

from __future__ import annotations

import json
import re
import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import cache, cached_property, lru_cache
from operator import index
from typing import Annotated, Any, ClassVar, Final, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import numpy as np
import pyarrow as pa
from typing_extensions import NotRequired, ReadOnly, Required

from kvstore.base.span import RESERVED
from kvstore.codec import tuples
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError, FormatVersionError, NotFoundError, UsageError
from kvstore.loops import shapes
from kvstore.tables.nested import (
    TypeNode,
    canonical,
    is_list,
    is_nested,
    node_of,
    parse_nested,
    require_type,
    stored_of,
    type_text,
    value_of,
)
from kvstore.timeline.reserved import CATALOGUE, FIRST_ROW

# --------------------------------------------------------------------------------------------------
# Where tables lie among the keys of a store.
#
# The rows of one table lie together, in the order of their keys. The entries of each index follow.
#
#     name          := | reserved | 00 | "kvstore.tables" 00 | name in UTF-8 |    of a table
#     row           := | reserved | table | 00 | tuple of the key columns |
#     entry         := | reserved | table | index | tuple of the index columns | tuple of the key |
#     progress      := | reserved | 00 | "kvstore.tables.progress" 00 | name | 00 | index |
#
#     reserved := ff ff ff ff ff ff ff ff ff     nine bytes: see kvstore.base.span
#     table    := number u8                      from 1 to 239
#               | f0 | number u32 |              from 240 on, big-endian
#     index    := number u8                      from 1 to 255

TABLE_NUMBER_MAX: Final = (1 << 32) - 1
INDEX_NUMBER_MAX: Final = 255

_WIDE: Final = 0xF0
_ROWS: Final = b"\x00"
_PROGRESS: Final = RESERVED + b"\x00kvstore.tables.progress\x00"


def definition_key(name: str) -> bytes:
    """The key of the definition of a table."""
    return CATALOGUE + name.encode()


def name_of(key: bytes) -> str:
    """The table whose definition has this key."""
    try:
        return key.removeprefix(CATALOGUE).decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"key {key.hex()}", "the name of a table is no text") from error


def table_prefix(number: int) -> bytes:
    """The beginning of all keys of a table."""
    if number < _WIDE:
        return RESERVED + bytes([number])
    return RESERVED + bytes([_WIDE]) + number.to_bytes(4, "big")


def rows_prefix(number: int) -> bytes:
    """The beginning of the keys of a table's rows."""
    return table_prefix(number) + _ROWS


def progress_prefix(name: str) -> bytes:
    """The beginning of the notes of how far the indexes of a table are built."""
    return _PROGRESS + name.encode() + b"\x00"


def is_entry(key: bytes) -> bool:
    """Whether a key is an entry of an index: a key of tables that is neither a row nor a
    definition."""
    if not key.startswith(RESERVED) or key < FIRST_ROW:
        return False
    at = len(RESERVED)
    at += 5 if key[at] == _WIDE else 1
    return key[at : at + 1] > _ROWS


def entries_among(keys: Sequence[bytes]) -> Iterable[bytes]:
    """The entries of indexes among keys. Rows of one table are known by their first and last."""
    if not keys:
        return ()
    least, most = min(keys), max(keys)
    if least >= FIRST_ROW and not is_entry(least):
        at = len(RESERVED)
        at += 6 if least[at] == _WIDE else 2
        if least[:at] == most[:at] and least[at - 1 : at] == _ROWS:
            return ()
    return filter(is_entry, keys)


def index_prefix(number: int, index: int) -> bytes:
    """The beginning of the entries of an index."""
    return table_prefix(number) + bytes([index])


# --------------------------------------------------------------------------------------------------
# Single values of rows: from Python to what a row stores, and back.
#
# Each function refuses a value of another type, and a value that would lose something, with
# `ValueError`: the caller knows the column, and says so in a `UsageError`. A function that goes
# back raises `OverflowError` for what Python has no value for: a damaged or forged row
# may hold that.
#
# The rule, and the same for arrays, is in `exact.py`.

EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NAIVE_EPOCH: Final = EPOCH.replace(tzinfo=None)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)
_PER_SECOND: Final = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_SINGLE: Final = struct.Struct("<f")
_DIGITS_MAX: Final = 76
DAYS: Final = (date.min.toordinal() - _EPOCH_DAY, date.max.toordinal() - _EPOCH_DAY)
"""The first and the last date of Python, in days since the epoch."""
_DAY_S: Final = 86_400
_SECONDS: Final = (DAYS[0] * _DAY_S, (DAYS[1] + 1) * _DAY_S - 1)
_LONG: Final = 1 << 63


def day_units(unit: str) -> int:
    """The units of a day."""
    return _DAY_S * _PER_SECOND[unit]


def moments(unit: str) -> tuple[int, int] | tuple[None, None]:
    """The first and the last datetime of Python in units since the epoch, of the years 1 and 9999.
    None for nanoseconds: 64 bits end before."""
    first, last = _SECONDS
    per = _PER_SECOND[unit]
    return (None, None) if unit == "ns" else (first * per, (last + 1) * per - 1)


def lengths(unit: str) -> tuple[int, int] | tuple[None, None]:
    """The shortest and the longest timedelta of Python in units. None where 64 bits end before."""
    per = _PER_SECOND[unit]
    least, most = timedelta.min // _MICROSECOND, timedelta.max // _MICROSECOND
    if most * per // 1_000_000 >= _LONG:
        return None, None
    return -(-least * per // 1_000_000), most * per // 1_000_000


def wrong(value: object, wanted: str) -> ValueError:
    """The refusal of a value of another type."""
    return ValueError(f"{value!r:.100} is not {wanted}")


def integer(bits: int, *, is_signed: bool) -> Callable[[Any], int]:
    """Integers of `bits` bits, and decimals without a fraction."""
    least = -(1 << bits - 1) if is_signed else 0
    most = (1 << bits - is_signed) - 1
    name = f"{'' if is_signed else 'u'}int{bits}"

    def stored(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool):
                raise wrong(value, "an integer")
            try:
                value = _whole(value) if isinstance(value, Decimal) else index(value)
            except TypeError:
                raise wrong(value, "an integer") from None
        if not least <= value <= most:
            raise ValueError(f"{value} does not fit {name}")
        return value  # type: ignore[no-any-return]  # checked above

    return stored


def _whole(value: Decimal) -> int:
    if not value.is_finite() or value != value.to_integral_value():
        raise wrong(value, "an integer")
    if value.adjusted() > _DIGITS_MAX:
        raise ValueError(f"{value} does not fit 64 bits")
    return int(value)


def float_of(*, single: bool) -> Callable[[Any], float]:
    """Floats and integers that the column has exactly. A double that is no float32 is refused in a
    column of float32: `numpy.float32` rounds it, in sight of the caller."""

    def stored(value: Any) -> float:
        if type(value) is not float:
            if isinstance(value, np.integer):
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
                raise wrong(value, "a float")
            try:
                found = float(value)
            except OverflowError:
                raise ValueError(f"{value:.3e} does not fit a double") from None
            if found != value and value == value:
                raise ValueError(f"{value} is no double exactly")
            value = found
        if single:
            try:
                is_same = _SINGLE.unpack(_SINGLE.pack(value))[0] == value
            except OverflowError:
                raise ValueError(f"{value} does not fit float32") from None
            if not is_same and value == value:
                raise ValueError(f"{value} is no float32 exactly: numpy.float32 rounds it")
        return value  # type: ignore[no-any-return]  # checked above

    return stored


def boolean(value: Any) -> int:
    """A boolean as a byte."""
    if value is True or value is False:
        return int(value)
    if type(value).__name__ in ("bool_", "bool"):  # numpy's
        return int(bool(value))
    raise wrong(value, "a boolean")


def text(value: Any) -> bytes:
    """A text as UTF-8."""
    if not isinstance(value, str):
        raise wrong(value, "a text")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r:.100} is no text of whole characters") from None


def text_of(stored: bytes) -> str:
    """The text of UTF-8."""
    return str(stored, "utf-8")


def binary(value: Any) -> bytes:
    """Bytes."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong(value, "bytes")
    return bytes(value)


def fixed(width: int) -> Callable[[Any], bytes]:
    """Bytes of one length."""

    def stored(value: Any) -> bytes:
        found = binary(value)
        if len(found) != width:
            raise ValueError(f"{len(found)} bytes, not {width}")
        return found

    return stored


def unique(value: Any) -> bytes:
    """A UUID as its bytes; 16 bytes pass too."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, bytes | bytearray | memoryview) and len(bytes(value)) == 16:
        return bytes(value)
    raise wrong(value, "a UUID")


def unique_of(stored: bytes) -> UUID:
    """The UUID of 16 bytes."""
    return UUID(bytes=stored)


def decimal(precision: int, scale: int, width: int) -> Callable[[Any], bytes]:
    """Decimals as Arrow's integer of `width` bytes."""
    exact = Context(prec=_DIGITS_MAX + 1, traps=[Inexact, InvalidOperation])
    unit = Decimal(1).scaleb(-scale)
    name = f"decimal({precision}, {scale})"

    def stored(value: Any) -> bytes:
        if isinstance(value, np.integer):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, Decimal | int):
            raise wrong(value, "a Decimal")
        try:
            scaled = int(Decimal(value).quantize(unit, context=exact).scaleb(scale, context=exact))
        except (Inexact, InvalidOperation, ValueError, OverflowError):
            raise ValueError(f"{value} does not fit {name} exactly") from None
        if abs(scaled) >= 10**precision:
            raise ValueError(f"{value} does not fit {name}")
        return scaled.to_bytes(width, "little", signed=True)

    return stored


def decimal_of(scale: int) -> Callable[[bytes], Decimal]:
    """The decimal of Arrow's integer."""
    wide = Context(prec=_DIGITS_MAX + 1)

    def value(stored: bytes) -> Decimal:
        number = int.from_bytes(stored, "little", signed=True)
        return Decimal(number).scaleb(-scale, context=wide)

    return value


def day(value: Any) -> int:
    """A date as days since the epoch."""
    if not isinstance(value, date) or isinstance(value, datetime):
        raise wrong(value, "a date")
    return value.toordinal() - _EPOCH_DAY


def day_of(stored: int) -> date:
    """The date of days since the epoch."""
    try:
        return date.fromordinal(stored + _EPOCH_DAY)
    except ValueError:
        raise OverflowError(f"{stored} days since 1970 are no date") from None


def instant(unit: str, *, is_aware: bool) -> Callable[[Any], int]:
    """Datetimes as a number of units since the epoch; nanoseconds take integers too."""
    kind = "an aware datetime" if is_aware else "a datetime without a zone"
    least, most = moments(unit)

    def stored(value: Any) -> int:
        if unit == "ns" and (number := _count(value)) is not None:
            return number
        try:
            fits = isinstance(value, datetime) and (value.utcoffset() is not None) is is_aware
        except ValueError:  # NaT of pandas is a datetime that has no time
            fits = False
        if not fits:
            raise wrong(value, f"{kind}, or None")
        passed = value - (EPOCH if is_aware else _NAIVE_EPOCH)
        found = _scaled(passed // _MICROSECOND, unit, rest=getattr(value, "nanosecond", 0))
        if least is not None and most is not None and not least <= found <= most:
            raise ValueError(f"{value} lies outside the years 1 to 9999 in UTC")
        return found

    return stored


def instant_of(unit: str, *, is_aware: bool) -> Callable[[int], Any] | None:
    """The datetime of a number of units since the epoch. None for nanoseconds."""
    if unit == "ns":
        return None
    epoch = EPOCH if is_aware else _NAIVE_EPOCH
    if unit == "us":
        return lambda stored: epoch + timedelta(0, 0, stored)
    micros = 1_000_000 // _PER_SECOND[unit]
    return lambda stored: epoch + timedelta(0, 0, stored * micros)


def duration(unit: str) -> Callable[[Any], int]:
    """Timedeltas as a number of units; nanoseconds take integers too."""

    def stored(value: Any) -> int:
        if unit == "ns" and (number := _count(value)) is not None:
            return number
        if not isinstance(value, timedelta):
            raise wrong(value, "a timedelta")
        return _scaled(value // _MICROSECOND, unit, rest=getattr(value, "nanoseconds", 0))

    return stored


def duration_of(unit: str) -> Callable[[int], timedelta] | None:
    """The timedelta of a number of units. None for nanoseconds."""
    if unit == "ns":
        return None
    micros = 1_000_000 // _PER_SECOND[unit]
    return lambda stored: timedelta(microseconds=stored * micros)


def time_of_day(unit: str) -> Callable[[Any], int]:
    """Times of a day as a number of units; nanoseconds take integers too."""

    def stored(value: Any) -> int:
        if unit == "ns" and (number := _count(value)) is not None:
            if 0 <= number < day_units(unit):
                return number
            raise ValueError(f"{number} ns are no time below 24:00")
        if not isinstance(value, time) or value.tzinfo is not None:
            raise wrong(value, "a time without a zone")
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return _scaled(seconds * 1_000_000 + value.microsecond, unit)

    return stored


def time_of_day_of(unit: str) -> Callable[[int], time] | None:
    """The time of a number of units since midnight. None for nanoseconds."""
    if unit == "ns":
        return None
    micros, units = 1_000_000 // _PER_SECOND[unit], day_units(unit)

    def value(stored: int) -> time:
        if not 0 <= stored < units:
            raise OverflowError(f"{stored} {unit} are no time below 24:00")
        return (_NAIVE_EPOCH + timedelta(microseconds=stored * micros)).time()

    return value


def _count(value: Any) -> int | None:
    """A number of nanoseconds that is given as an integer. None for a value that is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    if not -_LONG <= value < _LONG:
        raise ValueError(f"{value} does not fit 64 bits")
    return int(value)


def _scaled(micros: int, unit: str, *, rest: int = 0) -> int:
    """Microseconds and some nanoseconds in another unit."""
    nanos = micros * 1000 + rest
    found, lost = divmod(nanos, 1_000_000_000 // _PER_SECOND[unit])
    if lost:
        raise ValueError(f"it has more than {unit} tell")
    if not -_LONG <= found < _LONG:
        raise ValueError("it is out of range")
    return found


# --------------------------------------------------------------------------------------------------
# Types of columns: how a value lies in a row and in a key, and which Python values it takes.
#
#     Arrow type                        in a row          in a key (kvstore.codec.tuples)   Python
#     bool                              1 byte            02, 03                            bool
#     int8 ... int64, uint8 ... uint64  their bytes       10 (18 from 2^63 on)              int
#     float32, float64                  their bytes       20                                float
#     decimal128, decimal256            16, 32 bytes      28                                Decimal
#     string, large_string              bytes             40                                str
#     binary, large_binary              bytes             30                                bytes
#     fixed_size_binary(n)              n bytes           30                                bytes
#     date32                            4 bytes           50                                date
#     timestamp(us, zone)               8 bytes           60                                datetime
# other timestamps, time, duration  4 or 8 bytes      10                                see below
#     uuid                              16 bytes          70                                UUID
#     lists of each kind                see nested.py     none                              list
#     struct, map                       see nested.py     none                              dict
#
# A timestamp with a zone takes aware datetimes, one without takes naive ones. Columns that count
# nanoseconds take `Timestamp` and other integers too, and give integers, because a datetime has
# microseconds.
#
# Invariants
# 1. A value that the type cannot hold exactly is refused. `exact.py` has the rule.


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
    node: TypeNode | None = None
    """What lies in a list, a struct or a map."""

    @property
    def remedy(self) -> str:
        """What to do with a value that a column of this kind does not hold."""
        if self.node is not None:
            return "correct what lies in it, as in a column of its own; a map has each key once"
        if self.way == shapes.TEXT:
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
        if self.key_kind in (shapes.SIGNED, shapes.UNSIGNED, shapes.DOUBLE):
            return 8
        return self.width if self.key_kind in (shapes.FIXED, shapes.BOOLEAN) else 0

    @property
    def way(self) -> int:
        """The way by which the loops make a value of Python. The function `value` makes the same
        value."""
        if self.value is None:
            return shapes.STORED
        if self.value is bool:
            return shapes.TRUTH
        if self.value is text_of:
            return shapes.TEXT
        if pa.types.is_timestamp(self.type) and self.type.unit == "us":
            return shapes.LOCAL if self.type.tz is None else shapes.INSTANT
        return shapes.CALLED

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
        "use booleans, numbers, decimals, text, binary, dates, times, timestamps, UUIDs, or lists, "
        "structs and maps of these",
    )


def parse_type(text: str) -> pa.DataType:
    """The type whose `type_text` is `text`. Raises `ValueError` for another text."""
    if "<" in text and text not in _SIMPLE:
        nested = parse_nested(text, parse_type)
        if type_text(nested) == text:
            return nested
        raise ValueError(f"unknown type {text!r:.200}")
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
    key = shapes.SIGNED if is_signed or width < 8 else shapes.UNSIGNED
    stored = integer(8 * width, is_signed=is_signed)
    code = code if is_signed else code.upper()
    return Kind(type_, type_, width, code, stored, None, key, tuples.INTEGER)


def _floating(type_: pa.DataType) -> Kind:
    width = type_.bit_width // 8
    code = "f" if width == 4 else "d"
    stored = float_of(single=width == 4)
    return Kind(type_, type_, width, code, stored, None, shapes.DOUBLE, tuples.DOUBLE)


def _boolean(type_: pa.DataType) -> Kind:
    return Kind(type_, pa.uint8(), 1, "B", boolean, bool, shapes.BOOLEAN, tuples.TRUE)


def _text(type_: pa.DataType) -> Kind:
    return Kind(type_, pa.string(), 0, "", text, text_of, shapes.FRAMED, tuples.TEXT)


def _binary(type_: pa.DataType) -> Kind:
    return Kind(type_, pa.binary(), 0, "", binary, None, shapes.FRAMED, tuples.BYTES)


def _fixed(type_: pa.DataType) -> Kind:
    width = type_.byte_width
    stored = fixed(width)
    return Kind(type_, type_, width, f"{width}s", stored, None, shapes.FRAMED, tuples.BYTES)


def _unique(type_: pa.DataType) -> Kind:
    width = tuples.UUID_BYTES
    return Kind(
        type_,
        type_.storage_type,
        width,
        f"{width}s",
        unique,
        unique_of,
        shapes.FIXED,
        tuples.UNIQUE,
    )


def _decimal(type_: pa.DataType) -> Kind:
    width = type_.byte_width
    return Kind(
        type_,
        type_,
        width,
        f"{width}s",
        decimal(type_.precision, type_.scale, width),
        decimal_of(type_.scale),
        shapes.WHOLE,
        tuples.DECIMAL,
    )


def _day(type_: pa.DataType) -> Kind:
    made = day, day_of
    return Kind(type_, type_, 4, "i", *made, shapes.SIGNED, tuples.DAY, *DAYS)


def _timestamp(type_: pa.DataType) -> Kind:
    is_aware = type_.tz is not None
    tag = tuples.INSTANT if is_aware and type_.unit == "us" else tuples.INTEGER
    stored = instant(type_.unit, is_aware=is_aware)
    value = instant_of(type_.unit, is_aware=is_aware)
    bounds = moments(type_.unit)
    return Kind(type_, type_, 8, "q", stored, value, shapes.SIGNED, tag, *bounds)


def _time(type_: pa.DataType) -> Kind:
    width = type_.bit_width // 8
    stored, value = time_of_day(type_.unit), time_of_day_of(type_.unit)
    code = "i" if width == 4 else "q"
    bounds = 0, day_units(type_.unit) - 1
    return Kind(type_, type_, width, code, stored, value, shapes.SIGNED, tuples.INTEGER, *bounds)


def _duration(type_: pa.DataType) -> Kind:
    stored, value = duration(type_.unit), duration_of(type_.unit)
    bounds = lengths(type_.unit)
    return Kind(type_, type_, 8, "q", stored, value, shapes.SIGNED, tuples.INTEGER, *bounds)


def _nested(type_: pa.DataType) -> Kind:
    type_ = canonical(type_)
    require_type(type_, kind_of)
    node = node_of(type_, kind_of)
    made = stored_of(node), value_of(node)
    return Kind(type_, pa.binary(), 0, "", *made, shapes.FRAMED, b"", node=node)


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
    (is_nested, _nested),
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


# --------------------------------------------------------------------------------------------------
# The definition of a table: its columns, its key, its indexes, and the layouts of its rows.
#
# It is stored as JSON under a key of the store (`kvstore.timeline.reserved`), so it has versions as
# rows do, and comes with backups, restores and replicas.
#
#     v              1
#     number         of the table, in its keys
#     revision       1, and one more with each change
#     columns        id, name, type, is_nullable, and the stored bytes of a default, if any
#     key            id of each key column, and whether it falls (greatest first)
#     event_time     whether the last key column is the event time
#     indexes        name, number, columns as in `key`, is_unique, is_whole
#     layouts        of each schema number: id and type of each column, in the order of the row
#     layout         the schema number of rows that are written now
#     expires        the id of the column that tells when a row expires; left out if there is none
#     valid_to       the id of the column that tells until when a row is valid; left out likewise
#     ids, index_numbers    the numbers that were given to columns and indexes so far
#
# A dropped column leaves its id behind, so that a later column of the same name begins empty.
#
# Invariants
# 1. A column of the key is never null, and its type changes no byte of stored keys.
# 2. A layout never changes. Each stored row names one.

DEFINITION_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `default` is the stored form of the value that older rows get, None for null."""

    id: int
    name: str
    type: pa.DataType
    is_nullable: bool
    default: bytes | None = None

    @property
    def kind(self) -> Kind:
        """How its values are stored."""
        return kind_of(self.type)

    @property
    def field(self) -> pa.Field:
        """The column of an Arrow schema."""
        return pa.field(self.name, self.type, self.is_nullable)


@dataclass(frozen=True, slots=True)
class KeyPart:
    """A column of a key or an index. A falling one sorts the greatest value first."""

    id: int
    is_falling: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """An index. It is whole once it has an entry for each row."""

    name: str
    number: int
    parts: tuple[KeyPart, ...]
    is_unique: bool
    is_whole: bool


Layout = tuple[tuple[int, pa.DataType], ...]
"""Ids and types of the columns of a row, in the order of the row."""


@dataclass(frozen=True)
class Definition:
    """The definition of a table at one time. Compare two by `revision`."""

    name: str
    number: int
    revision: int
    columns: tuple[Column, ...]
    key: tuple[KeyPart, ...]
    has_event_time: bool
    indexes: tuple[Index, ...]
    layouts: tuple[Layout, ...]
    layout: int
    ids: int
    index_numbers: int
    expires: int | None = None
    """The id of the column of the times at which rows expire."""
    valid_to: int | None = None
    """The id of the column of the event times until which rows are valid."""

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """The columns by name."""
        return {column.name: column for column in self.columns}

    @cached_property
    def by_id(self) -> dict[int, Column]:
        """The columns by id."""
        return {column.id: column for column in self.columns}

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns as an Arrow schema."""
        return pa.schema([column.field for column in self.columns])

    @cached_property
    def key_ids(self) -> frozenset[int]:
        """The ids of the columns of the key."""
        return frozenset(part.id for part in self.key)

    @property
    def key_columns(self) -> list[Column]:
        """The columns of the key, in the order of the key."""
        return [self.by_id[part.id] for part in self.key]

    @property
    def value_columns(self) -> list[Column]:
        """The columns that a row's value holds, in the order of the schema."""
        return [column for column in self.columns if column.id not in self.key_ids]

    @property
    def expiry_column(self) -> Column | None:
        """The column of the times at which rows expire, if there is one."""
        return None if self.expires is None else self.by_id[self.expires]

    @property
    def end_column(self) -> Column | None:
        """The column of the event times until which rows are valid, if there is one."""
        return None if self.valid_to is None else self.by_id[self.valid_to]

    @property
    def where(self) -> str:
        """The table in the words of an error."""
        return f"table {self.name!r}"

    def column(self, name: object) -> Column:
        """The column `name`. Raises `NotFoundError` where there is none."""
        found = self.by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise NotFoundError(
                f"{self.where} has no column {name!r}", f"it has {', '.join(self.by_name)}"
            )
        return found

    def index(self, name: object) -> Index:
        """The index `name`. Raises `NotFoundError` where there is none."""
        for each in self.indexes:
            if each.name == name:
                return each
        named = ", ".join(index.name for index in self.indexes) or "none"
        raise NotFoundError(f"{self.where} has no index {name!r}", f"its indexes: {named}")

    def parts_named(self, parts: Sequence[KeyPart]) -> list[str]:
        """The columns of a key or an index by name."""
        return [self.by_id[part.id].name for part in parts]

    def with_layout(self) -> Definition:
        """The definition with a layout of its columns as they are now, which may be an old one."""
        layout = tuple((column.id, column.type) for column in self.value_columns)
        if layout in self.layouts:
            return replace(self, layout=self.layouts.index(layout))
        return replace(self, layouts=(*self.layouts, layout), layout=len(self.layouts))

    # -- as bytes ---------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The stored form."""
        fields = {
            "v": DEFINITION_VERSION,
            "number": self.number,
            "revision": self.revision,
            "columns": [
                {
                    "id": column.id,
                    "name": column.name,
                    "type": type_text(column.type),
                    "is_nullable": column.is_nullable,
                    "default": None if column.default is None else column.default.hex(),
                }
                for column in self.columns
            ],
            "key": _parts_as_json(self.key),
            "event_time": self.has_event_time,
            "indexes": [
                {
                    "name": index.name,
                    "number": index.number,
                    "columns": _parts_as_json(index.parts),
                    "is_unique": index.is_unique,
                    "is_whole": index.is_whole,
                }
                for index in self.indexes
            ],
            "layouts": [
                {
                    "ids": [id_ for id_, _ in layout],
                    "types": [type_text(type_) for _, type_ in layout],
                }
                for layout in self.layouts
            ],
            "layout": self.layout,
            "ids": self.ids,
            "index_numbers": self.index_numbers,
        }
        if self.expires is not None:
            fields["expires"] = self.expires
        if self.valid_to is not None:
            fields["valid_to"] = self.valid_to
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, name: str, stored: bytes) -> Definition:
        """The definition of the table `name`. Raises `CorruptionError` for another shape,
        `FormatVersionError` for another version."""
        record = read_object(stored, where=f"the definition of table {name!r}")
        version = record.field("v", int)
        if version != DEFINITION_VERSION:
            raise FormatVersionError(record.where, found=version, supported=DEFINITION_VERSION)
        found = cls(
            name=name,
            number=record.integer("number", least=1, most=TABLE_NUMBER_MAX),
            revision=record.integer("revision", least=1),
            columns=tuple(map(_column, record.objects("columns"))),
            key=tuple(_parts(record, "key")),
            has_event_time=record.field("event_time", bool),
            indexes=tuple(map(_index, record.objects("indexes"))),
            layouts=tuple(map(_layout, record.objects("layouts"))),
            layout=record.integer("layout"),
            ids=record.integer("ids"),
            index_numbers=record.integer("index_numbers", most=INDEX_NUMBER_MAX),
            expires=None if record.get("expires") is None else record.integer("expires"),
            valid_to=None if record.get("valid_to") is None else record.integer("valid_to"),
        )
        found._require_sound(record)
        return found

    def _require_sound(self, record: JsonObject) -> None:
        ids = [column.id for column in self.columns]
        if len(set(ids)) < len(ids) or len(self.by_name) < len(ids) or not self.key:
            raise record.damaged("columns come twice, or there is no key")
        parts = [*self.key, *(part for index in self.indexes for part in index.parts)]
        if not {part.id for part in parts} <= set(ids):
            raise record.damaged("a key or an index has a column that is missing")
        if any(is_nested(self.by_id[part.id].type) for part in parts):
            raise record.damaged("a key or an index has a column of lists, structs or maps")
        if self.expires is not None and (
            self.expires not in ids or not is_instant(self.by_id[self.expires].type)
        ):
            raise record.damaged("the column of the times at which rows expire is missing")
        if self.valid_to is not None and (
            self.valid_to not in ids
            or not self.has_event_time
            or self.by_id[self.valid_to].type != self.key_columns[-1].type
        ):
            raise record.damaged("the column of the times until which rows are valid is missing")
        if self.layout >= len(self.layouts):
            raise record.damaged("its layout is missing")
        types = dict(self.layouts[self.layout])
        if any(types.get(column.id) != column.type for column in self.value_columns):
            raise record.damaged("its layout does not fit its columns")


def is_instant(type_: pa.DataType) -> bool:
    """Whether values of the type are times with a zone, which a column of expiries has."""
    return bool(pa.types.is_timestamp(type_) and type_.tz is not None)


def _parts_as_json(parts: Sequence[KeyPart]) -> list[dict[str, Any]]:
    return [{"id": part.id, "is_falling": part.is_falling} for part in parts]


def _parts(record: JsonObject, name: str) -> Iterator[KeyPart]:
    for part in record.objects(name):
        yield KeyPart(part.integer("id"), part.field("is_falling", bool))


def _column(record: JsonObject) -> Column:
    default = None if record.get("default") is None else record.hexed("default")
    type_ = _type(record, record.text("type"))
    is_nullable = record.field("is_nullable", bool)
    column = Column(record.integer("id"), record.text("name"), type_, is_nullable, default)
    if default is not None and column.kind.width not in (0, len(default)):
        raise record.damaged(f"a default of {len(default)} bytes")
    return column


def _index(record: JsonObject) -> Index:
    return Index(
        record.text("name"),
        record.integer("number", least=1, most=INDEX_NUMBER_MAX),
        tuple(_parts(record, "columns")),
        record.field("is_unique", bool),
        record.field("is_whole", bool),
    )


def _layout(record: JsonObject) -> Layout:
    ids, types = record.items_of("ids", int), record.items_of("types", str)
    if len(ids) != len(types):
        raise record.damaged(f"{len(ids)} ids and {len(types)} types")
    return tuple((id_, _type(record, text)) for id_, text in zip(ids, types, strict=True))


def _type(record: JsonObject, text: str) -> pa.DataType:
    try:
        return _stored_type(text)
    except (ValueError, pa.ArrowException, UsageError) as error:
        raise CorruptionError(record.where, f"{error}") from error


@lru_cache(maxsize=1024)
def _stored_type(text: str) -> pa.DataType:
    """Kept, because each layout of a definition names the types of all its columns."""
    found = parse_type(text)
    kind_of(found)
    return found


# --------------------------------------------------------------------------------------------------
# Classes as schemas: the annotated fields of a class are the columns, and its instances the rows.
#
# A class may be a dataclass, a model of pydantic, a struct of msgspec, or a TypedDict: any class
# with annotations that is made from its fields by name. `X | None` is a column that may be null,
# `list[X]` and `dict[K, V]` are columns of lists and of maps, and `Annotated[int, pa.int32()]`
# names the Arrow type.

_TYPES: Final[Mapping[type, pa.DataType]] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us", "UTC"),
    time: pa.time64("us"),
    timedelta: pa.duration("us"),
    Decimal: pa.decimal128(38, 9),
    UUID: pa.uuid(),
}


def schema_of_class(given: type) -> pa.Schema:
    """The columns of a class, in the order of its fields. Raises `UsageError` that names a field
    without a type of columns."""
    try:
        hints = get_type_hints(given, include_extras=True)
    except (NameError, TypeError) as error:
        raise UsageError(f"{given.__name__} as a schema: {error}", "annotate its fields") from error
    fields = [
        _field(given, name, hint)
        for name, hint in hints.items()
        if not name.startswith("_") and get_origin(hint) is not ClassVar and hint is not ClassVar
    ]
    inherited = {"model_config", "model_fields", "model_computed_fields"}  # of pydantic
    fields = [field for field in fields if field.name not in inherited]
    if not fields:
        raise UsageError(f"{given.__name__} has no annotated fields", "pass a pyarrow.Schema")
    return pa.schema(fields)


def model_fields(given: type, definition: Definition) -> tuple[str, ...]:
    """The columns that instances of a class have, of a table that is there. Raises `UsageError`
    unless the table has each field as a column whose values are of its type, and `NotFoundError`
    where there is no such column."""
    names = []
    for field in schema_of_class(given):
        column = definition.column(field.name)
        if python_type(column.type) is not python_type(field.type):
            raise UsageError(
                f"{given.__name__}.{field.name} is {python_type(field.type).__name__}, and "
                f"{definition.where} has {python_type(column.type).__name__} there",
                "annotate it so",
            )
        if column.is_nullable and not field.nullable:
            raise UsageError(
                f"{given.__name__}.{field.name} is never None, and {definition.where} takes nulls",
                f"annotate it: {python_type(column.type).__name__} | None",
            )
        names.append(field.name)
    return tuple(names)


def python_type(type_: pa.DataType) -> type:
    """The class of the values of a column."""
    kind = kind_of(type_)
    if kind.value is None:
        if pa.types.is_floating(type_):
            return float
        return bytes if kind.key_kind == shapes.FRAMED else int
    return next(python for fits, python in _PYTHON if fits(type_))


_PYTHON: Final[tuple[tuple[Callable[[pa.DataType], bool], type], ...]] = (
    (pa.types.is_boolean, bool),
    (_is_text, str),
    (_is_unique, UUID),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_date32, date),
    (pa.types.is_timestamp, datetime),
    (pa.types.is_time, time),
    (pa.types.is_duration, timedelta),
    (is_list, list),
    (is_nested, dict),
)


def _field(given: type, name: str, hint: Any) -> pa.Field:
    is_nullable = False
    found = None
    if get_origin(hint) in (Required, NotRequired, ReadOnly):  # of a TypedDict
        (hint,) = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        is_nullable = len(rest) < len(get_args(hint))
        hint = rest[0] if len(rest) == 1 else hint
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        found = next((each for each in extras if isinstance(each, pa.DataType)), None)
    type_ = found
    if found is None and get_origin(hint) is list:
        type_ = pa.list_(_field(given, name, *get_args(hint)).with_name("item"))
    elif found is None and get_origin(hint) is dict:
        key, item = (_field(given, name, each) for each in get_args(hint))
        type_ = pa.map_(key.type, item.with_name("value"))
    elif found is None:
        type_ = _TYPES.get(hint) if isinstance(hint, type) else None
    if type_ is None:
        raise UsageError(
            f"{given.__name__}.{name} is {hint!r}, which is no type of columns",
            "annotate it: Annotated[X, pa.int32()]",
        )
    return pa.field(name, type_, is_nullable)


def row_of(row: Any) -> Mapping[str, Any]:
    """The columns of an instance, or the dict that it is."""
    if isinstance(row, Mapping):
        return row
    names = getattr(type(row), "__annotations__", None)
    if names is None:
        raise UsageError(f"a row is a dict, not {type(row).__name__}", "pass {column: value}")
    fields = schema_of_class(type(row)).names
    return {name: getattr(row, name) for name in fields}
