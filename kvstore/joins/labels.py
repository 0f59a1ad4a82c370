"""Labels: keys, each with the time as of which it is read.

Invariants
1. No label is answered at or above `upper`: commits at its time may still come.
2. No label is answered where history is gone, be it below `since` or under a clear.
3. An error names the first label that cannot be answered, by row and key.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError, printable
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.timestamp import OTHER_UNITS_MAX, TimeLike, Timestamp, microseconds_of

Numbers: TypeAlias = npt.NDArray[np.int64]


class Labels(NamedTuple):
    """Keys and times, in the order of the caller. `first` is the row of the first one."""

    keys: Sequence[bytes]
    times: Numbers
    first: int = 0

    def named(self, at: int) -> str:
        """A label in the words of an error."""
        return f"row {self.first + at}, key {printable(self.keys[at])}"


def times_given(as_of: Sequence[TimeLike], count: int) -> list[TimeLike]:
    """The times that a caller gave for `count` keys, not yet parsed. Raises `UsageError` for
    another number of them, and for an array of numpy's datetimes."""
    kind = getattr(getattr(as_of, "dtype", None), "kind", "O")
    if kind == "M":
        raise UsageError("as_of has numpy's datetimes, which have no time zone", "pass Timestamps")
    given = list(as_of)
    if len(given) != count:
        raise UsageError(f"{count} keys and {len(given)} times", "pass a time for each key")
    return given


def times_of(parts: Parts, as_of: Sequence[TimeLike], count: int) -> Numbers:
    """The times that a caller gave for `count` keys, in the forms that a single time may have.
    Raises `UsageError` as `times_given`, and for a value that is no time."""
    given = times_given(as_of, count)
    if {int, Timestamp}.issuperset(map(type, given)):
        with suppress(OverflowError):
            times = np.frombuffer(array("q", cast("list[int]", given)), np.int64)
            if not count or times.min() > OTHER_UNITS_MAX:
                return times
    checked = [parts.committer.to_time(time, name="as_of") for time in given]
    return np.frombuffer(array("q", checked), np.int64)


def reached_times(times: Numbers, newest: int) -> Numbers:
    """As `kvstore.timestamp.reached`, for a column of times."""
    is_newest = times == microseconds_of(newest) * 1000
    return np.where(is_newest, newest, times) if is_newest.any() else times


def require_complete(parts: Parts, labels: Labels) -> Labels:
    """The labels, if all of them can be answered. Raises `NotYetWrittenError` for the first label
    at or above `upper`. An idle store closes the time until now, as `Committer.readable` does."""
    committer = parts.committer
    committer.health.require()
    if not len(labels.times) or int(labels.times.max()) < committer.upper:
        return labels
    with suppress(NotYetWrittenError):  # the error below names the label
        committer.readable(int(labels.times.max()))
    upper = committer.upper
    labels = labels._replace(times=reached_times(labels.times, upper - 1))
    late = np.flatnonzero(labels.times >= upper)
    if len(late):
        first = int(late[0])
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[first]),
            upper=upper,
            remedy=f"{labels.named(first)}, asks for it: give a time below {upper}, or wait",
        )
    return labels


def gone(parts: Parts, labels: Labels) -> npt.NDArray[np.bool_] | None:
    """Which labels ask for history that is not kept, None if none does. O(labels below the newest
    clear * clears)."""
    times, clears = labels.times, parts.clears
    if not len(times) or int(times.min()) >= max(parts.committer.since, clears.newest):
        return None
    lost = times < parts.committer.since
    for at in np.flatnonzero((times < clears.newest) & ~lost).tolist():
        lost[at] = clears.hit(Span.of_key(labels.keys[at]), int(times[at])) is not None
    return lost if lost.any() else None


def require_kept(parts: Parts, labels: Labels) -> None:
    """Raise `HistoryGoneError` for the first label whose history is gone."""
    lost = gone(parts, labels)
    if lost is not None:
        first = int(np.argmax(lost))
        require_span_kept(parts, labels, first, Span.of_key(labels.keys[first]))


def require_span_kept(parts: Parts, labels: Labels, first: int, span: Span) -> None:
    """Raise `HistoryGoneError`, naming the label `first`, unless all of `span` can be read at its
    time."""
    try:
        parts.reads.require_kept(span, int(labels.times[first]))
    except HistoryGoneError as error:
        raise HistoryGoneError(
            as_of=error.as_of,
            since=error.since,
            span=error.span,
            remedy=f"{labels.named(first)}, asks for it: {error.remedy}",
        ) from None
