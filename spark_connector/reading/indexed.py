"""From the filters of a read to spans of a table's rows, by its key or by its indexes.

A group of filters that narrows the key is a few spans of keys. Otherwise the driver reads the
entries that the filters leave in an index, as of the time of the read, and the tasks read their
rows alone. An entry is a hint: Spark applies all filters to the rows, so an entry that was left
behind shows no row.

Invariants
1. The spans have every row for which the filters hold. An index that is not whole is not used.
2. A read takes at most `ROWS_MAX` rows from indexes. A group with more rows reads the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.span import Span, merge_spans
from kvstore.tables import TableCodec
from spark_connector.filters import VALUES_MAX, Comparison, Filters
from spark_connector.origins.origin import Origin
from spark_connector.reading.row_filters import group_spans

ROWS_MAX: Final = VALUES_MAX
"""Rows that a read finds by indexes. Their keys are in the plan of the query, and each costs a
seek."""


def row_spans(origin: Origin | None, codec: TableCodec, filters: Filters, as_of: int) -> list[Span]:
    """The keys of the rows that the filters leave at a time, as disjoint spans in order.

    Without an origin no index is read. Costs a pass over the entries that the filters leave in an
    index, where they narrow no key.
    """
    found: list[Span] = []
    room = ROWS_MAX
    for group in filters:
        spans = group_spans(codec.key, group)
        if spans == [Span.of_prefix(codec.key.prefix)]:
            by_index = None
            if origin is not None:
                by_index = _by_index(origin, codec, group, as_of, room)
            if by_index is None:
                return spans
            room -= len(by_index)
            spans = [Span.of_key(key) for key in by_index]
        found += spans
    return merge_spans(found)


def _by_index(
    origin: Origin, codec: TableCodec, group: Sequence[Comparison], as_of: int, room: int
) -> list[bytes] | None:
    """The keys of the rows that a group of filters leaves in some index. None if no index has at
    most `room` such rows."""
    for index in codec.definition.indexes:
        spans = group_spans(codec.index_codec(index), group)
        if index.is_whole and spans != [Span.of_prefix(codec.index_codec(index).prefix)]:
            entries = _entries(origin, spans, as_of, room)
            if entries is not None:
                return codec.row_keys(index, entries)
    return None


def _entries(origin: Origin, spans: Sequence[Span], as_of: int, room: int) -> list[bytes] | None:
    """The entries in `spans` at a time. None if there are more than `room`."""
    entries: list[bytes] = []
    for span in spans:
        for batch in origin.state(span, as_of, ["key"], ROWS_MAX):
            entries += batch.column("key").to_pylist()
            if len(entries) > room:
                return None
    return entries
