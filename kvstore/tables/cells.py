"""Single values of rows: from Python to what a row stores, and back.

Each function refuses a value of another type, and a value that would lose something, with
`ValueError`: the caller knows the column, and says so in a `UsageError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from operator import index
from typing import Any, Final
from uuid import UUID

EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NAIVE_EPOCH: Final = EPOCH.replace(tzinfo=None)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)
_PER_SECOND: Final = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_SINGLE: Final = struct.Struct("<f")
_DIGITS_MAX: Final = 76


def wrong(value: object, wanted: str) -> ValueError:
    """The refusal of a value of another type."""
    return ValueError(f"{value!r:.100} is not {wanted}")


def integer(bits: int, *, is_signed: bool) -> Callable[[Any], int]:
    """Integers of `bits` bits."""
    least = -(1 << bits - 1) if is_signed else 0
    most = (1 << bits - is_signed) - 1
    name = f"{'' if is_signed else 'u'}int{bits}"

    def stored(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool):
                raise wrong(value, "an integer")
            try:
                value = index(value)
            except TypeError:
                raise wrong(value, "an integer") from None
        if not least <= value <= most:
            raise ValueError(f"{value} does not fit {name}")
        return value  # type: ignore[no-any-return]  # checked above

    return stored


def float_of(*, single: bool) -> Callable[[Any], float]:
    """Floats; integers that a double holds exactly pass too."""

    def stored(value: Any) -> float:
        if type(value) is not float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise wrong(value, "a float")
            if float(value) != value and value == value:
                raise ValueError(f"{value} is no double exactly")
            value = float(value)
        if single:
            try:
                _SINGLE.pack(value)
            except OverflowError:
                raise ValueError(f"{value} does not fit float32") from None
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
    """A UUID as its bytes."""
    if not isinstance(value, UUID):
        raise wrong(value, "a UUID")
    return value.bytes


def unique_of(stored: bytes) -> UUID:
    """The UUID of 16 bytes."""
    return UUID(bytes=stored)


def decimal(precision: int, scale: int, width: int) -> Callable[[Any], bytes]:
    """Decimals as Arrow's integer of `width` bytes."""
    exact = Context(prec=_DIGITS_MAX + 1, traps=[Inexact, InvalidOperation])
    unit = Decimal(1).scaleb(-scale)
    name = f"decimal({precision}, {scale})"

    def stored(value: Any) -> bytes:
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
    return date.fromordinal(stored + _EPOCH_DAY)


def instant(unit: str, *, is_aware: bool) -> Callable[[Any], int]:
    """Datetimes as a number of units since the epoch; nanoseconds take integers too."""
    kind = "an aware datetime" if is_aware else "a datetime without a zone"

    def stored(value: Any) -> int:
        if unit == "ns" and isinstance(value, int) and not isinstance(value, bool):
            if -(1 << 63) <= value < 1 << 63:
                return int(value)
            raise ValueError(f"{value} does not fit 64 bits")
        if not isinstance(value, datetime) or (value.utcoffset() is not None) is not is_aware:
            raise wrong(value, kind)
        passed = value - (EPOCH if is_aware else _NAIVE_EPOCH)
        return _scaled(passed // _MICROSECOND, unit, rest=getattr(value, "nanosecond", 0))

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
        if unit == "ns" and type(value) is int and -(1 << 63) <= value < 1 << 63:
            return value
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
        if unit == "ns" and type(value) is int and 0 <= value < 86_400 * 10**9:
            return value
        if not isinstance(value, time) or value.tzinfo is not None:
            raise wrong(value, "a time without a zone")
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return _scaled(seconds * 1_000_000 + value.microsecond, unit)

    return stored


def time_of_day_of(unit: str) -> Callable[[int], time] | None:
    """The time of a number of units since midnight. None for nanoseconds."""
    if unit == "ns":
        return None
    micros = 1_000_000 // _PER_SECOND[unit]
    return lambda stored: (_NAIVE_EPOCH + timedelta(microseconds=stored * micros)).time()


def _scaled(micros: int, unit: str, *, rest: int = 0) -> int:
    """Microseconds and some nanoseconds in another unit."""
    nanos = micros * 1000 + rest
    found, lost = divmod(nanos, 1_000_000_000 // _PER_SECOND[unit])
    if lost:
        raise ValueError(f"it has more than {unit} tell")
    if not -(1 << 63) <= found < 1 << 63:
        raise ValueError("it is out of range")
    return found
