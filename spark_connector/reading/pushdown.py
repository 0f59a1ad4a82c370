"""From the filters of a query to bounds on the keys and commits that a read has to look at.

The filters are joined by AND. Each one narrows the bounds or leaves them. Spark applies all filters
again, so a bound may be wider than its filter, but never narrower.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from kvstore.limits import KEY_BYTES_MAX
from kvstore.timestamp import TIMESTAMP_MAX

_KEY: Final = ("key",)
_COMMIT: Final = ("_commit_version",)


class Bounds(NamedTuple):
    """Keys in `[start, end)`, and commits in `(since, upto]`."""

    start: bytes = b""
    end: bytes | None = None
    since: int = -1
    upto: int = TIMESTAMP_MAX


def narrowed(bounds: Bounds, each: Filter) -> Bounds:
    """`bounds` without keys and commits for which the filter `each` cannot be true."""
    column = getattr(each, "attribute", None)
    if column == _KEY:
        low, high = _range(each)
        if isinstance(low, bytes) and len(low) <= KEY_BYTES_MAX:
            bounds = bounds._replace(start=max(bounds.start, low))
        if isinstance(high, bytes) and len(high) <= KEY_BYTES_MAX:
            end = high + b"\x00"  # the least key above it
            bounds = bounds._replace(end=end if bounds.end is None else min(bounds.end, end))
    elif column == _COMMIT:
        low, high = _range(each)
        if isinstance(low, int):
            bounds = bounds._replace(since=max(bounds.since, low - 1))
        if isinstance(high, int):
            bounds = bounds._replace(upto=min(bounds.upto, high))
    return bounds


def _range(each: Filter) -> tuple[Any, Any]:
    """The least and the greatest value a filter allows, both included; None where it has none."""
    if isinstance(each, (EqualTo, EqualNullSafe)):
        return each.value, each.value
    if isinstance(each, (GreaterThan, GreaterThanOrEqual)):
        return each.value, None
    if isinstance(each, (LessThan, LessThanOrEqual)):
        return None, each.value
    if isinstance(each, In):
        values = [value for value in each.value if value is not None]
        return (min(values), max(values)) if values else (None, None)
    return None, None
