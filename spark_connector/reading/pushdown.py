"""From the filters of a read to the spans of keys that it has to look at.

Spark has an interface by which it pushes the filters of a query to a Python source. Up to 4.3 it
keeps the reader of one query for the next queries of the same frame, and for the other half of a
union: they lose rows. So no reader takes filters from Spark; `read_where` passes them as an option.

Spark applies all filters again, so the spans may hold more keys than the filters, but never fewer.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kvstore.engine import FileSpan
from kvstore.limits import KEY_BYTES_MAX
from kvstore.span import Span, merge_spans, prefix_end
from spark_connector.filters import Comparison, Filters

_KEY: Final = "key"


def key_spans(filters: Filters) -> list[Span]:
    """The keys of a store that the filters leave, as disjoint spans in order."""
    return merge_spans(span for group in filters for span in _of_group(group))


def _of_group(group: Sequence[Comparison]) -> Iterator[Span]:
    whole: Span | None = Span()
    keys: set[bytes] | None = None
    for each in group:
        if each.column != _KEY or whole is None:
            continue
        if each.operator == "startswith":
            prefix = _bytes(each.value)
            if prefix is not None and len(prefix) <= KEY_BYTES_MAX:
                whole = whole.intersect(prefix, prefix_end(prefix))
            continue
        if each.operator in ("=", "in"):
            values = each.value if each.operator == "in" else [each.value]
            found = {key for value in values if (key := _bytes(value)) is not None}
            keys = found if keys is None else keys & found
            continue
        low, high = (_bytes(bound) for bound in bounds_of(each))
        if low is not None and len(low) <= KEY_BYTES_MAX:
            whole = whole.intersect(low, None)
        if whole is not None and high is not None and len(high) <= KEY_BYTES_MAX:
            whole = whole.intersect(b"", high + b"\x00")  # the least key above it
    if whole is None:
        return
    if keys is None:
        yield whole
        return
    yield from (Span.of_key(k) for k in keys if k in whole and len(k) <= KEY_BYTES_MAX)


def common(spans: Sequence[Span], within: Span) -> Iterator[Span]:
    """The parts of disjoint, sorted spans that lie within another span. Costs O(log n) and the size
    of the result."""
    first = bisect.bisect_right(spans, within.start, key=lambda span: span.start)
    for number in range(max(first - 1, 0), len(spans)):
        span = spans[number]
        if within.end is not None and span.start >= within.end:
            return
        part = span.intersect(within.start, within.end)
        if part is not None:
            yield part


def joined(spans: Iterable[Span], files: Sequence[FileSpan]) -> Iterator[Span]:
    """Disjoint, sorted spans, where two neighbours become one if a file has keys of both: reading
    the file once costs less."""
    last: Span | None = None
    for span in spans:
        if last is not None and any(f.first <= last.start and span.start <= f.last for f in files):
            last = Span(last.start, span.end)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def bounds_of(each: Comparison) -> tuple[Any, Any]:
    """The least and the greatest value of a comparison, both included. None stands for no bound."""
    if each.operator == "=":
        return each.value, each.value
    if each.operator in (">", ">="):
        return each.value, None
    if each.operator in ("<", "<="):
        return None, each.value
    if each.operator == "in" and each.value:
        if any(value != value for value in each.value):  # NaN has no place in Python's order
            return None, None
        return min(each.value), max(each.value)
    return None, None


def _bytes(value: object) -> bytes | None:
    """A key as bytes. Spark compares a binary column with text by the bytes of the text."""
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else None
