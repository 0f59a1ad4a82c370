"""Timestamps: one int64 count of nanoseconds since the epoch, on the one timeline of a store.

A `Timestamp` is an `int`, so keys, Parquet statistics, Arrow columns and Spark longs carry it
whole. It prints as ISO-8601 UTC with nine digits and parses back without loss. A `datetime`
has microseconds only: converting to one truncates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from numbers import Integral
from operator import index
from typing import Final, TypeAlias

from kvstore.errors import UsageError

NS_PER_SECOND = 1_000_000_000
TIMESTAMP_MAX = (1 << 63) - 1
"""The largest timestamp (year 2262): the sign bit stays free for Arrow and Spark longs."""
OTHER_UNITS_MAX = 253_402_300_800 * 10**6
"""A plain int above this is taken as nanoseconds. A smaller one may be seconds, milliseconds or
microseconds since 1970 by mistake: this is the end of the year 9999 in microseconds, and a day of
1978 in nanoseconds."""
NOW: Final = "now"
OLDEST: Final = "oldest"

_YEAR_LAST: Final = 2262
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?"
    r"\s*(Z|[+-]\d\d(?(2)(?::?\d\d)?|:?\d\d))",  # not 2013-01-31-05: a day, or an hour?
    re.ASCII,
)


class Timestamp(int):
    """Nanoseconds since 1970-01-01T00:00:00Z, from 0 to 2**63 - 1.

    Compare, subtract and store it as the `int` it is; arithmetic gives plain integers.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Timestamp:
        """Read ISO-8601 with a zone (`2013-01-31T23:59:59.123456789Z`); 0 to 9 fraction digits.

        Raises `UsageError` on anything else, a missing zone included: a local time would
        mean another instant on another machine.
        """
        match = _ISO.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise UsageError(
                f"{text!r} is not a timestamp", "write ISO-8601 with a zone: 2013-01-31T23:59:59Z"
            )
        day, minute, second, fraction, zone = match.groups()
        try:
            moment = datetime.fromisoformat(
                f"{day}T{minute or '00:00'}:{second or '00'}{_with_colon(zone)}"
            )
        except ValueError as error:
            raise UsageError(f"{text!r} is not a timestamp: {error}", "correct it") from error
        return cls.from_ns(_microseconds(moment) * 1000 + int((fraction or "").ljust(9, "0")))

    @classmethod
    def from_datetime(cls, moment: datetime) -> Timestamp:
        """Convert an aware `datetime`; raises `UsageError` on a naive one.

        A subclass that carries a `nanosecond` below the microsecond, such as pandas has, keeps it.
        """
        try:
            is_aware = isinstance(moment, datetime) and moment.utcoffset() is not None
        except ValueError as error:  # NaT of pandas is a datetime without any time
            raise UsageError(f"{moment!r} is no time", "pass an aware datetime") from error
        if not is_aware:
            raise UsageError(f"{moment!r} has no time zone", "pass an aware datetime")
        return cls.from_ns(_microseconds(moment) * 1000 + getattr(moment, "nanosecond", 0))

    @classmethod
    def from_ns(cls, value: int) -> Timestamp:
        """Check the range; raises `UsageError` outside 0..2**63 - 1."""
        if not 0 <= value <= TIMESTAMP_MAX:
            raise UsageError(
                f"timestamp {value} is outside 0..2**63 - 1", "pass a time from 1970 to April 2262"
            )
        return cls(value)

    def to_datetime(self) -> datetime:
        """The instant as an aware UTC `datetime`, truncated to microseconds."""
        return _EPOCH + timedelta(microseconds=self // 1000)

    def __str__(self) -> str:
        seconds, fraction = divmod(int(self), NS_PER_SECOND)
        moment = _EPOCH + timedelta(seconds=seconds)
        return f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"Timestamp({int(self)})"


TimeLike: TypeAlias = "int | datetime | timedelta | str"
"""A time as callers pass it: a Timestamp, an aware datetime, ISO-8601 text with a zone, `"now"`,
an age as text (`"-1h"`) or as a timedelta (that long ago), or nanoseconds as a plain int."""

_WANTED = 'a Timestamp, an aware datetime, ISO-8601 text, "now", "-1h" or a timedelta'
_AGE = re.compile(r"-(\d{1,18})(us|ms|s|m|h|d|w)", re.ASCII)
_AHEAD = re.compile(r"\+(\d{1,18})(us|ms|s|m|h|d|w)", re.ASCII)
_UNITS_NS: Final = {
    "us": 1_000,
    "ms": 1_000_000,
    "s": NS_PER_SECOND,
    "m": 60 * NS_PER_SECOND,
    "h": 3_600 * NS_PER_SECOND,
    "d": 86_400 * NS_PER_SECOND,
    "w": 604_800 * NS_PER_SECOND,
}
_OTHER_UNITS: Final = (("seconds", NS_PER_SECOND), ("milliseconds", 10**6), ("microseconds", 1000))
_TODAY_LEAST_S: Final = 10**9  # September 2001
_TODAY_MOST_S: Final = 253_402_300_800  # the end of 9999, which often stands for "never"


def to_timestamp(
    value: TimeLike, *, name: str = "timestamp", now: Callable[[], int] | None = None
) -> Timestamp:
    """Read what a caller gave as `name`. Raises `UsageError` on other types and out of range.

    `now` tells the time that words count from; without it a word is refused. A plain int, or one of
    numpy, is refused if it is surely no count of nanoseconds: see `is_other_unit`.
    """
    if isinstance(value, Timestamp) and 0 <= value <= TIMESTAMP_MAX:
        return value
    if isinstance(value, bool):
        raise UsageError(f"{name} must be {_WANTED}, not a bool", "convert it")
    if isinstance(value, int):
        return _of_number(value, name, now)
    if isinstance(value, datetime):
        return Timestamp.from_datetime(value)
    age = age_of(value, name)
    if age is None:
        if isinstance(value, str):
            return Timestamp.parse(value)
        number = plain_integer(value)
        if number is None:
            raise UsageError(f"{name} must be {_WANTED}, not {type(value).__name__}", "convert it")
        return _of_number(number, name, now)
    if now is None:
        raise UsageError(f"{name}={value!r} counts from now", "pass a time that stands still")
    at = now() - age
    if at < 0:
        raise UsageError(f"{name}={value!r} is before 1970", "pass a shorter age")
    return Timestamp.from_ns(at)


def to_instant(value: TimeLike, *, name: str, now: Callable[[], int]) -> Timestamp:
    """As `to_timestamp`, but refuses a word and a timedelta, which count from a now that the caller
    does not mean."""
    number = None if isinstance(value, Timestamp) else plain_integer(value)
    if number is not None:
        return _of_number(number, name, now)
    return to_timestamp(value, name=name)


def is_other_unit(value: int, now: int) -> str | None:
    """The unit, if a count of nanoseconds is surely one of another unit; else None.

    That is so if `value` names a time from 2001 to 9999 in the other unit, and a day before 1979 in
    nanoseconds, while the timeline has passed 2001. The clock of a test usually lies below it.
    """
    if now < _TODAY_LEAST_S * NS_PER_SECOND:
        return None
    for unit, size in _OTHER_UNITS:
        if _TODAY_LEAST_S <= value * size // NS_PER_SECOND < _TODAY_MOST_S:
            return unit
    return None


def is_no_due_time(due: int, now: int) -> bool:
    """Whether a time at which a loaded row is to be deleted is surely a mistake, by which the row
    would go right after the load: a number of another unit, up to the year 9999, or an instant that
    was made of one. A time from 1978 on that has passed is taken."""
    return due <= OTHER_UNITS_MAX and now >= _TODAY_LEAST_S * NS_PER_SECOND


def age_of(value: object, name: str) -> int | None:
    """The nanoseconds that a word or a timedelta counts back from now. None for other values."""
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise UsageError(f"{name}={value!r} lies ahead", "pass how long ago it is")
        return value // _MICROSECOND * 1000
    if isinstance(value, str):
        text = value.strip()
        if text == NOW:
            return 0
        if (match := _AGE.fullmatch(text)) is not None:
            return int(match[1]) * _UNITS_NS[match[2]]
    return None


def is_beyond(value: object) -> bool:
    """Whether a time that was refused lies in or behind the last year of a timeline, which ends in
    April 2262: 9999-12-31 often stands for "never"."""
    if isinstance(value, str):
        match = _ISO.fullmatch(value.strip())
        return match is not None and int(match[1][:4]) >= _YEAR_LAST
    if isinstance(value, datetime):
        return value.year >= _YEAR_LAST
    number = plain_integer(value)
    return number is not None and number > TIMESTAMP_MAX


def ahead_of(value: object) -> int | None:
    """The nanoseconds that a timedelta or a word, as `+1h`, counts ahead from now. None for other
    values."""
    if isinstance(value, timedelta):
        return value // _MICROSECOND * 1000
    match = _AHEAD.fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else int(match[1]) * _UNITS_NS[match[2]]


def plain_integer(value: object) -> int | None:
    """The integer that `value` is, also one of numpy. None for all else, and for a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    try:
        return int(index(value))
    except TypeError:  # a duration of numpy says that it is an integer
        return None


def _of_number(value: int, name: str, now: Callable[[], int] | None) -> Timestamp:
    found = Timestamp.from_ns(value)
    unit = None if now is None or value > OTHER_UNITS_MAX else is_other_unit(value, now())
    if unit is not None:
        raise UsageError(
            f"{name}={value} is {found} in nanoseconds, and looks like {unit}",
            "pass an aware datetime, or a Timestamp where 1970 is meant",
        )
    return found


def _microseconds(moment: datetime) -> int:
    """Microseconds since the epoch, exactly: an offset from UTC may have microseconds too."""
    return (moment - _EPOCH) // _MICROSECOND


def _with_colon(zone: str) -> str:
    if zone == "Z":
        return "+00:00"
    return zone if ":" in zone else f"{zone[:3]}:{zone[3:] or '00'}"
