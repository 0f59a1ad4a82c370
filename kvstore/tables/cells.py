"""Single values of rows: from Python to what a row stores, and back.

Each function refuses a value of another type, and a value that would lose something, with
`ValueError`: the caller knows the column, and says so in a `UsageError`. A function that goes back
raises `OverflowError` for what Python has no value for: rows of older releases may hold that.

The rule, and the same for arrays, is in `exact.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from operator import index
from typing import Any, Final
from uuid import UUID

import numpy as np

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
