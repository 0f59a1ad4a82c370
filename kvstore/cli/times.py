"""Times and lengths of time on the command line, which `kvstore.base.timestamp` reads.

A command passes the text of a time on as it is: the shell takes what Python, the server and Spark
take, and gives the same errors.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from kvstore.base.timestamp import Timestamp, length_of
from kvstore.errors import UsageError

_COUNTED: Final = re.compile(r"-\d+(us|ms|[smhdw])", re.ASCII)


def to_duration(text: str) -> timedelta:
    """Parse a length of time such as `90s`, `12h` or `30d`. Raises `UsageError`."""
    found = length_of(text)
    if found is None:
        raise UsageError(
            f"{text!r} is not an age", "write a number and us, ms, s, m, h, d or w: 30d"
        )
    try:
        return timedelta(microseconds=found // 1000)
    except OverflowError as error:
        raise UsageError(f"{text!r} is older than time", "write a shorter age: 3650d") from error


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
