"""From the filters of a query to bounds on the keys and commits that a read has to look at.

The filters are joined by AND. Each one narrows the bounds or leaves them. Spark applies all filters
again, so a bound may be wider than its filter, but never narrower.

The keys of a table begin with its first key columns. So equalities on the first columns, and a
range of the column behind them, are one span of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa
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
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.span import Span, prefix_end
from kvstore.tables import TableCodec
from kvstore.tables.definition import Column
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


def row_span(codec: TableCodec, filters: Sequence[Filter]) -> Span | None:
    """The keys of the rows for which all filters can be true. None if there are none.

    Cost and result depend on the order of the key: a filter on its second column narrows nothing
    unless the first column is equal to one value.
    """
    values: list[Any] = []
    low: Any = None
    high: Any = None
    is_falling = False
    for column, part in zip(codec.key.columns, codec.definition.key, strict=True):
        low, high = _bounds_of(codec, values, column, filters)
        is_falling = part.is_falling
        if low is None or high is None or low != high:
            break
        values.append(low)
        low = high = None
    if low is not None and high is not None and low > high:
        return None
    first, last = (high, low) if is_falling else (low, high)
    stem = codec.key.key(values)
    start = stem if first is None else codec.key.key([*values, first])
    end = prefix_end(stem if last is None else codec.key.key([*values, last]))
    return Span(start, end)


def _bounds_of(
    codec: TableCodec, values: Sequence[Any], column: Column, filters: Sequence[Filter]
) -> tuple[Any, Any]:
    """The least and the greatest value that the filters allow in a column of the key, both
    included. `values` are the values of the columns before it."""
    lows, highs = [], []
    for each in filters:
        if getattr(each, "attribute", None) == (column.name,):
            low, high = (_value(column, bound) for bound in _range(each))
            lows += [low] if _fits(codec, values, low) else []
            highs += [high] if _fits(codec, values, high) else []
    return max(lows, default=None), min(highs, default=None)


def _fits(codec: TableCodec, values: Sequence[Any], value: Any) -> bool:
    """Whether the key of the table can hold a bound. Another bound is left to Spark."""
    if value is None or value != value:  # NaN has no place in Python's order
        return False
    try:
        return len(codec.key.key([*values, value])) <= KEY_BYTES_MAX
    except UsageError:
        return False


def _value(column: Column, value: Any) -> Any:
    """A value of Spark as the table has it."""
    if isinstance(column.type, pa.UuidType) and isinstance(value, bytes) and len(value) == 16:
        return UUID(bytes=value)
    if pa.types.is_integer(column.type) and isinstance(value, Decimal):
        return int(value) if value == int(value) else None
    return value
