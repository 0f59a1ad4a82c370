"""Thinning: which instants of old history stay readable, beyond the time for which all do.

    keep_within   every instant of this long is readable
    hourly=n      and the states at the last n whole hours
    daily=n       and at the last n midnights
    weekly=n      and at the last n midnights before a Monday, all of them UTC

The state at a whole hour has the commits up to it. So it is the last state of the hour before. An
instant that one run has kept is found again by the next run, until it is too old.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final, NamedTuple

from kvstore.arguments import require_age, require_count
from kvstore.errors import UsageError
from kvstore.limits import KEPT_INSTANTS_MAX
from kvstore.timestamp import NS_PER_SECOND

_HOUR: Final = 3600 * NS_PER_SECOND
_DAY: Final = 24 * _HOUR
_WEEK: Final = 7 * _DAY
_FIRST_MONDAY: Final = 4 * _DAY
"""1970-01-05: the first day of 1970 was a Thursday."""


class Thinning(NamedTuple):
    """A policy. See the module."""

    keep_within: timedelta
    hourly: int = 0
    daily: int = 0
    weekly: int = 0

    def since(self, now_ns: int) -> int:
        """The time from which every instant stays readable."""
        return max(now_ns - int(self.keep_within.total_seconds() * NS_PER_SECOND), 0)

    def instants(self, now_ns: int) -> set[int]:
        """The instants to keep."""
        return {
            *_last(now_ns, self.hourly, _HOUR, 0),
            *_last(now_ns, self.daily, _DAY, 0),
            *_last(now_ns, self.weekly, _WEEK, _FIRST_MONDAY),
        }


def thinning_of(
    keep_within: timedelta | None, *, hourly: int, daily: int, weekly: int
) -> Thinning | None:
    """The policy that a caller gave, if any. Raises `UsageError` for another argument."""
    counts = {"hourly": hourly, "daily": daily, "weekly": weekly}
    for name, count in counts.items():
        require_count(count, name=name, least=0, most=KEPT_INSTANTS_MAX)
    age = require_age(keep_within, name="keep_within")
    if age is not None:
        return Thinning(age, **counts)
    if any(counts.values()):
        raise UsageError("hourly, daily and weekly need keep_within", "pass it, or leave them out")
    return None


def _last(now_ns: int, count: int, step: int, first: int) -> Iterator[int]:
    newest = (now_ns - first) // step * step + first
    return (time for n in range(count) if (time := newest - n * step) > 0)
