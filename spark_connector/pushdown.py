"""From the filters and options of a read to the spans of keys that it has to look at."""

from __future__ import annotations

import base64
import binascii
import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import pyarrow as pa

from kvstore.base.span import Span, merge_spans, prefix_end
from kvstore.bulk.outside import is_binary
from kvstore.codec.keys import TERMINATOR
from kvstore.engine import FileSpan
from kvstore.errors import Argument, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.spark.origins import Origin
from kvstore.tables import TableCodec
from kvstore.tables.definition import Column
from kvstore.tables.row_codec import KeyCodec

# --------------------------------------------------------------------------------------------------
# Filters that a reader of rows is told about: comparisons of columns with values.
#
#     [("vendor", "=", "A"), ("trip", ">", 40)]            both
#     [[("key", "startswith", b"a")], [("key", "in", [b"k", b"z"])]]      one of two
#
# The form is the one of `pyarrow.parquet`: comparisons are joined by AND, lists of them by OR. As
# the option `filters` they are JSON. A value that JSON has no form for is an object of one name:
#
#     {"bytes": hex}  {"datetime": ISO}  {"date": ISO}  {"time": ISO}  {"decimal": text}
#     {"uuid": text}

OPERATORS: Final = ("=", "<", "<=", ">", ">=", "in", "startswith")

VALUES_MAX: Final = 10_000
"""Values of all filters of a read. They are in the plan of the query, and a key costs a seek."""


class Comparison(NamedTuple):
    """A column is compared with a value; with `in`, with each value of a tuple."""

    column: str
    operator: str
    value: Any


Filters: TypeAlias = "tuple[tuple[Comparison, ...], ...]"
"""A row is wanted if all comparisons of one of the groups hold. No group means: no row."""

_TAGGED: Final[dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]]] = {
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    Decimal: ("decimal", str, Decimal),
    UUID: ("uuid", str, UUID),
}
_READ: Final = {name: read for name, _, read in _TAGGED.values()}
_PLAIN: Final = (str, int, float, bool)
_FORM: Final = 'pass [("column", "operator", value), ...], or a list of such lists'


def checked(given: Iterable[Any]) -> Filters:
    """The filters of a caller. Raises `UsageError` for what is none."""
    items = list(given)
    if not all(isinstance(item, (list, tuple)) and item for item in items) or not items:
        raise UsageError(f"filters {_short(given)}", _FORM)
    groups = [items] if isinstance(items[0][0], str) else items
    found = tuple(tuple(_comparison(each) for each in group) for group in groups)
    count = sum(len(each.value) if each.operator == "in" else 1 for g in found for each in g)
    if count > VALUES_MAX:
        raise UsageError(
            f"filters with {count:,} values",
            f"at most {VALUES_MAX:,} are allowed: a frame of keys goes through lookup_join",
        )
    return found


def to_text(filters: Filters) -> str:
    """The filters as the option `filters` has them."""
    return json.dumps([[(c, o, _written(v)) for c, o, v in group] for group in filters])


def from_text(text: str) -> Filters:
    """The filters that the option `filters` has. Raises `UsageError` for another text."""
    try:
        found = json.loads(text, object_hook=_read)
    except (ValueError, RecursionError, TypeError, InvalidOperation) as error:
        raise UsageError(f"filters={text[:40]!r}: {error}", "let read_where write it") from None
    return checked(found if isinstance(found, list) else [found])


def _comparison(each: Any) -> Comparison:
    if not isinstance(each, (list, tuple)) or len(each) != 3 or not isinstance(each[0], str):
        raise UsageError(f"a filter {_short(each)}", _FORM)
    column, operator, value = each
    operator = "=" if operator == "==" else operator
    if operator not in OPERATORS:
        raise UsageError(f"a filter {_short(each)}", f"the operators are {' '.join(OPERATORS)}")
    if operator == "in":
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
            raise UsageError(f"a filter {_short(each)}", "pass a list of values to in")
        value = tuple(value)
    if operator == "startswith" and not isinstance(value, (str, bytes)):
        raise UsageError(f"a filter {_short(each)}", "pass a text, or bytes for a binary column")
    for one in value if operator == "in" else [value]:
        if type(one) not in _TAGGED and type(one) not in _PLAIN:
            names = ", ".join(kind.__name__ for kind in (*_PLAIN, *_TAGGED))
            raise UsageError(f"a filter with a {type(one).__name__}", f"pass one of {names}")
    return Comparison(column, operator, value)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    tagged = _TAGGED.get(type(value))
    return value if tagged is None else {tagged[0]: tagged[1](value)}


def _read(found: dict[str, Any]) -> Any:
    if len(found) != 1:
        raise ValueError("a value of several names")
    [(name, text)] = found.items()
    if name not in _READ:
        raise ValueError(f"a value {name}")
    return _READ[name](text)


def _short(given: object) -> str:
    return repr(given)[:60]


# --------------------------------------------------------------------------------------------------
# The keys that the options of a read name: one range, or several in the option `ranges`.
#
#     prefix                        the keys that begin with it
#     startKey, endKey              startKey <= key < endKey
#     ranges                        JSON: a list of prefixes, and of pairs of a start and an end
#     keyEncoding                   how each of these texts tells bytes: text, hex or base64
#
# Spark passes no OR to a Python source, so `ranges` is the way to read several ranges at once.

RANGES_MAX: Final = 1_000
"""Ranges of one read. They are in the plan of the query, and each costs a seek."""

_BOUNDS: Final = {"startkey": "startKey", "endkey": "endKey", "prefix": "prefix"}
_PYTHON_BYTES: Final = re.compile(r"(bytearray\()?b(['\"]).*\2\)?", re.DOTALL)
"""The text that Spark makes of bytes in `option("prefix", b"a")`: a prefix that no key has."""

_DECODERS: Final[Mapping[str, Callable[[str], bytes]]] = {
    "text": str.encode,
    "hex": bytes.fromhex,
    "base64": lambda text: base64.b64decode(text, validate=True),
}


def spans_of(given: Mapping[str, str]) -> tuple[Span, ...]:
    """The spans that the options name, under their lower-case names: disjoint, and in order.

    Raises `UsageError` for a key that is not in its encoding, and for two ways at once.
    """
    encoding = given.get("keyencoding", "text")
    decode = _DECODERS.get(encoding.lower())
    if decode is None:
        raise UsageError(
            Argument.of("keyEncoding", encoding), f"pass one of {', '.join(_DECODERS)}"
        )

    def key(name: str, text: str) -> bytes:
        if _PYTHON_BYTES.fullmatch(text):
            raise UsageError(
                f"{name}={text} is bytes, and options are text",
                'pass its hex(), and the option keyEncoding "hex"',
            )
        try:
            return decode(text)
        except (ValueError, binascii.Error) as error:
            raise UsageError(
                f"{name}={text!r} is not {encoding}: {error}", "correct the text"
            ) from None

    bounds = [key(text, given[name]) if name in given else None for name, text in _BOUNDS.items()]
    ranges = given.get("ranges")
    if ranges is None:
        if "keyencoding" in given and bounds == [None] * len(bounds):
            raise UsageError("keyEncoding is given without a key", "remove it")
        return (Span.of(*bounds),)
    if bounds != [None] * len(bounds):
        raise UsageError("ranges is given with prefix, startKey or endKey", "pass ranges alone")
    return tuple(merge_spans(_span(each, key) for each in _listed(ranges)))


def _listed(text: str) -> list[object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and 0 < len(found) <= RANGES_MAX:
        return found
    raise UsageError(
        f"ranges={text[:40]!r}",
        f'pass JSON, a list of 1 to {RANGES_MAX} prefixes or pairs: ["a", ["b", "c"]]',
    )


def _span(each: object, key: Callable[[str, str], bytes]) -> Span:
    match each:
        case str(prefix):
            return Span.of_prefix(key("ranges", prefix))
        case [str(start), None]:
            return Span(key("ranges", start))
        case [str(start), str(end)]:
            return Span(key("ranges", start), key("ranges", end))
    raise UsageError(
        f"a range {str(each)[:40]!r}", "pass a prefix, or a pair of a start and an end (or null)"
    )


# --------------------------------------------------------------------------------------------------
# From the filters of a read to the spans of keys that it has to look at.
#
# Spark has an interface by which it pushes the filters of a query to a Python source. Up to 4.3 it
# keeps the reader of one query for the next queries of the same frame, and for the other half of a
# union: they lose rows. So no reader takes filters from Spark; `read_where` passes them as an
# option.
#
# Spark applies all filters again, so the spans may hold more keys than the filters, but never
# fewer.

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


# --------------------------------------------------------------------------------------------------
# From the filters of a read to the keys of a table, or of an index, that can be in its result.
#
# The keys of a table begin with its first key columns, and the entries of an index with the columns
# of the index. So equalities and IN on the first columns, and a range or the beginning of a text in
# the column behind them, are spans of keys.
#
# Spark applies all filters again, so the spans may hold more keys than the filters, but never
# fewer.


def group_spans(keys: KeyCodec, group: Sequence[Comparison]) -> list[Span]:
    """The keys that one group of filters leaves, of the rows of a table or of the entries of an
    index, as disjoint spans in order.

    Cost and result depend on the order of the columns: a filter on the second column narrows
    nothing unless the first column is equal to one value, or to one of a list.
    """
    return merge_spans(_spans_of_group(keys, group))


def _spans_of_group(keys: KeyCodec, group: Sequence[Comparison]) -> Iterator[Span]:
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


# --------------------------------------------------------------------------------------------------
# From the filters of a read to spans of a table's rows, by its key or by its indexes.
#
# A group of filters that narrows the key is a few spans of keys. Otherwise the driver reads the
# entries that the filters leave in an index, as of the time of the read, and the tasks read their
# rows alone. An entry is a hint: Spark applies all filters to the rows, so an entry that was left
# behind shows no row.
#
# Invariants
# 1. The spans have every row for which the filters hold. An index that is not whole is not used.
# 2. A read takes at most `ROWS_MAX` rows from indexes. A group with more rows reads the whole
#    table.

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
