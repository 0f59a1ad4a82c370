"""Bounded looks at the rows of a table, for people: rows that meet conditions, in the order of the
key or of an index, and what their columns hold.

    search   := conditions, an index or the key, rising or falling
    page     := the first rows that meet the conditions, and where the next page begins

A condition on the leading columns of the order narrows the keys, or the entries of the index, that
are read. Each row that is read is compared with all conditions, so narrowing decides nothing.

Invariants
1. A look passes `BROWSE_ENTRIES_MAX` entries and `BROWSE_BYTES_MAX` bytes, and one piece more.
2. Each page takes its reader further, or it is the last one.
3. A row that cannot be read meets no condition, and is on the pages without conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.span import Span, prefix_end
from kvstore.codec.keys import KEY_BYTES_LEAST, TERMINATOR, unescape
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import (
    BROWSE_BYTES_MAX,
    BROWSE_ENTRIES_MAX,
    BROWSE_FACET_COLUMNS_MAX,
    BROWSE_FACET_DISTINCT_MAX,
    BROWSE_FACET_VALUES,
    BROWSE_ROWS_CHUNK,
)
from kvstore.loops.live import LiveRows
from kvstore.mvcc import Versions
from kvstore.mvcc.arrow import binary_array
from kvstore.tables.definition import Column, Definition, Index
from kvstore.tables.indexes import whole_index
from kvstore.tables.nested import is_nested
from kvstore.tables.row_codec import KeyCodec, TableCodec

# --------------------------------------------------------------------------------------------------
# Conditions on columns.

Operator: TypeAlias = Literal[
    "=", "!=", "<", "<=", ">", ">=", "begins with", "contains", "is null", "is not null"
]
OPERATORS: Final[tuple[Operator, ...]] = (
    *("=", "!=", "<", "<=", ">", ">="),
    *("begins with", "contains", "is null", "is not null"),
)
UNARY: Final = frozenset({"is null", "is not null"})
"""The operators that take no value."""

_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_TURNED: Final[dict[Operator, Operator]] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_BOUNDS: Final = frozenset(_TURNED)


class Condition(NamedTuple):
    """A condition on one column. `value` is a value of the column; None for `UNARY` operators. A
    null meets `is null` alone."""

    column: str
    operator: Operator
    value: Any = None


@dataclass(frozen=True, slots=True)
class RowSearch:
    """The rows that meet all conditions, in the order of an index, or of the key without one."""

    conditions: Sequence[Condition] = ()
    index: str | None = None
    is_falling: bool = False


def best_index(codec: TableCodec, conditions: Sequence[Condition]) -> str | None:
    """The whole index whose columns the conditions narrow most; None if the key does as well."""
    definition = codec.definition
    orders = [(None, codec.key), *_indexes(codec)]
    found = max(orders, key=lambda order: _narrows(definition, order[1], conditions))
    return found[0]


def _indexes(codec: TableCodec) -> Iterator[tuple[str, KeyCodec]]:
    for index in codec.definition.indexes:
        if index.is_whole:
            yield index.name, codec.index_codec(index)


def _narrows(definition: Definition, order: KeyCodec, conditions: Sequence[Condition]) -> float:
    """How many leading columns of an order the conditions narrow; a bound counts half."""
    found = 0.0
    for column in order.columns:
        of_column = [each for each in conditions if each.column == column.name]
        if any(_is_point(each) for each in of_column):
            found += 1
            continue
        if any(each.operator in _BOUNDS or each.operator == "begins with" for each in of_column):
            found += 0.5
        break
    return found


def _is_point(condition: Condition) -> bool:
    """Whether one element of a key meets the condition."""
    if condition.operator == "is null":
        return True
    return condition.operator == "=" and not _is_zero(condition.value)


def _is_zero(value: Any) -> bool:
    """Whether a value is a float that equals another one with another key: 0.0 and -0.0."""
    return isinstance(value, float) and value == 0


def narrowed(order: KeyCodec, conditions: Sequence[Condition]) -> Span | None:
    """The keys of an order among which all rows lie that meet the conditions. None if there is
    none."""
    values: list[Any] = []
    span: Span | None = Span.of_prefix(order.prefix)
    for column, part in zip(order.columns, order.parts, strict=True):
        of_column = [each for each in conditions if each.column == column.name]
        point = next(filter(_is_point, of_column), None)
        with suppress(UsageError):  # a value that no key has: the rows are compared all the same
            if point is not None:
                values.append(point.value)
                span = Span.of_prefix(order.key(values))
                continue
            for each in of_column:
                span = span and _bounded(order, values, each, span, is_falling=part.is_falling)
        break
    return span


def _bounded(
    order: KeyCodec, values: list[Any], condition: Condition, span: Span, *, is_falling: bool
) -> Span | None:
    operator, value = condition.operator, condition.value
    if operator == "begins with":
        stem = order.key([*values, value])
        if is_falling or not stem.endswith(TERMINATOR):
            return span
        stem = stem[: -len(TERMINATOR)]
        return span.intersect(stem, prefix_end(stem))
    if operator not in _BOUNDS or _is_zero(value):
        return span
    key = order.key([*values, value])
    if is_falling:
        operator = _TURNED[operator]
    if operator == ">=":
        return span.intersect(key, None)
    if operator == "<":
        return span.intersect(b"", key)
    end = prefix_end(key)
    if operator == "<=":
        return span.intersect(b"", end)
    return None if end is None else span.intersect(end, None)


def require_condition(definition: Definition, condition: Condition) -> None:
    """Raise `UsageError` for an operator that the column cannot be asked, `NotFoundError` for a
    column that is not there."""
    column = definition.column(condition.column)
    if is_nested(column.type) and condition.operator not in ("is null", "is not null"):
        raise UsageError(
            f"{condition.operator!r} of column {column.name!r}, which is {column.type}",
            "use is null or is not null",
        )
    if condition.operator in ("begins with", "contains") and not _has_parts(column.type):
        raise UsageError(
            f"{condition.operator!r} of column {column.name!r}, which is {column.type}",
            "choose a column of texts or bytes",
        )
    if condition.operator in _BOUNDS and not _is_ordered(column.type):
        raise UsageError(
            f"{condition.operator!r} of column {column.name!r}, which is {column.type}",
            "use = or !=",
        )


def _has_parts(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def _is_ordered(kind: pa.DataType) -> bool:
    return not (
        pa.types.is_boolean(kind)
        or isinstance(kind, pa.BaseExtensionType)
        or pa.types.is_fixed_size_binary(kind)
    )


def _meets(batch: pa.RecordBatch, conditions: Sequence[Condition]) -> pa.Array:
    """Of each row, whether it meets all conditions."""
    found: pa.Array = pa.repeat(pa.scalar(True), batch.num_rows)
    for condition in conditions:
        column = batch.column(condition.column)
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        meets = _met(column, condition)
        found = pc.and_(found, pc.fill_null(meets, False))  # Arrow's own name
    return found


def _met(column: pa.Array, condition: Condition) -> pa.Array:
    operator, value = condition.operator, condition.value
    if operator == "is null":
        return column.is_null()
    if operator == "is not null":
        return column.is_valid()
    if operator in ("begins with", "contains"):
        pattern = value if isinstance(value, bytes) else str(value).encode()
        raw = column.cast(pa.binary()) if not pa.types.is_large_binary(column.type) else column
        look = pc.starts_with if operator == "begins with" else pc.match_substring
        return look(raw, pattern)
    stored = value.bytes if isinstance(value, UUID) else value
    return _COMPARISONS[operator](column, pa.scalar(stored, column.type))


# --------------------------------------------------------------------------------------------------
# A page of rows.


class StoredRow(NamedTuple):
    """A row as the store has it: its key, and the value that `TableCodec.to_dict` takes."""

    key: bytes
    value: bytes


class Facet(NamedTuple):
    """What a column holds in the rows that a look has found: its most frequent values with their
    counts, and the number of its distinct values."""

    column: str
    values: list[tuple[Any, int]]
    distinct: int


class RowPage(NamedTuple):
    """Some rows of a table, in the order of the search.

    `next` is where the page behind begins, None behind the last one. `seen` counts the rows that
    the look has passed, `met` those of them that meet the conditions. The look is whole, and both
    are the numbers of all rows from the beginning of the page on, unless it `is_cut`: then it met
    a bound before it came to the end.
    """

    rows: list[StoredRow]
    next: bytes | None
    seen: int
    met: int
    is_cut: bool
    facets: list[Facet]


def row_page(
    versions: Versions,
    codec: TableCodec,
    search: RowSearch,
    as_of: int,
    *,
    limit: int,
    after: bytes = b"",
    with_facets: bool = False,
) -> RowPage:
    """The first `limit` rows of a search at `as_of`, from `after` on: the `next` of a page.

    With `facets` the look goes on behind the page, to the bound of its work. Raises `UsageError`
    for an index that is not whole at that time.
    """
    for condition in search.conditions:
        require_condition(codec.definition, condition)
    look = _Look(versions, codec, search, as_of, limit, with_facets=with_facets)
    return look.page(after)


class _Look:
    """A page that is being made."""

    def __init__(
        self,
        versions: Versions,
        codec: TableCodec,
        search: RowSearch,
        as_of: int,
        limit: int,
        *,
        with_facets: bool,
    ) -> None:
        self._versions, self._codec, self._search, self._as_of = versions, codec, search, as_of
        self._limit = limit
        self._index: Index | None = None
        self._order = codec.key
        if search.index is not None:
            self._index = whole_index(codec, search.index)
            self._order = codec.index_codec(self._index)
        self._facets = list(_facet_columns(codec.definition)) if with_facets else []
        names = [each.column for each in search.conditions]
        self._columns = list(dict.fromkeys([*names, *(each.name for each in self._facets)]))
        self._rows: list[StoredRow] = []
        self._last = b""
        """The place of the last row of the page."""
        self._following: bytes | None = None
        """Where the page behind begins, once a row of it was met."""
        self._found: list[pa.RecordBatch] = []
        self._passed = self._bytes = self._seen = self._met = 0

    def page(self, after: bytes) -> RowPage:
        span = narrowed(self._order, self._search.conditions)
        is_falling = self._search.is_falling
        if span is not None and after:
            bounds = (b"", after) if is_falling else (after, None)
            span = span.intersect(*bounds)
        rest = None if span is None else self._pass(span)
        following = self._following if self._following is not None else rest
        is_cut = rest is not None and self._is_exhausted
        return RowPage(self._rows, following, self._seen, self._met, is_cut, list(self._counted()))

    def _pass(self, span: Span) -> bytes | None:
        """Take rows of a span to its end, or to the bound of the work. Returns where to go on, None
        at the end."""
        is_falling = self._search.is_falling
        cursor, live = self._versions.live_pass(span, self._as_of, reverse=is_falling)
        count = BROWSE_ROWS_CHUNK // 8 or 1
        try:
            while True:
                before = self._bytes
                count = max(min(count, BROWSE_ENTRIES_MAX - self._passed), 1)
                has_more = cursor.feed(live, count)
                self._passed += count
                if not has_more:
                    live.end()
                self._take(*live.found())
                if not has_more:
                    return None
                if self._is_spent:
                    return self._behind(live, span)
                # Rows that an index leads to are looked up before their size is known.
                is_small = self._bytes - before < BROWSE_BYTES_MAX // 64
                count = min(count * 2, BROWSE_ROWS_CHUNK) if is_small else max(count // 2, 1)
        finally:
            cursor.close()

    @property
    def _is_exhausted(self) -> bool:
        return self._passed >= BROWSE_ENTRIES_MAX or self._bytes >= BROWSE_BYTES_MAX

    @property
    def _is_spent(self) -> bool:
        return self._is_exhausted or (self._following is not None and not self._facets)

    def _behind(self, live: LiveRows, span: Span) -> bytes | None:
        """Where a pass goes on that has stopped: at its last key, of which it may have decided
        nothing yet. A key that takes a whole pass is looked up."""
        last: bytes | None = live.last
        assert last is not None, "a pass with more entries has passed one"
        key = unescape(last[:-KEY_BYTES_LEAST])
        if self._search.is_falling:
            if span.end is None or key + b"\x00" < span.end:
                return key + b"\x00"
        elif key > span.start:
            return key
        value = self._versions.get(key, self._as_of)
        if value is not None:
            self._take([key], [value])
        return key if self._search.is_falling else key + b"\x00"

    # -- rows -------------------------------------------------------------------------------

    def _take(self, places: list[bytes], values: list[bytes]) -> None:
        """Take the rows at some places of the order. An entry of an index leads to its row, if its
        row has the values of the entry."""
        if not places:
            return
        keys = places
        if self._index is not None:
            keys = self._codec.row_keys(self._index, places)
            found = self._versions.get_many(keys, self._as_of)
            there = [at for at, value in enumerate(found) if value is not None]
            places, keys = [places[at] for at in there], [keys[at] for at in there]
            values = [value for value in found if value is not None]
        self._bytes += sum(map(len, values))
        for start in range(0, len(keys), BROWSE_ROWS_CHUNK):
            part = slice(start, start + BROWSE_ROWS_CHUNK)
            self._compare(places[part], keys[part], values[part])

    def _compare(self, places: list[bytes], keys: list[bytes], values: list[bytes]) -> None:
        try:
            fits, meets, batch = self._compared(places, keys, values)
        except CorruptionError:
            if len(keys) > 1:
                for place, key, value in zip(places, keys, values, strict=True):
                    self._compare([place], [key], [value])
                return
            fits, meets, batch = [True], [not self._search.conditions], None
        self._seen += sum(fits)
        met = [at for at, (fit, meet) in enumerate(zip(fits, meets, strict=True)) if fit and meet]
        self._met += len(met)
        for at in met:
            if len(self._rows) < self._limit:
                self._rows.append(StoredRow(keys[at], values[at]))
                self._last = places[at]
            elif self._following is None:
                self._following = self._last if self._search.is_falling else places[at]
        if batch is not None and self._facets and met:
            names = [column.name for column in self._facets]
            self._found.append(batch.select(names).take(pa.array(met)))

    def _compared(
        self, places: list[bytes], keys: list[bytes], values: list[bytes]
    ) -> tuple[list[bool], list[bool], pa.RecordBatch]:
        """Of each row, whether it fits its place, and whether it meets the conditions; and the
        columns that were read."""
        codec, conditions = self._codec, self._search.conditions
        stored = binary_array(keys), binary_array(values)
        fits = [True] * len(keys)
        if self._index is None:
            batch = codec.decode(*stored, self._columns, is_checked=False)
        else:
            indexed = codec.definition.parts_named((*self._index.parts, *codec.definition.key))
            names = list(dict.fromkeys([*self._columns, *indexed]))
            batch = codec.decode(*stored, names, is_checked=False)
            again = codec.entries(self._index, batch).to_pylist()
            fits = [place == entry for place, entry in zip(places, again, strict=True)]
        meets = _meets(batch, conditions).to_pylist() if conditions else [True] * len(keys)
        return fits, meets, batch

    # -- facets -----------------------------------------------------------------------------

    def _counted(self) -> Iterator[Facet]:
        """The facets of the rows that were found: of columns with few values, and more than one
        row for some of them."""
        shown = 0
        for column in self._facets:
            if not self._found or shown == BROWSE_FACET_COLUMNS_MAX:
                return
            parts = [batch.column(column.name) for batch in self._found]
            counts = pc.value_counts(pa.chunked_array(parts))
            if len(counts) > BROWSE_FACET_DISTINCT_MAX or len(counts) in (0, self._met):
                continue
            pairs = sorted(map(_pair, counts), key=lambda pair: -pair[1])
            yield Facet(column.name, pairs[:BROWSE_FACET_VALUES], len(pairs))
            shown += 1


def _pair(found: Any) -> tuple[Any, int]:
    """A value and its count. A text of a damaged row may be no UTF-8, and is given as bytes."""
    value, count = found["values"], found["counts"].as_py()
    try:
        return value.as_py(), count
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes(), count


def _facet_columns(definition: Definition) -> Iterator[Column]:
    """The columns whose values may be few: no fractions, no times, no bytes."""
    types = pa.types
    tests = (types.is_boolean, types.is_integer, types.is_string, types.is_date32)
    columns = (each for each in definition.columns if any(test(each.type) for test in tests))
    yield from (each for _, each in zip(range(4 * BROWSE_FACET_COLUMNS_MAX), columns, strict=False))


# --------------------------------------------------------------------------------------------------
# The live keys of a span and their bytes, counted up to a bound.


class KeyCount(NamedTuple):
    """The live keys that were counted, the bytes of keys and values together, and the number of
    entries that were passed. The count `is_exact` if it came to the end of the span."""

    rows: int
    bytes: int
    passed: int
    is_exact: bool


def counted(versions: Versions, span: Span, as_of: int, entries_max: int) -> KeyCount:
    """Count the live keys of a span, reading `entries_max` entries and `BROWSE_BYTES_MAX` bytes of
    values at most, and one piece more."""
    cursor, live = versions.live_pass(span, as_of)
    rows = size = passed = 0
    try:
        while passed < entries_max and size < BROWSE_BYTES_MAX:
            count = min(BROWSE_ROWS_CHUNK, entries_max - passed)
            has_more = cursor.feed(live, count)
            passed += count
            if not has_more:
                live.end()
            keys, values = live.found()
            rows += len(keys)
            size += sum(map(len, keys)) + sum(map(len, values))
            if not has_more:
                return KeyCount(rows, size, passed, is_exact=True)
        return KeyCount(rows, size, passed, is_exact=False)
    finally:
        cursor.close()
