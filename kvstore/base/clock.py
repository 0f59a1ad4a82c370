"""Clocks: the only place that reads the time.

A store's timeline needs a clock that follows the wall clock, never goes back and never gives
one value twice. `Clock` and `ManualClock` give the wall time; `Timeline`, which a store makes
for itself, turns it into such timestamps. `Durations` counts how long something took.

Invariants
1. `Timeline.next()` is strictly above the time of opening and all timestamps that it gave.
2. If the wall clock has not moved on, the next timestamp is 1 ns higher.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Protocol

from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.errors import UsageError


class WallClock(Protocol):
    """A clock as a store needs it: nanoseconds since the epoch. It may go back."""

    def wall_ns(self) -> int:
        """The time now, in nanoseconds since the epoch."""
        ...


class Clock:
    """The machine's real-time clock."""

    wall_ns = staticmethod(time.time_ns)
    """The time now, in nanoseconds since the epoch."""


class ManualClock:
    """A clock that moves only when told to, for tests and replays. It may be set back."""

    def __init__(self, wall_ns: int = 1_000_000_000) -> None:
        self._wall_ns = _whole(wall_ns, "wall_ns")

    def wall_ns(self) -> int:
        """The time to which it was last set."""
        return self._wall_ns

    def set(self, wall_ns: int) -> None:
        """Jump to `wall_ns`, forward or back."""
        self._wall_ns = _whole(wall_ns, "wall_ns")

    def advance(self, ns: int) -> None:
        """Move forward by `ns` nanoseconds."""
        self._wall_ns += _whole(ns, "ns")


def _whole(ns: int, name: str) -> int:
    try:
        return int(ns)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name}={ns!r}", "pass a number of nanoseconds") from error


class Timeline:
    """Strictly increasing timestamps over a wall clock. The caller serialises the calls."""

    def __init__(self, clock: WallClock, *, last: int = 0) -> None:
        self._clock = clock
        self._last = last

    def now(self) -> Timestamp:
        """The current time, at or above all timestamps given so far. It reserves no timestamp.
        Needs no lock."""
        return Timestamp(max(self._clock.wall_ns(), self._last))

    def has_passed(self, time: int) -> bool:
        """Whether the next timestamp will be at `time` or above. Needs no lock."""
        return self._last >= time or self._clock.wall_ns() >= time

    def next(self) -> Timestamp:
        """A timestamp above all earlier ones. Raises `UsageError` if the clock is past the last
        possible timestamp: a later one would read as the id of an import in a key."""
        now, last = self._clock.wall_ns(), self._last
        timestamp = Timestamp(now if now > last else last + 1)
        if timestamp >= TIMESTAMP_MAX:
            raise UsageError(f"the clock is at {int(timestamp)}, the end of time", "correct it")
        self._last = timestamp
        return timestamp

    def rise_to(self, timestamp: int) -> None:
        """Give only timestamps above `timestamp` from now on, however far ahead it is."""
        self._last = max(self._last, timestamp)


class Durations:
    """A histogram of durations in seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The number of durations in each bucket. The last bucket has the durations above all
        bounds."""
        self.total = 0.0

    def note(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
