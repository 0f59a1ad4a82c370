"""Timestamps: one int64 count of nanoseconds since the epoch, on the one timeline of a store.

A `Timestamp` is an `int`, so keys, Parquet statistics, Arrow columns and Spark longs carry it
whole. It prints as ISO-8601 UTC with nine digits and parses back without loss. A `datetime`
has microseconds only: converting to one truncates.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import TypeAlias

from kvstore.errors import UsageError

NS_PER_SECOND = 1_000_000_000
TIMESTAMP_MAX = (1 << 63) - 1
"""The largest timestamp (year 2262): the sign bit stays free for Arrow and Spark longs."""

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
            raise UsageError(f"{text!r} is not a timestamp: {error}") from error
        return cls.from_ns(_microseconds(moment) * 1000 + int((fraction or "").ljust(9, "0")))

    @classmethod
    def from_datetime(cls, moment: datetime) -> Timestamp:
        """Convert an aware `datetime`; raises `UsageError` on a naive one.

        A subclass that carries a `nanosecond` below the microsecond, such as pandas has, keeps it.
        """
        if not isinstance(moment, datetime) or moment.utcoffset() is None:
            raise UsageError(f"{moment!r} has no time zone", "pass an aware datetime")
        return cls.from_ns(_microseconds(moment) * 1000 + getattr(moment, "nanosecond", 0))

    @classmethod
    def from_ns(cls, value: int) -> Timestamp:
        """Check the range; raises `UsageError` outside 0..2**63 - 1."""
        if not 0 <= value <= TIMESTAMP_MAX:
            raise UsageError(f"timestamp {value} is outside 0..2**63 - 1")
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


TimeLike: TypeAlias = "int | datetime | str"
"""A time as callers pass it: a Timestamp (or int), an aware datetime, or ISO-8601 text."""


def to_timestamp(value: TimeLike, *, name: str = "timestamp") -> Timestamp:
    """Read what a caller gave as `name`. Raises `UsageError` on other types and out of range."""
    if isinstance(value, Timestamp) and 0 <= value <= TIMESTAMP_MAX:
        return value
    if isinstance(value, bool):
        raise UsageError(f"{name} must be a Timestamp, an aware datetime or ISO-8601, not a bool")
    if isinstance(value, int):
        return Timestamp.from_ns(value)
    if isinstance(value, datetime):
        return Timestamp.from_datetime(value)
    if isinstance(value, str):
        return Timestamp.parse(value)
    raise UsageError(
        f"{name} must be a Timestamp, an aware datetime or ISO-8601, not {type(value).__name__}"
    )


def _microseconds(moment: datetime) -> int:
    """Microseconds since the epoch, exactly: an offset from UTC may have microseconds too."""
    return (moment - _EPOCH) // _MICROSECOND


def _with_colon(zone: str) -> str:
    if zone == "Z":
        return "+00:00"
    return zone if ":" in zone else f"{zone[:3]}:{zone[3:] or '00'}"
