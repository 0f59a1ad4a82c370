"""Rows of a table as keys and values of the store, and back. Needs a definition and no store."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import key_list
from kvstore.base.span import Span
from kvstore.base.timestamp import OTHER_UNITS_MAX, TIMESTAMP_MAX
from kvstore.codec.keys import frame
from kvstore.codec.tuples import (
    FALSE,
    NULL,
    SIGN,
    TRUE,
    UNSIGNED,
    decode_decimal,
    desc,
    elements,
    encode_decimal,
    encode_double,
    flip,
)
from kvstore.errors import Argument, CorruptionError, FormatVersionError, UsageError
from kvstore.limits import KEY_BYTES_MAX, NESTED_SLOTS_MAX
from kvstore.loops import shapes
from kvstore.loops.elements import decode_keys, encode_keys
from kvstore.loops.nested import decode_nested, encode_nested
from kvstore.loops.rows import decode_rows, encode_rows
from kvstore.loops.shapes import ROW_FORMAT, Made
from kvstore.loops.shapes import Column as BufferColumn
from kvstore.loops.single import KeyMaker, RowDicts, row_keys
from kvstore.mvcc.arrow import array_of, binary_array
from kvstore.tables.definition import (
    Column,
    Definition,
    Index,
    KeyPart,
    Kind,
    Layout,
    index_prefix,
    kind_of,
    rows_prefix,
)
from kvstore.tables.exact import (
    as_python,
    decimals,
    first_no_text,
    plain,
    require_held,
    same_values,
    shown,
    unheld,
)
from kvstore.tables.nested import TypeNode, is_nested, shape_of

# --------------------------------------------------------------------------------------------------
# Keys of rows and entries of indexes: some columns as bytes that sort as the columns do.

_TAGGED: Final = struct.Struct(">BQ")
_EIGHT_BYTES: Final = struct.Struct(">Q")
_OneElement = Callable[[Any], bytes]


class KeyCodec:
    """Keys of `prefix` and, behind it, the columns of `parts`."""

    def __init__(self, definition: Definition, prefix: bytes, parts: Sequence[KeyPart]) -> None:
        self.prefix = prefix
        self._where = definition.where
        self.columns = [definition.by_id[part.id] for part in parts]
        self.parts = tuple(parts)
        self._makers = [
            _maker(column.kind, is_falling=part.is_falling)
            for column, part in zip(self.columns, parts, strict=True)
        ]
        maker = KeyMaker(prefix, list(map(_made, self.columns, parts, self._makers)))
        self._make, self.fits = maker.make, maker.fits
        self._shapes = [
            (column.kind.key_kind, column.kind.tag[0], part.is_falling, column.kind.key_width)
            for column, part in zip(self.columns, parts, strict=True)
        ]

    def key(self, values: Sequence[Any]) -> bytes:
        """The key that begins with `values`, of some of the columns from the first on."""
        try:
            return self._make(values)
        except ValueError:
            self._refuse(values)

    def span(self, start: Any = None, end: Any = None, prefix: Any = None) -> Span:
        """The keys from `start` to below `end`, or that begin with `prefix`: each is a tuple of
        values of some of the columns from the first on, or the value of the first column. All keys
        if none is given."""
        whole = Span.of_prefix(self.prefix)
        if prefix is not None:
            if start is not None or end is not None:
                raise UsageError("a prefix goes without start and end", "pass one or the other")
            return Span.of_prefix(self._bound(prefix))
        low = whole.start if start is None else self._bound(start)
        high = whole.end if end is None else self._bound(end)
        if high is not None and low >= high:
            raise UsageError(
                f"{self._where}: no key lies from {start!r:.100} to below {end!r:.100}",
                "start must be below end, in the order of the key",
            )
        return Span(low, high)

    def _bound(self, given: Any) -> bytes:
        return self.key(given if isinstance(given, tuple | list) else (given,))

    def whole_key(self, values: Sequence[Any]) -> bytes:
        """The key of values for all columns, none of them null."""
        if len(values) != len(self._makers) or None in values:
            self._refuse_values(values)
        try:
            return self._make(values)
        except ValueError:
            self._refuse(values)

    def stored_key(self, values: Sequence[Any]) -> bytes:
        """As `whole_key`, also of a row that cannot be read: bytes stand for a text that is no
        UTF-8, and a number of days or units for a time that Python does not have."""
        try:
            return self.whole_key(values)
        except UsageError:
            if len(values) != len(self.columns) or None in values:
                raise
            elements = []
            for column, part, value in zip(self.columns, self.parts, values, strict=True):
                as_stored = replace(column.kind, stored=_stored_as_given(column.kind))
                try:
                    elements.append(_maker(as_stored, is_falling=part.is_falling)(value))
                except ValueError:
                    break
            else:
                return self.prefix + b"".join(elements)
            raise

    def named(self, key: bytes) -> str:
        """A key by its columns, for errors: `k=7, day=...`. Any value is shown as `stored_key`
        takes it; bytes that are no key are shown in hex."""
        try:
            arrays = self.arrays(binary_array([key]))
        except CorruptionError:
            return f"key {key.hex()}"
        values = (f"{as_python(array, 0)!r:.100}" for array in arrays)
        return ", ".join(
            f"{column.name}={value}" for column, value in zip(self.columns, values, strict=True)
        )

    def require(self, keys: Sequence[bytes]) -> None:
        """Raise `CorruptionError` for bytes that are no key."""
        self.arrays(binary_array(keys))

    def whole_keys(self, keys: Iterable[Any]) -> list[bytes]:
        """The keys of many tuples, or of the values of a key of one column."""
        return [self.whole_key(key) for key in self._tuples(keys)]

    def stored_keys(self, keys: Iterable[Any]) -> list[bytes]:
        """As `whole_keys`, each as `stored_key`."""
        return [self.stored_key(key) for key in self._tuples(keys)]

    def _tuples(self, keys: Iterable[Any]) -> Iterator[Sequence[Any]]:
        for key in key_list(keys):
            yield key if isinstance(key, tuple | list) else self._single(key)

    def _single(self, value: Any) -> tuple[Any]:
        if len(self.columns) > 1:
            names = ", ".join(column.name for column in self.columns)
            raise UsageError(f"{self._where}: {value!r:.100} is no key", f"pass ({names})")
        return (value,)

    def keys(self, batch: pa.RecordBatch) -> pa.Array:
        """The keys of the rows of a batch, binary."""
        columns = [
            (kind, tag, is_falling, *_key_buffers(column.kind, batch.column(column.name)))
            for column, (kind, tag, is_falling, _) in zip(self.columns, self._shapes, strict=True)
        ]
        encoded = encode_keys(self.prefix, columns, batch.num_rows)
        if encoded is None:
            raise UsageError(
                f"{self._where}: the keys of {batch.num_rows} rows have 2 GiB", "pass fewer rows"
            )
        keys = array_of(batch.num_rows, *encoded)
        lengths = np.diff(np.frombuffer(encoded[0], np.int32))
        if len(lengths) and lengths.max() > KEY_BYTES_MAX:
            at = int(lengths.argmax())
            raise UsageError(
                f"{self._where}: the key of row {at} has {lengths[at]} bytes",
                f"at most {KEY_BYTES_MAX} are allowed",
            )
        return keys

    def arrays(self, keys: pa.Array) -> list[pa.Array]:
        """The columns of keys. Raises `CorruptionError` for bytes that are no key. A forged
        key may have values that its columns do not hold."""
        made, ends = self._decoded(keys, len(self.columns))
        _, offsets, _ = keys.buffers()
        bounds = np.frombuffer(offsets or b"", np.int32)
        bounds = bounds[keys.offset + 1 : keys.offset + len(keys) + 1]
        wrong = np.flatnonzero(ends != bounds)
        if len(wrong):
            self._refuse_key(keys[int(wrong[0])].as_py())
        return [
            _key_array(column, buffers, len(keys), self._where)
            for column, buffers in zip(self.columns, made, strict=True)
        ]

    def reads(self, names: Collection[str]) -> list[shapes.KeyRead]:
        """The columns as `RowDicts` takes them, to read the columns `names`."""
        return [
            (column.name if column.name in names else None, *shape, *_read_way(column.kind))
            for column, shape in zip(self.columns, self._shapes, strict=True)
        ]

    def row_keys(self, entries: Sequence[bytes], count: int, prefix: bytes) -> list[bytes]:
        """The keys of rows that entries of an index lead to, behind its first `count` columns. A
        row's key begins with `prefix`."""
        return row_keys(entries, len(self.prefix), self._shapes[:count], prefix, self._where)

    def part_ends(self, keys: pa.Array, count: int) -> list[int]:
        """Where the first `count` columns of each key end."""
        _, offsets, _ = keys.buffers()
        starts = np.frombuffer(offsets or b"", np.int32)[keys.offset : keys.offset + len(keys)]
        ends: list[int] = (self._decoded(keys, count)[1] - starts).tolist()
        return ends

    def _decoded(self, keys: pa.Array, count: int) -> tuple[Any, Any]:
        """The buffers of the first `count` columns of keys, and the offset within the bytes of
        `keys` at which they end in each."""
        _, offsets, data = keys.buffers()
        made, ends = decode_keys(
            *(offsets, data or b"", keys.offset, len(keys)),
            *(len(self.prefix), self._shapes[:count], self._where),
        )
        return made, np.frombuffer(ends, np.int32)

    def values(self, key: bytes) -> list[Any]:
        """The values of the columns of one key. Raises as `arrays`."""
        found: list[Any] = []
        end = 0
        for column, part, (element, end) in zip(  # noqa: B007  # the end of the last one counts
            self.columns, self.parts, elements(key, len(self.prefix)), strict=False
        ):
            value = element.value if isinstance(element, desc) else element
            found.append(_typed(column, value))
            if isinstance(element, desc) is not part.is_falling:
                self._refuse_key(key)
        if len(found) != len(self.columns) or end != len(key):
            self._refuse_key(key)
        return found

    def _refuse(self, values: Sequence[Any]) -> NoReturn:
        """Raise `UsageError` for values that make no key."""
        if len(values) > len(self._makers):
            self._refuse_values(values)
        for column, make, value in zip(self.columns, self._makers, values, strict=False):
            try:
                make(value)
            except ValueError as error:  # noqa: PERF203  # the values were refused
                raise UsageError(
                    f"{self._where}, column {column.name!r}: {error}", "correct the value"
                ) from None
        raise AssertionError("a key was refused, and each of its values is taken")

    def _refuse_key(self, key: bytes) -> NoReturn:
        raise CorruptionError(f"{self._where}, key {key.hex()}", "no key of its table")

    def _refuse_values(self, values: Sequence[Any]) -> NoReturn:
        names = ", ".join(column.name for column in self.columns)
        if len(values) != len(self._makers):
            raise UsageError(
                f"{self._where}: {len(values)} values for a key of {len(self._makers)}",
                f"the key is {names}",
            )
        null = self.columns[list(values).index(None)]
        raise UsageError(
            f"{self._where}, column {null.name!r}: a key is never null",
            "pass a value for each column of the key",
        )


def _made(column: Column, part: KeyPart, make: _OneElement) -> shapes.KeyMade:
    """A column of keys as `KeyMaker` takes it. `make` makes the elements that the loops cannot
    make."""
    kind, least, most = column.kind, 0, 0
    way = shapes.CALLED if kind.code == "f" else kind.way  # a float32 rounds
    if kind.key_kind in (shapes.SIGNED, shapes.UNSIGNED) and way == shapes.STORED:
        if pa.types.is_integer(kind.type):
            is_signed = pa.types.is_signed_integer(kind.type)
            most = min((1 << 8 * kind.width - is_signed) - 1, SIGN - 1)
            least = -most - 1 if is_signed else 0
        else:
            way = shapes.CALLED
    elif kind.key_kind == shapes.FRAMED and kind.width:
        way = shapes.CALLED
    return kind.key_kind, kind.tag[0], part.is_falling, way, least, most, make


def _read_way(kind: Kind) -> tuple[int, Callable[[Any], Any] | None]:
    """The way by which the loops turn an element into a value of Python, and the function that they
    call for `CALLED`."""
    value = kind.value
    if kind.key_kind == shapes.WHOLE:
        assert value is not None
        return shapes.CALLED, lambda cell: value(kind.stored(decode_decimal(cell)))
    return kind.way, value


def _maker(kind: Kind, *, is_falling: bool) -> _OneElement:
    """The function that makes an element of one value."""
    make = element_maker(kind)

    def falling(value: Any) -> bytes:
        return flip(NULL if value is None else make(value))

    def rising(value: Any) -> bytes:
        return NULL if value is None else make(value)

    return falling if is_falling else rising


def _stored_as_given(kind: Kind) -> Callable[[Any], Any]:
    """As `kind.stored`, and what `as_python` gives for a value that the column does not hold."""

    def stored(value: Any) -> Any:
        if kind.way == shapes.TEXT and isinstance(value, bytes):
            return value
        if pa.types.is_temporal(kind.type) and type(value) is int and -SIGN <= value < SIGN:
            return value
        return kind.stored(value)

    return stored


def element_maker(kind: Kind) -> _OneElement:
    """The function that makes the rising element of a value that is not null."""
    stored, tag = kind.stored, kind.tag
    number, pack = tag[0], _TAGGED.pack
    if kind.key_kind == shapes.SIGNED:
        return lambda value: pack(number, stored(value) + SIGN)
    if kind.key_kind == shapes.UNSIGNED:

        def unsigned(value: Any) -> bytes:
            found = stored(value)
            is_large = found >= SIGN
            return UNSIGNED + _EIGHT_BYTES.pack(found) if is_large else pack(number, found + SIGN)

        return unsigned
    if kind.key_kind == shapes.DOUBLE:
        if kind.width == 4:  # as the column of floats has it
            single = struct.Struct("<f")
            return lambda value: tag + encode_double(single.unpack(single.pack(stored(value)))[0])
        return lambda value: tag + encode_double(stored(value))
    if kind.key_kind == shapes.BOOLEAN:
        return lambda value: TRUE if stored(value) else FALSE
    if kind.key_kind == shapes.FIXED:
        return lambda value: tag + stored(value)
    if kind.key_kind == shapes.WHOLE:
        value_of = kind.value
        assert value_of is not None
        return lambda value: tag + encode_decimal(value_of(stored(value)))
    return lambda value: tag + frame(stored(value))


def _key_buffers(kind: Kind, column: pa.Array) -> shapes.Column:
    """The buffers of a column as the loops of keys take it."""
    if kind.key_kind == shapes.WHOLE:
        cells = [None if each is None else encode_decimal(each) for each in column.to_pylist()]
        return cell_buffers(pa.array(cells, pa.binary()), 0)
    if kind.key_kind == shapes.DOUBLE:
        column = column.cast(pa.float64())
    elif kind.key_kind in (shapes.SIGNED, shapes.UNSIGNED) and kind.width < 8:
        if not pa.types.is_integer(column.type):
            column = column.cast(pa.int32())
        column = column.cast(pa.int64())
    elif kind.key_kind == shapes.FRAMED and kind.width:
        column = column.cast(pa.binary())
    return cell_buffers(column, kind.key_width)


def _key_array(column: Column, buffers: shapes.Made, count: int, where: str) -> pa.Array:
    """A column of a key from its buffers."""
    kind = column.kind
    if kind.key_kind == shapes.WHOLE:
        try:
            return _decimals(kind, array_made(pa.binary(), buffers, count))
        except ValueError as error:
            raise CorruptionError(f"{where}, column {column.name!r}", str(error)) from error
    if kind.key_kind in (shapes.SIGNED, shapes.UNSIGNED, shapes.DOUBLE):
        if kind.width == 8:
            return array_made(kind.type, buffers, count)
        wide = pa.float64() if kind.key_kind == shapes.DOUBLE else pa.int64()
        narrow = kind.type if pa.types.is_primitive(kind.type) else kind.storage
        found = array_made(wide, buffers, count)
        try:
            if not pa.types.is_integer(narrow) and kind.key_kind == shapes.SIGNED:
                found = found.cast(pa.int32())
            return found.cast(narrow)
        except pa.ArrowInvalid as error:
            raise CorruptionError(f"{where}, column {column.name!r}", str(error)) from error
    if kind.key_kind == shapes.FRAMED and kind.width:
        return array_made(pa.binary(), buffers, count).cast(kind.type)
    return array_made(kind.type, buffers, count)


def _decimals(kind: Kind, cells: pa.Array) -> pa.Array:
    """The decimals of elements of keys."""
    stored = [
        None if cell is None else kind.stored(decode_decimal(cell)) for cell in cells.to_pylist()
    ]
    return decimals(stored, kind.type)


def _typed(column: Column, value: Any) -> Any:
    """A value of a tuple as its column has it."""
    kind = column.kind
    if value is None:
        return None
    if kind.key_kind == shapes.WHOLE:
        assert kind.value is not None
        return kind.value(kind.stored(value))
    if type(value) is int and kind.value is not None:
        return kind.value(value)
    return value


# --------------------------------------------------------------------------------------------------
# Values of rows: the columns beside the key, in the layout of one schema number.
#
# `kvstore.loops.rows` has the bytes.

_HEAD: Final = struct.Struct("<BH")
_ENDS: Final = {1: "B", 2: "H", 4: "I"}


def cell_buffers(column: pa.Array, width: int) -> BufferColumn:
    """The buffers of a column as the loops take them."""
    if is_nested(column.type):
        column = nested_cells(column)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.string())
    elif pa.types.is_large_binary(column.type):
        column = column.cast(pa.binary())
    valid, *rest = column.buffers()
    valid = valid if column.null_count else None
    if width:
        return width, valid, column.offset, rest[0], None
    return 0, valid, column.offset, rest[1], rest[0]


def array_made(type_: pa.DataType, made: Made, count: int, where: str = "a column") -> pa.Array:
    """The array of a type whose buffers the loops made. A damaged row may hold what a
    column does not: texts that are no UTF-8, and times outside of its range. Raises
    `CorruptionError` that says `where` for bytes that are no list, struct or map."""
    kind = kind_of(type_)
    valid, data, ends = made
    is_full = valid.count(b"\xff") == len(valid)
    buffers = [None if is_full else pa.py_buffer(valid), pa.py_buffer(data)]
    if ends is not None:
        buffers.insert(1, pa.py_buffer(ends))
    found = pa.Array.from_buffers(kind.storage, count, buffers, 0 if is_full else -1)
    if kind.node is not None:
        return nested_array(kind.node, found, where)
    if kind.storage == kind.type:
        return found
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, found)
    return found.cast(type_)


def nested_cells(column: pa.Array) -> pa.Array:
    """Lists, structs or maps as the bytes that rows have of them. Raises `UsageError` for one with
    too many values."""
    node = kind_of(column.type).node
    assert node is not None, "the column is nested"
    count = len(column)
    try:
        encoded = encode_nested(
            shape_of(node), list(_nested_buffers(node, column)), count, NESTED_SLOTS_MAX
        )
    except OverflowError as error:
        raise UsageError(
            f"the lists of row {error.args[0]} have more than {NESTED_SLOTS_MAX} values",
            "store them as rows of another table",
        ) from error
    if encoded is None:
        raise UsageError(f"{count} rows have 2 GiB", "pass fewer rows at once")
    valid = column.is_valid().buffers()[1] if column.null_count else None
    return pa.Array.from_buffers(pa.binary(), count, [valid, *map(pa.py_buffer, encoded)])


def _nested_buffers(node: TypeNode, column: pa.Array) -> Iterator[shapes.NestedColumn]:
    """The columns of a tree as the loops take them, each before the ones below it."""
    count = len(column)
    if node.leaf is not None:
        _, valid, offset, data, ends = cell_buffers(column, node.leaf.width)
        yield valid, offset, data, ends, 4, count, 0
        return
    valid, *rest = column.buffers()[:2]
    valid = valid if column.null_count else None
    if node.kind == shapes.NODE_LIST:
        width, number = (8, np.int64) if pa.types.is_large_list(column.type) else (4, np.int32)
        first = last = 0
        if count:
            places = np.frombuffer(rest[0], number)
            first, last = int(places[column.offset]), int(places[column.offset + count])
        if not 0 <= first <= last:
            raise ValueError("the offsets of a column do not ascend")
        yield valid, column.offset, None, rest[0], width, count, first
        if pa.types.is_map(column.type):
            yield None, 0, None, None, 0, last - first, 0
            for inner, part in zip(node.inner[0].inner, (column.keys, column.items), strict=True):
                yield from _nested_buffers(inner, part.slice(first, last - first))
            return
        parts = [column.values.slice(first, last - first)]
    else:
        yield valid, column.offset, None, None, 0, count, 0
        if node.kind == shapes.NODE_SLOTS:
            size = node.type.list_size
            parts = [column.values.slice(column.offset * size, count * size)]
        else:
            parts = [column.field(at) for at in range(len(node.inner))]
    for inner, part in zip(node.inner, parts, strict=True):
        yield from _nested_buffers(inner, part)


def nested_array(node: TypeNode, cells: pa.Array, where: str) -> pa.Array:
    """Lists, structs or maps of the bytes that rows have of them. Raises `CorruptionError` for
    bytes that are none."""
    valid, offsets, data = cells.buffers()
    valid = valid if cells.null_count else None
    made = decode_nested(
        *(shape_of(node), valid, offsets, data or b"", cells.offset, len(cells)),
        *(NESTED_SLOTS_MAX, where),
    )
    return _nested_made(node, iter(made))


def _nested_made(node: TypeNode, made: Iterator[shapes.NestedMade]) -> pa.Array:
    count, marks, data, ends = next(made)
    bits = None
    if marks is not None:
        bits = np.packbits(np.frombuffer(marks, np.uint8), bitorder="little").tobytes()
    if node.leaf is not None:
        full = bits if bits is not None else b"\xff" * ((count + 7) // 8)
        return array_made(node.type, (full, data, ends), count)
    children = [_nested_made(inner, made) for inner in node.inner]
    buffers = [bits if bits is None else pa.py_buffer(bits)]
    if ends is not None:
        if pa.types.is_large_list(node.type):
            ends = np.frombuffer(ends, np.int32).astype(np.int64).tobytes()
        buffers.append(pa.py_buffer(ends))
    return pa.Array.from_buffers(node.type, count, buffers, children=children)


class RowCodec:
    """Rows of one layout. `where` names their table in errors."""

    def __init__(self, number: int, layout: Layout, where: str) -> None:
        self.number, self.layout = number, layout
        self._where = where
        self.kinds = [kind_of(type_) for _, type_ in layout]
        self.place = {id_: at for at, (id_, _) in enumerate(layout)}
        self.widths = [kind.width for kind in self.kinds]
        fixed = [kind for kind in self.kinds if kind.width]
        self._varying = len(self.kinds) - len(fixed)
        self._null_bytes = (len(layout) + 7) // 8
        codes = "".join(kind.code for kind in fixed)
        self._structs = {
            _head(width): struct.Struct(f"<BH{self._null_bytes}s{codes}{code * self._varying}")
            for width, code in _ENDS.items()
        }

    def values(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """The rows of columns in the order of the layout, binary."""
        buffers = [
            cell_buffers(column, width) for column, width in zip(columns, self.widths, strict=True)
        ]
        encoded = encode_rows(self.number, buffers, count)
        if encoded is None:
            raise UsageError(f"{self._where}: {count} rows have 2 GiB", "pass fewer rows at once")
        return array_of(count, *encoded)

    def arrays(self, values: pa.Array, places: Sequence[int]) -> list[pa.Array]:
        """The columns at `places` of the layout. No other column is decoded."""
        _, offsets, data = values.buffers()
        made = decode_rows(
            *(offsets, data or b"", values.offset, len(values)),
            *(self.number, self.widths, places, self._where),
        )
        return [
            array_made(self.kinds[place].type, buffers, len(values), self._where)
            for place, buffers in zip(places, made, strict=True)
        ]

    def value(self, cells: Sequence[Any]) -> bytes:
        """The row of stored cells in the order of the layout, None for null."""
        fixed: list[Any] = []
        varying: list[bytes] = []
        ends: list[int] = []
        nulls = total = 0
        for at, (kind, cell) in enumerate(zip(self.kinds, cells, strict=True)):
            if cell is None:
                nulls |= 1 << at
            if kind.width:
                fixed.append((b"" if kind.code.endswith("s") else 0) if cell is None else cell)
            else:
                varying.append(cell or b"")
                total += len(varying[-1])
                ends.append(total)
        width = 1 if total < 1 << 8 else 2 if total < 1 << 16 else 4
        head = _head(width)
        bits = nulls.to_bytes(self._null_bytes, "little")
        packed = self._structs[head].pack(head, self.number, bits, *fixed, *ends)
        return b"".join((packed, *varying))

    def reads(
        self, wanted: Sequence[tuple[str, int, Callable[[Any], Any] | None]]
    ) -> list[shapes.CellRead]:
        """Columns as `RowDicts` takes them. Each of `wanted` has a name, a place in the layout, and
        a function that makes a value of a stored cell; None stands for the function of its kind."""
        found = []
        for name, place, call in wanted:
            kind = self.kinds[place]
            way = kind.way if call is None else shapes.CALLED
            found.append((name, place, kind.letter, way, call or kind.value))
        return found


def schema_number(stored: bytes, where: str) -> int:
    """The schema number of a row. Raises `FormatVersionError` for a row of another format."""
    if len(stored) < _HEAD.size:
        raise CorruptionError(f"a row of {where}", f"{len(stored)} bytes are no row")
    head, number = _HEAD.unpack_from(stored)
    if head >> 4 != ROW_FORMAT:
        raise FormatVersionError(f"a row of {where}", found=head >> 4, supported=ROW_FORMAT)
    return int(number)


def schema_numbers(values: pa.Array, where: str) -> Any:
    """The schema number of each row of a binary array. Raises as `schema_number`."""
    _, offsets, data = values.buffers()
    count = len(values)
    if not count:
        return np.empty(0, np.int64)
    bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + count + 1]
    short = np.flatnonzero(bounds[1:] - bounds[:-1] < _HEAD.size)
    if len(short):
        raise CorruptionError(f"{where}, row {short[0]}", "its bytes are no row")
    stored = np.frombuffer(data, np.uint8)
    formats = stored[bounds[:-1]] >> 4
    if (formats != ROW_FORMAT).any():
        found = int(formats[formats != ROW_FORMAT][0])
        raise FormatVersionError(f"a row of {where}", found=found, supported=ROW_FORMAT)
    return stored[bounds[:-1] + 1] | stored[bounds[:-1] + 2].astype(np.int64) << 8


def _head(width: int) -> int:
    return ROW_FORMAT << 4 | width


def cell_bytes(kind: Kind, cell: Any) -> bytes:
    """A stored cell as bytes."""
    return struct.pack(f"<{kind.code}", cell) if kind.width else cell


def bytes_cell(kind: Kind, stored: bytes) -> Any:
    """The stored cell of bytes."""
    return struct.unpack(f"<{kind.code}", stored)[0] if kind.width else stored


# --------------------------------------------------------------------------------------------------
# Rows of a table as keys and values of the store, and back. Needs a definition and no store.
#
#     codec = TableCodec(definition)
#     keys, values = codec.encode(batch)                  # Arrow in, Arrow out
#     for index in definition.indexes:
# entries = codec.entries(index, batch)           # keys of the index; their values are empty
#
# Spark's tasks and imports build rows with it.
#
# Invariants
# 1. `decode` returns the values that `encode` was given, in the types of the definition, even from
#    rows of an older layout. A column that such a row lacks has its default.
# 2. A column that is not asked for is not decoded.


class UnknownLayoutError(CorruptionError):
    """A row names a layout that the definition does not have: the definition is older."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(f"a row of {where}", f"its table has no layout {number}")


class UnreadableRowError(CorruptionError):
    """A row holds a value that its column does not hold: its bytes are damaged or forged.
    `row` is its place among the rows that were decoded."""

    def __init__(
        self,
        where: str,
        problem: str,
        row: int,
        remedy: str = "delete the row or put it anew: `kvstore verify` lists all such rows",
    ) -> None:
        super().__init__(where, problem, remedy)
        self.row = row


class TableCodec:
    """Encodes and decodes the rows of one definition. Keep one: making it takes 100 us."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.stored = definition.to_bytes()
        self.key = KeyCodec(definition, rows_prefix(definition.number), definition.key)
        self._rows: dict[int, RowCodec] = {}
        self._readers: dict[tuple[int, tuple[str, ...] | None], RowDicts] = {}
        self._writer = self._row_codec(definition.layout)
        self._newest = self._reader(definition.layout, None)
        self._indexes: dict[int, KeyCodec] = {}

    # -- whole batches ----------------------------------------------------------------------

    def encode(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Keys and values of the rows of a batch. The batch has the schema of the definition (see
        `conform`). Raises `UsageError` for a value that its column does not hold. Costs 30 to 100
        ns a row."""
        by_id = self.definition.by_id
        for column in self.definition.columns:
            where = f"{self.definition.where}, column {column.name!r}"
            require_held(batch.column(column.name), column.type, where, 0)
        columns = [batch.column(by_id[id_].name) for id_, _ in self._writer.layout]
        return self.key.keys(batch), self._writer.values(columns, batch.num_rows)

    def entries(self, index: Index, batch: pa.RecordBatch) -> pa.Array:
        """The keys of the entries that the rows of a batch have in an index."""
        return self.index_codec(index).keys(batch)

    def decode(
        self,
        keys: pa.Array,
        values: pa.Array,
        columns: Sequence[str] | None = None,
        *,
        is_checked: bool = True,
    ) -> pa.RecordBatch:
        """The rows of keys and values. `columns` chooses some of the columns, and their order.

        Raises `CorruptionError` for bytes that are no row, `UnreadableRowError` for a text that is
        no UTF-8 unless `is_checked` is false, `UnknownLayoutError` for a newer layout. A time that
        Python does not have is given as Arrow has it.
        """
        wanted = self._columns(columns)
        found: dict[int, pa.Array] = {}
        key_ids = self.definition.key_ids
        if any(column.id in key_ids for column in wanted):
            for part, array in zip(self.definition.key, self.key.arrays(keys), strict=True):
                found[part.id] = array
        rest = [column for column in wanted if column.id not in key_ids]
        for column, array in zip(rest, self._decoded(values, rest), strict=True):
            found[column.id] = array
        schema = pa.schema([column.field for column in wanted])
        if not wanted:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(keys), pa.struct([])))
        batch = pa.RecordBatch.from_arrays([found[column.id] for column in wanted], schema=schema)
        fault = self._first_no_text(batch) if is_checked else None
        if fault is not None:
            raise self._unreadable(keys[fault[0]].as_py(), fault[1], fault[0])
        return batch

    def decoded(
        self, batches: Iterable[pa.RecordBatch], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of batches of keys and values. Raises as `decode`, behind the rows that come
        before the one that cannot be read."""
        for batch in batches:
            keys, values = batch.column(0), batch.column(1)
            try:
                yield self.decode(keys, values, columns)
            except UnknownLayoutError:
                raise
            except CorruptionError as error:
                row = next((row for row, _ in self.faults(keys, values)), 0)
                if row:
                    yield self.decode(keys.slice(0, row), values.slice(0, row), columns)
                if isinstance(error, UnreadableRowError):
                    raise
                raise self._unreadable(keys[row].as_py(), error.problem, row) from error

    def require_texts(self, batch: pa.RecordBatch) -> None:
        """Raise `UnreadableRowError` for a text that is no UTF-8 in rows that were decoded without
        a check."""
        fault = self._first_no_text(batch)
        if fault is not None:
            row, problem = fault
            told = (f"{name}={shown(batch.column(name), row)}" for name in batch.schema.names[:3])
            where = f"{self.definition.where}, the row with {', '.join(told)}"
            raise UnreadableRowError(where, problem, row)

    def faults(self, keys: pa.Array, values: pa.Array) -> Iterator[tuple[int, str]]:
        """The rows that cannot be read as their columns say, by place, each with the reason.
        Costs what decoding costs, and a search by halves for each such row."""
        try:
            batch = self.decode(keys, values, is_checked=False)
        except (CorruptionError, FormatVersionError) as error:
            if len(keys) == 1:
                if isinstance(error, CorruptionError):  # a newer release reads its own format
                    yield 0, error.problem
                return
            middle = len(keys) // 2
            yield from self.faults(keys.slice(0, middle), values.slice(0, middle))
            for row, why in self.faults(keys.slice(middle), values.slice(middle)):
                yield middle + row, why
            return
        found: dict[int, str] = {}
        for column in self.definition.columns:
            array = batch.column(column.name)
            for row in unheld(array):
                found.setdefault(row, _unheld(column, array, row))
        yield from sorted(found.items())

    def refused(
        self, keys: Sequence[bytes], values: Sequence[bytes], columns: Sequence[str] | None
    ) -> Iterator[UnreadableRowError]:
        """The errors of the rows that `decode` refuses. Decodes the rows one by one."""
        for row, (key, value) in enumerate(zip(keys, values, strict=True)):
            try:
                self.decode(binary_array([key]), binary_array([value]), columns)
            except UnknownLayoutError:  # noqa: PERF203  # a row that cannot be read is rare
                raise
            except CorruptionError as error:
                yield self._unreadable(key, error.problem, row)

    def schema_of(self, columns: Sequence[str] | None) -> pa.Schema:
        """The schema of `decode`."""
        if columns is None:
            return self.definition.schema
        return pa.schema([column.field for column in self._columns(columns)])

    # -- single rows ------------------------------------------------------------------------

    def row(self, values: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """Key and value of a row. Raises `UsageError` that names the column."""
        definition = self.definition
        if not values.keys() <= definition.by_name.keys():
            for name in values:
                definition.column(name)
        key = self.key.whole_key([values.get(column.name) for column in self.key.columns])
        if len(key) > KEY_BYTES_MAX:
            raise self._too_long(key)
        if definition.expires is not None:
            self._require_due_time(values)
        return key, self._writer.value([self.cell(column, values) for column in self._written])

    def _require_due_time(self, values: Mapping[str, Any]) -> None:
        column = self.definition.expiry_column
        assert column is not None, "there is one"
        cell = self.cell(column, values)
        if cell is not None:
            _require_due_times(self.definition, pa.array([cell], column.type), None)

    def entry(self, index: Index, row: Mapping[str, Any]) -> bytes:
        """The key of the entry that a row, with all columns, has in an index."""
        codec = self.index_codec(index)
        entry = codec.key([row[column.name] for column in codec.columns])
        if len(entry) > KEY_BYTES_MAX:
            raise self._too_long(entry)
        return entry

    def entries_of(self, key: bytes, value: bytes) -> list[bytes]:
        """The entries of a stored row, in the order of the indexes: also of a row that holds what
        its columns do not. None of them for bytes that are no row: what they led to is unknown, and
        entries that no row fits find nothing."""
        indexes = self.definition.indexes
        try:
            row = self.to_dict(key, value)
            return [self.entry(index, row) for index in indexes]
        except (UnknownLayoutError, FormatVersionError):
            raise
        except (CorruptionError, UsageError):
            pass
        try:
            batch = self.decode(binary_array([key]), binary_array([value]), is_checked=False)
        except CorruptionError:
            return []
        return [self.entries(index, batch)[0].as_py() for index in indexes]

    def cell(self, column: Column, values: Mapping[str, Any]) -> Any:
        """The stored cell of a column in a row; its default where the row lacks it."""
        value = values.get(column.name)
        if value is None:
            if column.default is not None and column.name not in values:
                return bytes_cell(column.kind, column.default)
            if not column.is_nullable:
                what = "is null" if column.name in values else "is missing"
                raise UsageError(
                    f"{self.definition.where}, column {column.name!r} {what}",
                    "it takes no null: give it a value",
                )
            return None
        try:
            return column.kind.stored(value)
        except ValueError as error:
            raise UsageError(
                f"{self.definition.where}, column {column.name!r}: {error}", "correct the value"
            ) from None

    def to_dict(
        self, key: bytes, value: bytes, columns: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        """The row of a key and a value, by column. Raises as `decode`, and `UnreadableRowError` for
        a time that Python does not have. Costs 0.4 us for eight columns."""
        try:
            row = self._newest.read(key, value) if columns is None else None
            return self._older(key, value, columns) if row is None else row
        except UnknownLayoutError:
            raise
        except (CorruptionError, OverflowError) as error:
            problem = error.problem if isinstance(error, CorruptionError) else str(error)
            raise self._unreadable(key, self._fault(key, value) or problem) from error

    def to_dicts(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        columns: tuple[str, ...] | None = None,
    ) -> list[Any]:
        """The rows of keys and values as `to_dict` has them; None for a value that is None."""
        reader = self._newest
        if columns is not None:
            reader = self._reader(self.definition.layout, columns)

        def otherwise(key: bytes, value: bytes) -> dict[str, Any]:
            return self._older(key, value, columns)

        try:
            return reader.read_all(keys, values, otherwise)
        except UnknownLayoutError:
            raise
        except (CorruptionError, OverflowError):  # one by one, so that the error names the row
            return [
                None if value is None else self.to_dict(key, value, columns)
                for key, value in zip(keys, values, strict=True)
            ]

    # -- inside -----------------------------------------------------------------------------

    def index_codec(self, index: Index) -> KeyCodec:
        """The keys of an index: its columns, and the columns of the key."""
        codec = self._indexes.get(index.number)
        if codec is None:
            prefix = index_prefix(self.definition.number, index.number)
            parts = (*index.parts, *self.definition.key)
            codec = self._indexes[index.number] = KeyCodec(self.definition, prefix, parts)
        return codec

    def row_keys(self, index: Index, entries: Sequence[bytes]) -> list[bytes]:
        """The keys of the rows that entries of an index lead to. Raises `CorruptionError` for
        bytes that are no entry."""
        return self.index_codec(index).row_keys(entries, len(index.parts), self.key.prefix)

    def fits(
        self, index: Index, entries: Sequence[bytes], rows: Sequence[dict[str, Any] | None]
    ) -> list[bool]:
        """Whether each entry of an index has the values of its row. A row has the columns of the
        index."""
        names = self.definition.parts_named(index.parts)
        return self.index_codec(index).fits(entries, rows, names)

    @cached_property
    def _written(self) -> list[Column]:
        return [self.definition.by_id[id_] for id_, _ in self._writer.layout]

    def _columns(self, names: Sequence[str] | None) -> list[Column]:
        if names is None:
            return list(self.definition.columns)
        if isinstance(names, str | bytes) or not isinstance(names, Sequence):
            raise UsageError(Argument.of("columns", names), "pass a list of names")
        found = [self.definition.column(name) for name in names]
        if len(set(names)) < len(found):
            raise UsageError(
                (Argument.of("columns", names), " names one twice"), "name each column once"
            )
        return found

    def _row_codec(self, number: int) -> RowCodec:
        codec = self._rows.get(number)
        if codec is None:
            if not 0 <= number < len(self.definition.layouts):
                raise UnknownLayoutError(self.definition.where, number)
            layout = self.definition.layouts[number]
            codec = self._rows[number] = RowCodec(number, layout, self.definition.where)
        return codec

    def _decoded(self, values: pa.Array, columns: Sequence[Column]) -> list[pa.Array]:
        """Columns beside the key of the rows of `values`, which may have several layouts."""
        if not columns:
            return []
        numbers = schema_numbers(values, self.definition.where)
        if not len(numbers):
            return [pa.nulls(0, column.type) for column in columns]
        first = int(numbers[0])
        if (numbers == first).all():
            return self._of_layout(values, first, columns)
        parts, places = [], []
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            parts.append(self._of_layout(values.take(pa.array(at)), number, columns))
            places.append(at)
        order = pa.array(np.argsort(np.concatenate(places), kind="stable"))
        return [pa.concat_arrays(column).take(order) for column in zip(*parts, strict=True)]

    def _of_layout(
        self, values: pa.Array, number: int, columns: Sequence[Column]
    ) -> list[pa.Array]:
        codec = self._row_codec(number)
        there = [column for column in columns if column.id in codec.place]
        arrays = codec.arrays(values, [codec.place[column.id] for column in there])
        found = {
            column.id: _widened(array, column) for column, array in zip(there, arrays, strict=True)
        }
        return [
            found[column.id] if column.id in found else default_array(column, len(values))
            for column in columns
        ]

    def _older(self, key: bytes, value: bytes, columns: tuple[str, ...] | None) -> dict[str, Any]:
        """A row of any layout as a dict."""
        number = schema_number(value, self.definition.where)
        row = self._reader(number, columns).read(key, value)
        assert row is not None, "its number was read"
        return row

    def _reader(self, number: int, names: tuple[str, ...] | None) -> RowDicts:
        """The loop that makes dicts of the rows of one layout."""
        reader = self._readers.get((number, names))
        if reader is None:
            codec = self._row_codec(number)
            wanted = self._columns(names)
            row: dict[str, Any] = {}
            cells: list[tuple[str, int, Callable[[Any], Any] | None]] = []
            for column in wanted:
                row[column.name] = None
                if column.id in codec.place:
                    place = codec.place[column.id]
                    cells.append((column.name, place, _widening(codec.layout[place][1], column)))
                elif column.default is not None:
                    row[column.name] = default_value(column)
            keys = self.key.reads(row.keys())
            where = self.definition.where
            reader = self._readers[number, names] = RowDicts(
                where, row, self.key.prefix, keys, number, codec.widths, codec.reads(cells)
            )
        return reader

    def _too_long(self, key: bytes) -> UsageError:
        return UsageError(
            f"{self.definition.where}: a key of the row, or of an index, has {len(key)} bytes",
            f"at most {KEY_BYTES_MAX} are allowed",
        )

    def _first_no_text(self, batch: pa.RecordBatch) -> tuple[int, str] | None:
        """The first row of a batch with a text that is no UTF-8, and the reason."""
        faults = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            column = self.definition.by_name[name]
            row = first_no_text(array, column.kind)
            if row is not None:
                faults.append((row, _unheld(column, array, row)))
        return min(faults, default=None)

    def _fault(self, key: bytes, value: bytes) -> str | None:
        found = self.faults(binary_array([key]), binary_array([value]))
        return next((problem for _, problem in found), None)

    def _unreadable(self, key: bytes, problem: str, row: int = 0) -> UnreadableRowError:
        where = f"{self.definition.where}, row {self.key.named(key)}"
        return UnreadableRowError(where, problem, row)


def _unheld(column: Column, array: pa.Array, row: int) -> str:
    return f"column {column.name!r} is {column.type}, which does not hold {shown(array, row)}"


def dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as `to_dict` gives them: nanoseconds are integers. Raises
    `CorruptionError` for a time that Python does not have."""
    return list(each_dict(batch))


def each_dict(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of `dicts`, one by one: an error comes behind the rows before it."""
    if not batch.num_columns:
        yield from ({} for _ in range(batch.num_rows))
        return
    columns, rows = [], batch.num_rows
    nested: dict[str, Callable[[Any], Any]] = {}
    problem = ""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        row = next(unheld(column), rows) if pa.types.is_temporal(column.type) else rows
        if row < rows:
            rows, problem = row, f"column {name!r} has {shown(column, row)}"
        if is_nested(column.type):
            value = kind_of(column.type).value
            assert value is not None, "bytes are no list"
            nested[name], column = value, nested_cells(column)
        columns.append(_values(column))
    whole = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).slice(0, rows)
    for number, found in enumerate(whole.to_pylist()):
        try:
            for name, value in nested.items():
                found[name] = None if found[name] is None else value(found[name])
        except (CorruptionError, OverflowError) as error:
            rows, problem = number, f"column {name!r} has {shown(batch.column(name), number)}"
            if isinstance(error, OverflowError):
                problem += f" ({error})"
            break
        yield found
    if problem:
        told = (f"{name}={shown(batch.column(name), rows)}" for name in batch.schema.names[:3])
        raise CorruptionError(
            f"the row with {', '.join(told)}",
            f"{problem}, and Python has no such value",
            "read the rows as Arrow, with scan; delete the row, or put it anew",
        )


def _values(column: pa.Array) -> pa.Array:
    """A column in a type that Arrow turns into values of Python, wherever the zone lies: its local
    time may lie behind the year 9999, and its name may be unknown here."""
    kind = column.type
    if getattr(kind, "unit", "") == "ns":
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind) and kind.tz not in (None, "UTC") and not _has_local(column):
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    return column


def _has_local(column: pa.Array) -> bool:
    """Whether the least and the greatest instant have a local time in the zone of the column."""
    import pyarrow.compute as pc

    try:
        pc.min_max(column).as_py()
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        return False
    return True


def row_dues(column: pa.Array) -> pa.Array:
    """The times at which rows expire, in a column of times with a zone, as nanoseconds: null for
    rows that stay, which have a null or a time behind the last one of a timeline. A time before
    1978, which only a row has that was written before the column told of expiries, is given as a
    later one that has passed too."""
    step = _step(column.type)
    times = column.cast(pa.int64())
    stays = pc.greater(times, (TIMESTAMP_MAX - 1) // step)
    times = pc.if_else(stays, pa.scalar(None, pa.int64()), times)
    least = OTHER_UNITS_MAX // step + 1
    times = pc.if_else(pc.less(times, least), least, times)
    return pc.multiply(times, step)


def _require_due_times(definition: Definition, column: pa.Array, first: int | None) -> None:
    """Raise `UsageError` for the first time of a column of expiries that is surely a mistake, by
    which the row would go at once: an instant made of a number of another unit. Row `first` is the
    first one; None for a single row."""
    expiry = definition.expiry_column
    assert expiry is not None, "there is one"
    least = OTHER_UNITS_MAX // _step(expiry.type)
    wrong = pc.index(pc.less_equal(column.cast(pa.int64()), least), True).as_py()
    if wrong >= 0:
        where = "" if first is None else f" in row {first + wrong}"
        instant = column[wrong : wrong + 1].cast(pa.timestamp(expiry.type.unit, "UTC"))
        raise UsageError(
            f"{definition.where}, column {expiry.name!r} has {instant.cast(pa.string())[0]}{where}:"
            " the row would expire at once",
            "pass a time from 1978 on, and null for a row that stays",
        )


def _step(type_: pa.DataType) -> int:
    """The nanoseconds of a unit."""
    return int(10 ** (9 - 3 * ("s", "ms", "us", "ns").index(type_.unit)))


def default_value(column: Column) -> Any:
    """The value that rows of older layouts have in a column."""
    if column.default is None:
        return None
    kind = column.kind
    cell = bytes_cell(kind, column.default)
    return cell if kind.value is None else kind.value(cell)


def default_array(column: Column, count: int) -> pa.Array:
    """`count` of the values that rows of older layouts have in a column."""
    if column.default is None:
        return pa.nulls(count, column.type)
    value = default_value(column)
    if is_nested(column.type):
        cells = pa.repeat(pa.scalar(column.default, pa.binary()), count)
        assert column.kind.node is not None, "the column is nested"
        return nested_array(column.kind.node, cells, f"column {column.name!r}")
    return pa.repeat(pa.array([value], column.type)[0], count)


def _widening(stored: pa.DataType, column: Column) -> Callable[[Any], Any] | None:
    """The function that turns a cell of the older type `stored` into a value of a column."""
    if stored == column.type:
        return None
    old, new = kind_of(stored), column.kind

    def widened(cell: Any) -> Any:
        cell = new.stored(cell if old.value is None else old.value(cell))
        return cell if new.value is None else new.value(cell)

    return widened


def _widened(array: pa.Array, column: Column) -> pa.Array:
    if array.type == column.type:
        return array
    try:
        return array.cast(column.type)
    except pa.ArrowInvalid as error:  # only a value that its own column did not hold
        raise CorruptionError(f"column {column.name!r}", str(error)) from error


# --------------------------------------------------------------------------------------------------
# Rows as they arrive, in the types of a table: Arrow batches, checked column by column.
#
# `exact.py` has the rule of the values that a column takes.
#
# Invariants
# 1. No value is changed.
# 2. An error names the column, and the row if one row is to blame.

_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")
"""The column that pandas makes of an index without a name."""


def conform(
    definition: Definition,
    batch: pa.RecordBatch,
    first: int = 0,
    what: str = "",
    *,
    only: Collection[str] | None = None,
) -> pa.RecordBatch:
    """A batch with the columns of a table, in their order and types. `first` is the number of its
    first row. With `only` the result has these columns, and no other one is looked at. Raises
    `UsageError`."""
    where = what or definition.where
    names = batch.schema.names
    for name in names:
        if name not in definition.by_name and _PANDAS_INDEX.fullmatch(name):
            raise UsageError(
                f"{where} has no column for the index of the frame, {name!r}",
                "leave the index out: frame.reset_index(drop=True); or name it as a column",
            )
        definition.column(name)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{where}: two columns {double!r}", "pass one")
    chosen = [each for each in definition.columns if only is None or each.name in only]
    columns = [_column(definition, column, batch, first) for column in chosen]
    due = definition.expiry_column
    if due is not None and due in chosen:
        _require_due_times(definition, columns[chosen.index(due)], first)
    schema = pa.schema([definition.schema.field(each.name) for each in chosen])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(definition: Definition, column: Column, batch: pa.RecordBatch, first: int) -> pa.Array:
    where = f"{definition.where}, column {column.name!r}"
    at = batch.schema.get_field_index(column.name)
    if at < 0:
        if column.default is None and not column.is_nullable:
            raise UsageError(f"{where} is missing", "it takes no null: give each row a value")
        return default_array(column, batch.num_rows)
    rule = ""
    if not column.is_nullable:
        is_key = column.id in definition.key_ids
        rule = "a key is never null" if is_key else "it takes no null: give each row a value"
    return same_values(batch.column(at), column.type, where, first, no_null=rule)


def key_values(
    batches: Sequence[pa.RecordBatch], first: int, name: str, type_: pa.DataType
) -> pa.Array:
    """Column `name` of the labels in `batches`, of which the first is row `first`, in the type of a
    column of a key. Raises `UsageError` for a null, and as `same_values` does."""
    found: list[pa.Array] = []
    for batch in batches:
        column = plain(batch.column(name), f"column {name!r}")
        if column.null_count:
            row = first + pc.index(column.is_null(), True).as_py()
            raise UsageError(f"column {name!r} has a null in row {row}", "drop such labels first")
        found.append(same_values(column, type_, f"the key of column {name!r}", first))
        first += batch.num_rows
    return pa.concat_arrays(found)


def batches_of(definition: Definition, data: object) -> Iterator[pa.RecordBatch]:
    """The rows of anything that speaks Arrow, in batches with the columns of a table."""
    first = 0
    for batch in record_batches(data):
        yield conform(definition, batch, first)
        first += batch.num_rows


def record_batches(data: object) -> Iterator[pa.RecordBatch]:
    """The batches of anything that speaks Arrow. Raises `UsageError` for anything else."""
    try:
        if isinstance(data, pa.RecordBatch):
            return iter([data])
        if isinstance(data, pa.RecordBatchReader):
            return iter(data)
        if hasattr(data, "__arrow_c_stream__"):
            return iter(pa.RecordBatchReader.from_stream(data))
        if hasattr(data, "__arrow_c_array__"):
            return iter([pa.record_batch(data)])
        found = list(data) if isinstance(data, list | tuple | Iterator) else []
        if found and all(isinstance(each, pa.RecordBatch) for each in found):
            return iter(found)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(f"the rows are no table: {error}", "pass a table with columns") from error
    raise UsageError(
        f"rows must be Arrow data, not {type(data).__name__}",
        "pass a table, batches, a reader, or a frame of Polars, DuckDB or pandas",
    )
