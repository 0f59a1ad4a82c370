"""Clocks: the only place that reads the time.

A store's timeline needs a clock that follows the wall clock, never goes back and never gives
one value twice. `Clock` and `ManualClock` give the wall time; `Timeline`, which a store makes
for itself, turns it into such timestamps.

Invariants
1. `Timeline.next()` is strictly above everything that it gave or was opened at.
2. Where the wall clock has not moved on, it steps by 1 ns.
"""

from __future__ import annotations

import time
from typing import Protocol

from kvstore.errors import UsageError
from kvstore.timestamp import TIMESTAMP_MAX, Timestamp


class WallClock(Protocol):
    """What a store asks of a clock: nanoseconds since the epoch. It may go back."""

    def wall_ns(self) -> int:
        """The time now, in nanoseconds since the epoch."""
        ...


class Clock:
    """The machine's real-time clock."""

    def wall_ns(self) -> int:
        """The time now, in nanoseconds since the epoch."""
        return time.time_ns()


class ManualClock:
    """A clock that moves only when told to, for tests and replays. It may be set back."""

    def __init__(self, wall_ns: int = 1_000_000_000) -> None:
        self._wall_ns = int(wall_ns)

    def wall_ns(self) -> int:
        """The time it was last set to."""
        return self._wall_ns

    def set(self, wall_ns: int) -> None:
        """Jump to `wall_ns`, forward or back."""
        self._wall_ns = int(wall_ns)

    def advance(self, ns: int) -> None:
        """Move forward by `ns` nanoseconds."""
        self._wall_ns += int(ns)


class Timeline:
    """Strictly increasing timestamps over a wall clock. The caller serialises the calls."""

    def __init__(self, clock: WallClock, *, last: int = 0) -> None:
        self._clock = clock
        self._last = last

    def now(self) -> Timestamp:
        """The current time: at or above everything given so far. Gives nothing away."""
        return Timestamp(max(self._clock.wall_ns(), self._last))

    def next(self) -> Timestamp:
        """A timestamp above all before it. Raises `UsageError` where the clock is past the last
        one there is: as a key it would read as the id of an import."""
        now, last = self._clock.wall_ns(), self._last
        timestamp = Timestamp(now if now > last else last + 1)
        if timestamp >= TIMESTAMP_MAX:
            raise UsageError(f"the clock is at {int(timestamp)}, the end of time", "correct it")
        self._last = timestamp
        return timestamp

    def rise_to(self, timestamp: int) -> None:
        """Give only timestamps above `timestamp` from now on, however far ahead of the clock."""
        self._last = max(self._last, timestamp)
