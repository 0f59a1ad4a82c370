"""Times and ages as people write them on the command line.

now  today  yesterday              today and yesterday begin at midnight in UTC
-1h  "1 hour ago"  "3 days ago"    counted back from now
+1h                                counted from now, for keys that expire
2026-11-22                         midnight in UTC
2026-11-22T10:00Z                  ISO-8601 with a zone
1700000000000000000                nanoseconds since 1970
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Final

from kvstore.clock import Clock
from kvstore.errors import UsageError
from kvstore.timestamp import NOW, OLDEST, TimeLike, Timestamp

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LONG_UNITS: Final = {"second": "s", "minute": "m", "hour": "h", "day": "d", "week": "w"}
_LONG_UNITS_TEXT: Final = "|".join(f"{unit}s?" for unit in _LONG_UNITS)
_AGO: Final = re.compile(rf"(\d+|an?) *({_LONG_UNITS_TEXT}|[smhdw]) ago")
_AHEAD: Final = re.compile(r"\+?(\d+[smhdw])")
_COUNTED: Final = re.compile(r"-\d+[smhdw]")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")


def to_time(text: str | None) -> TimeLike | None:
    """Parse a time. Other notations are left to the store. Raises `UsageError`."""
    if text is None:
        return None
    text = text.strip()
    if text.isdecimal():
        return int(text)
    words = " ".join(text.lower().split())
    if words in (NOW, OLDEST):
        return words
    if words in ("today", "yesterday"):
        return _midnight(days_ago=int(words == "yesterday"))
    if (ago := _AGO.fullmatch(words)) is not None:
        count = "1" if ago[1].startswith("a") else ago[1]
        unit = ago[2] if ago[2] in _UNITS else _LONG_UNITS[ago[2].removesuffix("s")]
        return to_duration(count + unit)
    if _DATE.fullmatch(text) is not None:
        try:
            return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
        except ValueError as error:
            raise UsageError(f"{text!r} is no date: {error}", "write it as 2026-11-22") from error
    return text


def to_duration(text: str) -> timedelta:
    """Parse an age such as `90s`, `12h` or `30d`. Raises `UsageError`."""
    match = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age", "write a number and s, m, h, d or w: 30d")
    try:
        return timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    except OverflowError as error:
        raise UsageError(f"{text!r} is older than time", "write a shorter age: 3650d") from error


def to_expiry(text: str | None) -> TimeLike | None:
    """Parse the time at which a key expires: a time, or `+1h` from now. Raises `UsageError`."""
    ahead = None if text is None else _AHEAD.fullmatch(text.strip())
    if ahead is not None:
        return to_duration(ahead[1])
    found = to_time(text)
    if isinstance(found, timedelta):
        raise UsageError(f"--expires {text} does not lie ahead", "write +1h, or a later time")
    return found


def ago(word: str) -> str:
    """`-1h` as `1h ago`, which does not look like an option. Other words stay as they are."""
    return f"{word[1:]} ago" if _COUNTED.fullmatch(word) is not None else word


def iso(timestamp: int) -> str:
    """A timestamp as all commands print it: ISO-8601 with nine digits."""
    return str(Timestamp(timestamp))


def in_words(nanoseconds: int) -> str:
    """A duration for a person, in its largest unit: `3 d`, `12 min`, `0 s`."""
    seconds = max(nanoseconds, 0) // 10**9
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _midnight(*, days_ago: int) -> datetime:
    now = datetime.fromtimestamp(Clock().wall_ns() // 10**9, timezone.utc)
    return now.replace(hour=0, minute=0, second=0) - timedelta(days=days_ago)
