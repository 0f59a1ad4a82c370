"""From the filters of a query to bounds on the keys and commits that a read has to look at.

The filters are joined by AND. Each one narrows the bounds or leaves them. Spark applies all filters
again, so a bound may be wider than its filter, but never narrower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

from kvstore.engine import FileSpan
from kvstore.limits import KEY_BYTES_MAX
from kvstore.span import Span
from kvstore.timestamp import TIMESTAMP_MAX

IN_KEYS_MAX: Final = 10_000
"""Keys that are looked for one by one. More of them are in every plan, and cost a seek each."""

_KEY: Final = ("key",)
_COMMIT: Final = ("_commit_version",)


class Bounds(NamedTuple):
    """Keys in `[start, end)`, and commits in `(since, upto]`."""

    start: bytes = b""
    end: bytes | None = None
    since: int = -1
    upto: int = TIMESTAMP_MAX
    keys: frozenset[bytes] | None = None
    """The only keys that are wanted, from IN; None where any key may be."""


def narrowed(bounds: Bounds, each: Filter) -> Bounds:
    """`bounds` without keys and commits for which the filter `each` cannot be true."""
    column = getattr(each, "attribute", None)
    if column == _KEY:
        low, high = _range(each)
        if isinstance(each, In) and len(each.value) <= IN_KEYS_MAX:
            keys = frozenset(value for value in each.value if isinstance(value, bytes))
            bounds = bounds._replace(keys=keys if bounds.keys is None else bounds.keys & keys)
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


def key_spans(keys: Iterable[bytes], span: Span, files: Sequence[FileSpan]) -> list[Span]:
    """The spans in which to look for the keys that lie in `span`, in order and disjoint.

    Two neighbours share a span if a file has both: reading the file once costs less.
    """
    found: list[Span] = []
    for key in sorted(key for key in keys if key in span and len(key) <= KEY_BYTES_MAX):
        end = key + b"\x00"  # the least key above it
        if found and any(file.first <= found[-1].start and key <= file.last for file in files):
            found[-1] = Span(found[-1].start, end)
        else:
            found.append(Span(key, end))
    return found


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
