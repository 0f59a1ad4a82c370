"""Timestamps: one int64 count of nanoseconds since the epoch, on the one timeline of a store.

A `Timestamp` is an `int`, so keys, Parquet statistics, Arrow columns and Spark longs carry it
whole. It prints as ISO-8601 UTC with nine digits and parses back without loss.

Coarser clocks. `datetime`, Spark, Delta and most columns of dates count microseconds. Of one rule:

1. A time that comes in is exact, whatever wrote it: `2026-11-22T00:00:00Z` and
   `datetime(2026, 11, 22, tzinfo=utc)` are that nanosecond, and nothing after it.
2. The time of a commit that goes out in a coarser unit is rounded up to that unit, as
   `microseconds_of` does. So it names the interval that ends with it, as `(since, upto]` does: a
   read as of it has the commit, changes up to it have the commit, changes since it begin after it.
3. So the microsecond of the newest commit lies ahead of a store that ends with this commit. Reads
   take it for the end of the store: see `reached`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from numbers import Integral
from operator import index
from typing import Final, TypeAlias

from kvstore.errors import Argument, UsageError

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
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_LOCAL = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?", re.ASCII
)
_ISO = re.compile(
    _LOCAL.pattern
    + r"\s*(Z|UTC|[+-]\d\d(?(2)(?::?\d\d)?|:?\d\d))",  # not 2013-01-31-05: a day, or an hour?
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
        mean another instant on another machine. `to_timestamp` reads more forms.
        """
        return cls.from_ns(_ns_of_iso(text))

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
        ns = _microseconds(moment) * 1000 + getattr(moment, "nanosecond", 0)
        if not 0 <= ns <= TIMESTAMP_MAX:
            raise _outside(str(moment))
        return cls(ns)

    @classmethod
    def from_ns(cls, value: int) -> Timestamp:
        """Check the range; raises `UsageError` outside 0..2**63 - 1."""
        if not 0 <= value <= TIMESTAMP_MAX:
            raise _outside(f"timestamp {value}")
        return cls(value)

    def to_datetime(self) -> datetime:
        """The instant as an aware UTC `datetime`, rounded up to microseconds: a read as of it has
        the commit of this time. See the rule of coarser clocks above."""
        return _EPOCH + timedelta(microseconds=microseconds_of(self))

    def __str__(self) -> str:
        seconds, fraction = divmod(int(self), NS_PER_SECOND)
        moment = _EPOCH + timedelta(seconds=seconds)
        return f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"Timestamp({int(self)})"


def microseconds_of(timestamp: int) -> int:
    """The microseconds of a time that goes out: rounded up, so that they come back as a time that
    has the commit. Only the last microsecond of all is rounded down: nothing above it parses.

    `kvstore.mvcc.arrow.to_microseconds` does so for a column.
    """
    return min(-(-timestamp // 1000), TIMESTAMP_MAX // 1000)


def reached(time: int, newest: int) -> int:
    """`time`, or `newest` where `time` is what `newest` becomes in microseconds.

    Each check that a read is not ahead of a store, a copy or a snapshot asks it first.
    """
    return newest if time == microseconds_of(newest) * 1000 else time


AgeLike: TypeAlias = "timedelta | str"
"""A length of time as callers pass it: a timedelta that is not negative, or text such as `30d`,
`90 min` or `2 weeks`. The shell takes the same text. `kvstore.base.arguments.AGE` reads it."""

TimeLike: TypeAlias = "int | datetime | date | timedelta | str"
"""A time as callers pass it: a Timestamp, an aware datetime, a date (its midnight in UTC), a
timedelta (that long ago), nanoseconds as a plain int, or text, in the forms that `ACCEPTED` tells.
The shell, the options of Spark, the server and its page take the same text."""

ACCEPTED: Final = (
    "ISO-8601 with a zone (2026-11-22T10:00Z), a day (2026-11-22: its midnight in UTC), "
    "now, today, yesterday, an age (-1h, '2 days ago'), or nanoseconds since 1970"
)
"""The forms of a time as text."""

_WANTED: Final = (
    "an aware datetime, a date, a Timestamp, a timedelta (that long ago), or text: " + ACCEPTED
)
_UNITS_NS: Final = {
    "us": 1_000,
    "ms": 1_000_000,
    "s": NS_PER_SECOND,
    "m": 60 * NS_PER_SECOND,
    "h": 3_600 * NS_PER_SECOND,
    "d": 86_400 * NS_PER_SECOND,
    "w": 604_800 * NS_PER_SECOND,
}
_WORDS: Final = {
    "microsecond": "us",
    "millisecond": "ms",
    "second": "s",
    "minute": "m",
    "hour": "h",
    "day": "d",
    "week": "w",
}
_DAY_NS: Final = _UNITS_NS["d"]
# The letters of units are small: 5M might be months. Words may begin with a capital.
_UNIT: Final = rf"(us|ms|[smhdw]|(?i:{'|'.join(_WORDS)})s?)"
_LENGTH = re.compile(rf"(\d{{1,18}}) ?{_UNIT}", re.ASCII)
_AGE = re.compile(r"-(\d{1,18})(us|ms|[smhdw])", re.ASCII)
_AGO = re.compile(rf"(\d{{1,18}}|(?i:an?)) ?{_UNIT} (?i:ago)", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
_DIGITS_MAX: Final = 40  # a longer number is out of range as well, and cannot be told
_OTHER_UNITS: Final = (("seconds", NS_PER_SECOND), ("milliseconds", 10**6), ("microseconds", 1000))
_TODAY_LEAST_S: Final = 10**9  # September 2001
_YEAR_10000_S: Final = 253_402_300_800  # 9999 often stands for "never"


def to_timestamp(
    value: TimeLike, *, name: str = "timestamp", now: Callable[[], int] | None = None
) -> Timestamp:
    """Read what a caller gave as `name`: the one reader of times of all doors. Raises `UsageError`
    on what is no time, which tells what is one, and out of range.

    `now` tells the time that words count from; without it a word is refused. A plain int, one of
    numpy, or the digits of one, is refused if it surely counts no nanoseconds: see `is_other_unit`.
    """
    if isinstance(value, Timestamp) and 0 <= value <= TIMESTAMP_MAX:
        return value
    if isinstance(value, bool):
        raise UsageError((Argument(name), " must be a time, not a bool"), f"pass {_WANTED}")
    if isinstance(value, int):
        return _of_number(value, name, now)
    if isinstance(value, datetime):
        try:
            return Timestamp.from_datetime(value)
        except UsageError as error:
            raise _of_argument(error, name, value) from error
    if isinstance(value, date):
        return _of_text(value.isoformat(), name, now)
    if isinstance(value, timedelta) and value < timedelta(0):
        raise UsageError((Argument.of(name, value), " lies ahead"), "pass how long ago it is")
    from_now = _from_now(value)
    if from_now is not None:
        if now is None:
            raise UsageError(
                (Argument.of(name, value), " counts from now"), "pass a time that stands still"
            )
        at = from_now(now())
        if at < 0:
            raise UsageError((Argument.of(name, value), " is before 1970"), "pass a shorter age")
        return Timestamp.from_ns(at)
    if isinstance(value, str):
        return _of_text(value, name, now)
    number = plain_integer(value)
    if number is None:
        raise UsageError(
            (Argument(name), f" must be a time, not {type(value).__name__}"),
            f"pass {_WANTED}; time.time_ns() counts nanoseconds, time.time() does not",
        )
    return _of_number(number, name, now)


def _of_argument(error: UsageError, name: str, value: datetime) -> UsageError:
    """The refusal of a datetime as an argument, with the forms that it may have."""
    if error.what.endswith("since 1970"):
        return _outside(Argument.of(name, value))
    why = error.what.removeprefix(repr(value))
    return UsageError((Argument.of(name, value), why), f"pass {_WANTED}")


def _outside(named: str | Argument) -> UsageError:
    return UsageError(
        (named, " is outside 0..2**63 - 1 nanoseconds since 1970"),
        f"pass a time from 1970-01-01T00:00Z to {Timestamp(TIMESTAMP_MAX)}",
    )


def _ns_of_iso(text: object) -> int:
    """See `Timestamp.parse`; the range is not checked."""
    match = _ISO.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        is_local = isinstance(text, str) and _LOCAL.fullmatch(text.strip()) is not None
        why = ": it has no time zone" if is_local else ""
        raise UsageError(
            f"{text!r} is not a timestamp{why}", "write ISO-8601 with a zone: 2013-01-31T23:59:59Z"
        )
    day, minute, second, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(
            f"{day}T{minute or '00:00'}:{second or '00'}{_with_colon(zone)}"
        )
    except ValueError as error:
        raise UsageError(f"{text!r} is not a timestamp: {error}", "correct it") from error
    return _microseconds(moment) * 1000 + int((fraction or "").ljust(9, "0"))


def _of_text(value: str, name: str, now: Callable[[], int] | None) -> Timestamp:
    """The time that a text names without the help of a clock."""
    text = value.strip()
    if is_plain_number(text):
        return _of_number(int(text.lstrip("0")[:_DIGITS_MAX] or "0"), name, now)
    if is_oldest(text):
        raise UsageError(
            (
                Argument.of(name, value),
                ": only changes and feeds begin with the oldest",
            ),
            f"write {ACCEPTED}",
        )
    if _DAY.fullmatch(text) is not None:
        text += "Z"
    try:
        ns = _ns_of_iso(text)
    except UsageError as error:
        why = error.what.partition(" is not a timestamp")[2]
        raise UsageError(
            (Argument.of(name, value), f" is no time{why}"), f"write {ACCEPTED}"
        ) from error
    if not 0 <= ns <= TIMESTAMP_MAX:
        raise _outside(Argument.of(name, value))
    return Timestamp(ns)


def is_plain_number(value: object) -> bool:
    """Whether `to_timestamp` takes a text for a count of nanoseconds."""
    return isinstance(value, str) and _NUMBER.fullmatch(value.strip()) is not None


def is_count(value: object) -> bool:
    """Whether a time was given as a number, which may count another unit than nanoseconds. A
    `Timestamp` does not."""
    if isinstance(value, Timestamp):
        return False
    return is_plain_number(value) or plain_integer(value) is not None


def is_oldest(value: object) -> bool:
    """Whether a caller asks for the oldest time that is kept, with which a window may begin."""
    return isinstance(value, str) and value.strip().lower() == OLDEST


def counts_from_now(value: object) -> bool:
    """Whether a time is an age, or a word such as `now`: another clock may give another time."""
    return _from_now(value) is not None


def _from_now(value: object) -> Callable[[int], int] | None:
    """How to find a time, given the time now. None for a value that stands still."""
    if isinstance(value, timedelta):
        return lambda now: now - value // _MICROSECOND * 1000
    if not isinstance(value, str):
        return None
    words = " ".join(value.split())
    match = _AGE.fullmatch(words) or _AGO.fullmatch(words)
    if match is not None:
        age = _length(match)
        return lambda now: now - age
    return _CALENDAR.get(words.lower())


_CALENDAR: Final[dict[str, Callable[[int], int]]] = {
    NOW: lambda now: now,
    "today": lambda now: now - now % _DAY_NS,
    "yesterday": lambda now: now - now % _DAY_NS - _DAY_NS,
}


def _length(match: re.Match[str]) -> int:
    """The nanoseconds of a count and a unit."""
    count, unit = match[1].lower(), match[2]
    size = _UNITS_NS.get(unit) or _UNITS_NS[_WORDS[unit.lower().removesuffix("s")]]
    return (1 if count.startswith("a") else int(count)) * size


def length_of(text: str) -> int | None:
    """The nanoseconds of a length of time as text: `90s`, `30d`, `2 days`. None for other text."""
    match = _LENGTH.fullmatch(" ".join(text.split()))
    return None if match is None else _length(match)


def to_instant(value: TimeLike, *, name: str, now: Callable[[], int]) -> Timestamp:
    """As `to_timestamp`, but refuses a word and a timedelta, which count from a now that the caller
    does not mean."""
    return to_timestamp(value, name=name, now=None if counts_from_now(value) else now)


def is_other_unit(value: int, now: int) -> str | None:
    """The unit, if a count of nanoseconds is surely one of another unit; else None.

    That is so if `value` names a time from 2001 to 9999 in the other unit, and a day before 1979 in
    nanoseconds, while the timeline has passed 2001. The clock of a test usually lies below it.
    """
    if now < _TODAY_LEAST_S * NS_PER_SECOND:
        return None
    for unit, size in _OTHER_UNITS:
        if _TODAY_LEAST_S <= value * size // NS_PER_SECOND < _YEAR_10000_S:
            return unit
    return None


def is_no_due_time(due: int, now: int) -> bool:
    """Whether a time at which a loaded row is to be deleted is surely a mistake, by which the row
    would go right after the load: a number of another unit, up to the year 9999, or an instant that
    was made of one. A time from 1978 on that has passed is taken."""
    return due <= OTHER_UNITS_MAX and now >= _TODAY_LEAST_S * NS_PER_SECOND


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
    """The nanoseconds that a timedelta or a text, as `+1h` or `30d`, counts ahead from now. None
    for other values."""
    if isinstance(value, timedelta):
        return value // _MICROSECOND * 1000
    return length_of(value.strip().removeprefix("+")) if isinstance(value, str) else None


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
    if not 0 <= value <= TIMESTAMP_MAX:
        raise _outside(Argument.of(name, value))
    found = Timestamp(value)
    unit = None if now is None or value > OTHER_UNITS_MAX else is_other_unit(value, now())
    if unit is not None:
        raise UsageError(
            (Argument.of(name, value), f" is {found} in nanoseconds, and looks like {unit}"),
            "pass a day (2026-11-22), ISO-8601 with a zone, or an aware datetime",
        )
    return found


def _microseconds(moment: datetime) -> int:
    """Microseconds since the epoch, exactly: an offset from UTC may have microseconds too."""
    return (moment - _EPOCH) // _MICROSECOND


def _with_colon(zone: str) -> str:
    if zone in ("Z", "UTC"):
        return "+00:00"
    return zone if ":" in zone else f"{zone[:3]}:{zone[3:] or '00'}"
