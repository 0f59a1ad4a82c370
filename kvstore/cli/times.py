"""Times on the command line.

A command passes the text of a time or of an age on as it is: the shell takes what Python, the
server and Spark take, and gives the same errors.
"""

from __future__ import annotations

import re
from typing import Final

from kvstore.base.timestamp import Timestamp

_COUNTED: Final = re.compile(r"-\d+(us|ms|[smhdw])", re.ASCII)


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
