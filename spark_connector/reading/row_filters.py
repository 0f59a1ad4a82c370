"""From the filters of a read to the keys of a table, or of an index, that can be in its result.

The keys of a table begin with its first key columns, and the entries of an index with the columns
of the index. So equalities and IN on the first columns, and a range or the beginning of a text in
the column behind them, are spans of keys.

Spark applies all filters again, so the spans may hold more keys than the filters, but never fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from bulk.tables.outside import is_binary
from kvstore.codec.ordered import TERMINATOR
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.span import Span, merge_spans, prefix_end
from kvstore.tables.definition import Column
from kvstore.tables.keys import KeyCodec
from spark_connector.filters import VALUES_MAX, Comparison
from spark_connector.reading.pushdown import bounds_of


def group_spans(keys: KeyCodec, group: Sequence[Comparison]) -> list[Span]:
    """The keys that one group of filters leaves, of the rows of a table or of the entries of an
    index, as disjoint spans in order.

    Cost and result depend on the order of the columns: a filter on the second column narrows
    nothing unless the first column is equal to one value, or to one of a list.
    """
    return merge_spans(_of_group(keys, group))


def _of_group(keys: KeyCodec, group: Sequence[Comparison]) -> Iterator[Span]:
    stems: list[list[Any]] = [[]]
    for column in keys.columns:
        values = _values(keys, stems[0], column, group)
        if values is None or len(stems) * len(values) > VALUES_MAX:
            break
        stems = [[*stem, value] for stem in stems for value in values]
        if not stems:
            return
    for stem in stems:
        yield from _behind(keys, stem, group)


def _behind(keys: KeyCodec, stem: list[Any], group: Sequence[Comparison]) -> Iterator[Span]:
    """The keys that begin with the values of `stem`, as far as the filters leave any."""
    key = keys.key(stem)
    if len(key) > KEY_BYTES_MAX:  # no row has such a key
        return
    span: Span | None = Span(key, prefix_end(key))
    if len(stem) < len(keys.columns):
        column = keys.columns[len(stem)]
        low, high = _bounds(keys, stem, column, group)
        if low is not None and high is not None and low > high:
            return
        is_falling = keys.parts[len(stem)].is_falling
        first, last = (high, low) if is_falling else (low, high)
        start = key if first is None else keys.key([*stem, first])
        end = prefix_end(key if last is None else keys.key([*stem, last]))
        span = Span(start, end)
        for text in _beginnings(keys, stem, column, group):
            span = None if span is None else span.intersect(text, prefix_end(text))
    if span is not None:
        yield span


def _values(
    keys: KeyCodec, stem: Sequence[Any], column: Column, group: Sequence[Comparison]
) -> list[Any] | None:
    """The values that the filters leave in a column of the key. None if they leave a range."""
    low, high = _bounds(keys, stem, column, group)
    found: set[Any] | None = {low} if low is not None and low == high else None
    for each in _on(column, group):
        if each.operator not in ("=", "in"):
            continue
        given = each.value if each.operator == "in" else [each.value]
        values = {_value(column, value) for value in given}
        if all(_fits(keys, stem, value) for value in values):
            found = values if found is None else found & values
    if found is None:
        return None
    return [
        value
        for value in found
        if (low is None or low <= value) and (high is None or value <= high)
    ]


def _bounds(
    keys: KeyCodec, stem: Sequence[Any], column: Column, group: Sequence[Comparison]
) -> tuple[Any, Any]:
    """The least and the greatest value that the filters allow in a column of the key, both
    included. `stem` has the values of the columns before it."""
    lows, highs = [], []
    for each in _on(column, group):
        low, high = (_value(column, bound) for bound in bounds_of(each))
        lows += [low] if _fits(keys, stem, low) else []
        highs += [high] if _fits(keys, stem, high) else []
    return max(lows, default=None), min(highs, default=None)


def _beginnings(
    keys: KeyCodec, stem: Sequence[Any], column: Column, group: Sequence[Comparison]
) -> Iterator[bytes]:
    """The keys of all rows whose text in a column begins as a filter says begin with these."""
    for each in _on(column, group):
        if each.operator == "startswith" and _is_text(column.type, each.value):
            key = keys.key([*stem, each.value])
            if len(key) <= KEY_BYTES_MAX:
                yield key[: -len(TERMINATOR)]  # a longer text has other bytes there


def _on(column: Column, group: Sequence[Comparison]) -> Iterator[Comparison]:
    return (each for each in group if each.column == column.name)


def _fits(keys: KeyCodec, stem: Sequence[Any], value: Any) -> bool:
    """Whether the key of the table can hold a bound. Another bound is left to Spark."""
    if value is None or value != value:  # NaN has no place in Python's order
        return False
    try:
        return len(keys.key([*stem, value])) <= KEY_BYTES_MAX
    except (UsageError, OverflowError):
        return False


def _is_text(kind: pa.DataType, value: object) -> bool:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return isinstance(value, str) and bool(is_text)


def _value(column: Column, value: Any) -> Any:
    """A value as the key of the table has it. None if Spark compares it in another type: with a
    number that is text, say, or a time without a zone, which is of the session's zone there."""
    kind, given = column.type, type(value)
    if isinstance(kind, pa.UuidType):
        is_bytes = given is bytes and len(value) == 16
        return UUID(bytes=value) if is_bytes else value if given is UUID else None
    if pa.types.is_integer(kind) and given is Decimal:
        return int(value) if value == int(value) else None
    if pa.types.is_timestamp(kind):
        is_exact = kind.tz is not None and kind.unit != "ns"  # nanoseconds are integers in Spark
        return value if is_exact and given is datetime and value.tzinfo is not None else None
    return value if any(fits(kind) and given in types for fits, types in _COMPARED) else None


_COMPARED: Final[Sequence[tuple[Callable[[pa.DataType], bool], tuple[type, ...]]]] = (
    (pa.types.is_integer, (int,)),
    (pa.types.is_floating, (float, int)),
    (pa.types.is_decimal, (Decimal, int)),
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_date32, (date,)),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), (str,)),
    (is_binary, (bytes,)),
)
"""Types of keys, and the types of Python's values that Spark compares them with as they are."""
