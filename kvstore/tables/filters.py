"""Filters of scans: expressions of Arrow over the columns of a table, and the keys that can have
rows which pass.

    expression --its parts--> bounds of columns --> spans of keys, or entries of an index
         |                                                  |
         `------------- decides about each row <------------`

Arrow keeps the parts of an expression to itself, except in its serialized form: an Arrow file of
one row, whose columns are the literals and the options of calls, and whose schema has a metadata
entry for each part, in this order:

    call: name  part...  options: column | none  end: name
    field_ref: name
    nested_field_ref: how many  field_ref...        a field of a struct, and so on
    literal: column

A client sends these bytes. The server makes an expression of the parts that it knows, by Arrow's
public functions, and so never hands bytes of a caller to Arrow's own reader of expressions.

Invariants
1. A row is given if and only if Arrow's filter passes it. Bounds only spare rows that Arrow's
   filter would not pass; a part that is not understood bounds nothing.
2. All spans, entries and rows are read at one time.
3. An index narrows a scan only while it leads to `FILTER_ENTRIES_MAX` rows at most: more rows are
   read faster in the order of their keys. So memory is bounded.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.span import Span, prefix_end
from kvstore.codec.keys import frame
from kvstore.codec.tuples import NULL, flip
from kvstore.errors import UsageError
from kvstore.limits import (
    FILTER_ENTRIES_MAX,
    FILTER_PARTS_MAX,
    FILTER_SPANS_MAX,
    KEY_BYTES_MAX,
    SCAN_CHUNK,
)
from kvstore.loops import shapes
from kvstore.tables.definition import Column
from kvstore.tables.exact import as_python
from kvstore.tables.nested import is_nested
from kvstore.tables.row_codec import KeyCodec, TableCodec, element_maker
from kvstore.tables.sources import RowSource

# --------------------------------------------------------------------------------------------------
# The parts of an expression.


class ColumnNamed(NamedTuple):
    """A column, or the field of it to which the names in `within` lead."""

    name: str
    within: tuple[str, ...] = ()


class Literal(NamedTuple):
    """A value."""

    scalar: pa.Scalar


class FunctionCalled(NamedTuple):
    """A function of Arrow, by its name, with its arguments and its options."""

    name: str
    arguments: tuple[ExpressionPart, ...]
    options: Mapping[str, pa.Scalar]


ExpressionPart: TypeAlias = "ColumnNamed | Literal | FunctionCalled"


def parts_of(stored: bytes | pa.Buffer) -> ExpressionPart:
    """The parts of a serialized expression. Raises `ValueError` for bytes that are none, and for an
    expression of more than `FILTER_PARTS_MAX` parts, which reach as deep."""
    try:
        with pa.ipc.open_file(stored) as reader:
            if reader.num_record_batches != 1:
                raise ValueError("it has no literals")
            batch = reader.get_batch(0)
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{error}") from error
    if batch.num_rows != 1:
        raise ValueError(f"it has {batch.num_rows} rows")
    entries = _metadata(reader.schema)
    if len(entries) > FILTER_PARTS_MAX:
        raise ValueError(f"it has more than {FILTER_PARTS_MAX} parts")

    def value(text: str) -> pa.Scalar:
        if not text.isdecimal() or len(text) > 9 or int(text) >= batch.num_columns:
            raise ValueError(f"no literal {text!r:.20}")
        return batch.column(int(text))[0]

    open_: list[tuple[str, list[ExpressionPart], dict[str, pa.Scalar]]] = [("", [], {})]
    left = 0
    """Names of a field that follow."""
    for kind, text in entries:
        if left and kind == "field_ref":
            above = open_[-1][1].pop()
            assert isinstance(above, ColumnNamed), "it was put there"
            within = (*above.within, text) if above.name else ()
            open_[-1][1].append(ColumnNamed(above.name or text, within))
            left -= 1
        elif left:
            raise ValueError("a field without its names")
        elif kind == "nested_field_ref" and text.isdecimal() and len(text) < 4:
            left = int(text)
            open_[-1][1].append(ColumnNamed(""))
        elif kind == "call":
            open_.append((text, [], {}))
        elif kind == "options":
            options = value(text)
            if not pa.types.is_struct(options.type):
                raise ValueError("options that are no struct")
            open_[-1][2].update(options.items())
        elif kind == "end" and len(open_) > 1 and open_[-1][0] == text:
            name, found, options = open_.pop()
            open_[-1][1].append(FunctionCalled(name, tuple(found), options))
        elif kind == "field_ref":
            open_[-1][1].append(ColumnNamed(text))
        elif kind == "literal":
            open_[-1][1].append(Literal(value(text)))
        else:
            raise ValueError(f"a part {kind!r:.20}")
    if left or len(open_) > 1 or len(open_[0][1]) != 1:
        raise ValueError("it is cut off")
    return open_[0][1][0]


class _CSchema(ctypes.Structure):
    """The beginning of `struct ArrowSchema` of Arrow's C data interface."""

    _fields_ = (
        ("format", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("metadata", ctypes.c_void_p),
    )


def _metadata(schema: pa.Schema) -> list[tuple[str, str]]:
    """The entries of the metadata of a schema, in their order. `Schema.metadata` is a dict, which
    keeps the last entry of each name alone; the C data interface has all of them."""
    capsule = schema.__arrow_c_schema__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    exported = _CSchema.from_address(pointer_of(capsule, b"arrow_schema"))
    at = exported.metadata
    if not at:
        return []

    def number() -> int:
        nonlocal at
        (found,) = struct.unpack("=i", ctypes.string_at(at, 4))
        at += 4
        return int(found)

    def text() -> str:
        nonlocal at
        size = number()
        found = ctypes.string_at(at, size)
        at += size
        return found.decode()

    return [(text(), text()) for _ in range(number())]


# --------------------------------------------------------------------------------------------------
# Expressions out of parts that a client has sent.

_PLAIN: Final = frozenset(
    [
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
        *("and", "or", "and_kleene", "or_kleene", "and_not", "and_not_kleene", "xor", "invert"),
        *("is_valid", "is_nan", "is_finite", "is_inf", "true_unless_null"),
        *("add", "add_checked", "subtract", "subtract_checked", "multiply", "multiply_checked"),
        *("divide", "divide_checked", "negate", "negate_checked", "abs", "abs_checked", "sign"),
        *("floor", "ceil", "trunc", "bit_wise_and", "bit_wise_or", "bit_wise_xor", "bit_wise_not"),
        *("utf8_lower", "utf8_upper", "utf8_length", "binary_length", "ascii_lower", "ascii_upper"),
        *("year", "month", "day", "day_of_year", "hour", "minute", "second", "coalesce", "if_else"),
        *("list_value_length", "list_element"),
    ]
)
"""The functions without options that take no more memory than their arguments."""
_PATTERNS: Final = frozenset(
    ["starts_with", "ends_with", "match_substring", "match_substring_regex", "match_like"]
)
_CAST_FLAGS: Final = (
    *("allow_int_overflow", "allow_time_truncate", "allow_time_overflow"),
    *("allow_decimal_truncate", "allow_float_truncate", "allow_invalid_utf8"),
)


def expression_of(part: ExpressionPart) -> pc.Expression:
    """An expression of parts, by the public functions of Arrow. Raises `ValueError` that names a
    function which does not travel."""
    if isinstance(part, ColumnNamed):
        return pc.field(part.name, *part.within)
    if isinstance(part, Literal):
        return pc.scalar(part.scalar)
    arguments = [expression_of(each) for each in part.arguments]
    options = {name: value.as_py() for name, value in part.options.items() if name != "to_type"}
    if part.name in _PLAIN and not options:
        found: pc.Expression = getattr(pc, _NAMES.get(part.name, part.name))(*arguments)
        return found
    if len(arguments) == 1:
        if part.name == "is_null":
            return arguments[0].is_null(nan_is_null=bool(options.get("nan_is_null")))
        if part.name == "is_in" and options.get("null_matching_behavior") == 0:
            return arguments[0].isin(part.options["value_set"].values)
        if part.name in _PATTERNS and type(options.get("pattern")) is str:
            how = {"ignore_case": bool(options.get("ignore_case"))}
            matched: pc.Expression = getattr(pc, part.name)(arguments[0], options["pattern"], **how)
            return matched
        if part.name == "cast" and not any(options.get(flag) for flag in _CAST_FLAGS):
            return arguments[0].cast(part.options["to_type"].type)
    raise ValueError(f"the function {part.name!r:.60} does not travel to a server")


_NAMES: Final = {"and": "and_", "or": "or_"}
"""Functions that have another name in Python."""

# --------------------------------------------------------------------------------------------------
# Bounds of columns: between which elements of keys the values of a row lie if it passes.
#
# An element is a value as a key has it, rising. Elements sort as the values do, null first.

Bounds: TypeAlias = "list[tuple[bytes, bytes | None]]"
"""Disjoint stretches of elements, ascending, both ends included. None is the end of all."""

_FLIPPED: Final = {
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
    "equal": "equal",
}


def bounds_of(part: ExpressionPart, columns: Mapping[str, Column]) -> dict[str, Bounds]:
    """The bounds of the columns of rows for which an expression is true. A column that is not named
    has none."""
    if not isinstance(part, FunctionCalled):
        return {}
    if part.name in ("and", "and_kleene", "or", "or_kleene"):
        each = [bounds_of(argument, columns) for argument in part.arguments]
        return reduce(_both if part.name.startswith("and") else _either, each)
    arguments, name = part.arguments, part.name
    if len(arguments) == 2 and isinstance(arguments[0], Literal) and name in _FLIPPED:
        arguments, name = arguments[::-1], _FLIPPED[name]
    named = arguments[0] if arguments and type(arguments[0]) is ColumnNamed else None
    column = None if named is None or named.within else columns.get(named.name)
    if column is None:
        return {}
    found: Bounds | None = None
    if len(arguments) == 2 and isinstance(arguments[1], Literal):
        found = _compared(name, column, arguments[1].scalar)
    elif name == "is_null" and not pa.types.is_floating(column.type):
        found = [(NULL, NULL)]
    elif name == "is_in":
        found = _among(column, part.options)
    elif name == "starts_with" and column.kind.way == shapes.TEXT:
        found = _beginning(column, part.options)
    return {} if found is None else {column.name: found}


def _compared(name: str, column: Column, scalar: pa.Scalar) -> Bounds | None:
    element = _element(column, scalar)
    if element is None:
        return None
    if name == "equal":
        return [(element, element)]
    if name in ("less", "less_equal"):
        return [(b"", element)]
    return [(element, None)] if name in ("greater", "greater_equal") else None


def _among(column: Column, options: Mapping[str, pa.Scalar]) -> Bounds | None:
    values = options.get("value_set")
    if values is None or not pa.types.is_list(values.type):
        return None
    elements = set()
    for scalar in values.values:
        element = _element(column, scalar) if scalar.is_valid else NULL
        if element is None:
            return None
        elements.add(element)
    return [(element, element) for element in sorted(elements)]


def _beginning(column: Column, options: Mapping[str, pa.Scalar]) -> Bounds | None:
    pattern, ignores_case = options.get("pattern"), options.get("ignore_case")
    if pattern is None or ignores_case is None or ignores_case.as_py() is not False:
        return None
    text, tag = str(pattern.as_py()).encode(), column.kind.tag
    return [(tag + frame(text), tag + frame(text + b"\xff"))]  # no byte of UTF-8 is ff


def _element(column: Column, scalar: pa.Scalar) -> bytes | None:
    """The element of a literal; None where Arrow would compare in another type than the column's,
    or the column has no such value."""
    if (
        is_nested(column.type)
        or not scalar.is_valid
        or not _compares_exactly(column.type, scalar.type)
    ):
        return None
    try:
        cast = scalar.cast(column.type)
        if scalar.type != column.type and cast.cast(scalar.type) != scalar:
            return None
        return element_maker(column.kind)(as_python(pa.array([cast], column.type), 0))
    except (pa.ArrowException, ValueError, UsageError):
        return None


def _compares_exactly(column: pa.DataType, literal: pa.DataType) -> bool:
    """Whether Arrow compares a column with a literal of a type by their values: it casts both to
    one type, in which values of the column must stay distinct."""
    types = pa.types
    if column == literal:
        return True
    if types.is_integer(column) and types.is_integer(literal):
        return pa.uint64() not in (column, literal)
    if types.is_timestamp(column) and types.is_timestamp(literal):
        return (column.tz is None) == (literal.tz is None) and literal.unit != "ns"
    return (
        (types.is_float32(column) and types.is_float64(literal))
        or (types.is_floating(column) and types.is_integer(literal))
        or (types.is_decimal(column) and types.is_decimal(literal))
        or {column, literal} in ({pa.string(), pa.large_string()}, {pa.binary(), pa.large_binary()})
    )


def _both(one: dict[str, Bounds], two: dict[str, Bounds]) -> dict[str, Bounds]:
    found = {**one, **two}
    for name in one.keys() & two.keys():
        pairs = ((a, b) for a in one[name] for b in two[name])
        met = [(max(a[0], b[0]), _lower(a[1], b[1])) for a, b in pairs]
        found[name] = [(low, high) for low, high in met if high is None or low <= high]
    return found


def _either(one: dict[str, Bounds], two: dict[str, Bounds]) -> dict[str, Bounds]:
    return {name: _merged([*one[name], *two[name]]) for name in one.keys() & two.keys()}


def _merged(bounds: Bounds) -> Bounds:
    found: Bounds = []
    for low, high in sorted(bounds, key=lambda each: each[0]):
        before = found[-1] if found else None
        if before is None or (before[1] is not None and before[1] < low):
            found.append((low, high))
        else:
            is_last = before[1] is None or high is None
            end = None if is_last else max(before[1] or b"", high or b"")
            found[-1] = before[0], end
    return found


def _lower(one: bytes | None, two: bytes | None) -> bytes | None:
    return two if one is None else one if two is None else min(one, two)


def spans_of(codec: KeyCodec, bounds: Mapping[str, Bounds]) -> list[Span]:
    """The spans of the keys whose columns lie within bounds, ascending and disjoint: at most
    `FILTER_SPANS_MAX`."""
    stems = [codec.prefix]
    for part, column in zip(codec.parts, codec.columns, strict=True):
        mine = bounds.get(column.name)
        if mine is None or len(stems) * len(mine) > FILTER_SPANS_MAX:
            break
        if part.is_falling:
            mine = [_falling(*each) for each in reversed(mine)]
        if all(low == high for low, high in mine):
            stems = [stem + low for stem in stems for low, _ in mine]
            continue
        return [_span(stem, low, high) for stem in stems for low, high in mine]
    return [_span(stem, b"", None) for stem in stems]


def _falling(low: bytes, high: bytes | None) -> tuple[bytes, bytes | None]:
    return b"" if high is None else flip(high), flip(low) if low else None


def _span(stem: bytes, low: bytes, high: bytes | None) -> Span:
    """The keys that begin with `stem` and lie within bounds. A longer bound than a key can be is
    cut off, and spans a little more."""
    last = (stem if high is None else stem + high)[:KEY_BYTES_MAX]
    return Span((stem + low)[:KEY_BYTES_MAX], prefix_end(last))


# --------------------------------------------------------------------------------------------------
# A filter, and the rows that pass it.


class RowFilter:
    """A filter of the rows of a table."""

    def __init__(self, expression: object, part: ExpressionPart | None = None) -> None:
        """`part` are the parts of the expression, if the caller knows them. Raises `UsageError` for
        anything but an expression."""
        if not isinstance(expression, pc.Expression):
            raise UsageError(
                f"filter={expression!r:.100}",
                'pass an expression of pyarrow.compute: pc.field("fare") > 10',
            )
        self.expression = expression
        self._part = part

    @classmethod
    def of(cls, given: object) -> RowFilter | None:
        """The filter of an argument; None if it is None."""
        return None if given is None else given if isinstance(given, cls) else cls(given)

    @classmethod
    def from_bytes(cls, sent: bytes) -> RowFilter:
        """The filter that a client has sent. Raises `UsageError`."""
        try:
            part = parts_of(sent)
            return cls(expression_of(part), part)
        except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException) as error:
            raise UsageError(f"filter: {error}", "filter the rows of the scan") from error

    def to_bytes(self) -> bytes:
        """The filter as a client sends it. Raises `UsageError` for an expression that does not
        travel."""
        stored = _serialized(self.expression)
        try:
            if stored is None:
                raise ValueError("it names no columns")
            expression_of(parts_of(stored))
        except (ValueError, pa.ArrowException) as error:
            raise UsageError(
                f"filter={self.expression}: {error}"[:1000], "filter the rows of the scan"
            ) from error
        return bytes(stored)

    @cached_property
    def part(self) -> ExpressionPart | None:
        """The parts of the expression; None where they are not known."""
        if self._part is None and (stored := _serialized(self.expression)) is not None:
            try:
                return parts_of(stored)
            except ValueError:
                return None
        return self._part

    @property
    def columns(self) -> list[str] | None:
        """The columns that decide; None where they are not known."""
        return None if self.part is None else list(dict.fromkeys(_fields(self.part)))

    def bounds(self, columns: Mapping[str, Column]) -> dict[str, Bounds]:
        """See `bounds_of`."""
        return {} if self.part is None else bounds_of(self.part, columns)

    def require(self, codec: TableCodec) -> None:
        """Raise `UsageError` for a filter of columns that the table does not have, and for one that
        is no condition on them."""
        for name in self.columns or ():
            codec.definition.column(name)
        nulls = [pa.nulls(1, column.type) for column in codec.definition.columns]
        names = [column.name for column in codec.definition.columns]
        self.passed(pa.RecordBatch.from_arrays(nulls, names))  # a pattern is read with a row

    def passed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch that pass."""
        try:
            return batch.filter(self.expression)
        except (pa.ArrowException, TypeError) as error:
            raise UsageError(f"filter: {error}"[:1000], "correct the expression") from error

    def places(self, codec: TableCodec, keys: Sequence[bytes], values: Sequence[bytes]) -> set[int]:
        """The places of the stored rows that pass."""
        batch = codec.decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
        numbered = batch.append_column(_PLACE, pa.array(range(len(keys)), pa.int64()))
        return set(self.passed(numbered).column(_PLACE).to_pylist())


_PLACE: Final = "kvstore_place"
"""The column of the places of rows: no column of a table is called so."""


def _serialized(expression: pc.Expression) -> pa.Buffer | None:
    try:
        _, (stored,) = expression.__reduce__()
    except (pa.ArrowException, TypeError):  # it names columns by their place
        return None
    return stored


def _fields(part: ExpressionPart) -> Iterator[str]:
    if isinstance(part, ColumnNamed):
        yield part.name
    elif isinstance(part, FunctionCalled):
        for argument in part.arguments:
            yield from _fields(argument)


def passed_batches(
    codec: TableCodec,
    rows: RowSource,
    span: Span,
    chosen: RowFilter,
    *,
    columns: Sequence[str] | None,
    reverse: bool,
    limit: int | None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a span that pass a filter, in the order of their keys. `rows` are at one time.

    Costs a read of the spans of keys that the filter leaves; where it leaves all, of the entries of
    an index that it bounds, if they are few.
    """
    decided = chosen.columns
    wanted = None
    if columns is not None and decided is not None:
        wanted = list(dict.fromkeys([*columns, *decided]))
    bounds = chosen.bounds(codec.definition.by_name)
    spans = spans_of(codec.key, bounds)
    met = [each.intersect(span.start, span.end) for each in spans]
    within = [each for each in met if each is not None]
    if reverse:
        within.reverse()
    found = None
    if within == [span]:
        found = _by_index(codec, rows, span, bounds, reverse=reverse)
    if found is None:
        found = (
            batch
            for each in within
            for batch in rows.batches(each, None, reverse=reverse, limit=None)
        )
    missing = limit
    if missing == 0:
        return
    for batch in codec.decoded(found, wanted):
        passed = chosen.passed(batch)
        if columns is not None:
            passed = passed.select(list(columns))
        if missing is not None:
            passed = passed.slice(0, missing)
            missing -= passed.num_rows
        if passed.num_rows:
            yield passed
        if missing == 0:
            return


def _by_index(
    codec: TableCodec, rows: RowSource, span: Span, bounds: Mapping[str, Bounds], *, reverse: bool
) -> Iterator[pa.RecordBatch] | None:
    """The keys and values of the rows in a span to which an index leads; None where no index is
    bounded, or it leads to more than `FILTER_ENTRIES_MAX` rows."""
    for index in codec.definition.indexes:
        entries = codec.index_codec(index)
        if not index.is_whole or entries.columns[0].name not in bounds:
            continue
        keys: set[bytes] = set()
        left = FILTER_ENTRIES_MAX
        for each in spans_of(entries, bounds):
            for batch in rows.batches(each, None, reverse=False, limit=left + 1):
                left -= batch.num_rows
                keys.update(codec.row_keys(index, batch.column(0).to_pylist()))
            if left < 0:
                break
        if left >= 0:
            ordered = sorted((key for key in keys if key in span), reverse=reverse)
            return _of_keys(ordered, rows)
    return None


def _of_keys(keys: Sequence[bytes], rows: RowSource) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(keys), SCAN_CHUNK):
        some = list(keys[first : first + SCAN_CHUNK])
        pairs = zip(some, rows.get_many(some), strict=True)
        found = [(key, value) for key, value in pairs if value is not None]
        if found:
            columns = [pa.array(list(each), pa.binary()) for each in zip(*found, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=["key", "value"])
