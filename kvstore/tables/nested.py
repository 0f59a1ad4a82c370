"""Lists, structs and maps in a column: their types, and a value as the bytes that a row has.

    value  := fixed                               a flat type of fixed width: see `loops/rows.pyx`
            | size | bytes |                      a flat type whose width varies
            | number | values |                   list, large list; map: structs of key and value
            | has_nulls u8 | values |             list of fixed size
            | nulls | value... |                  struct: each field that is not null, in order
    values := nulls? value...                     each that is not null, one behind the other
    nulls  := one bit for each, from the lowest bit of the first byte on; 1 is a null
    size   := how many bytes, in base 128: lower digits first, the highest bit set but in the last
    number := twice how many values, and 1 if there are nulls; as `size`
    has_nulls := 1 if there are nulls, else 0

A value stands where a row has the bytes of a text. Nothing is stored of what lies below a null. A
list of floats without nulls is their bytes behind its number, so a vector is copied as a whole.

Invariants
1. A value has one form: equal values have equal bytes, whatever array or object they came from.
2. `taken` gives what `put` was given, as lists, dicts and the values of flat columns.
3. Bytes that are no value of the type are refused, and one value makes at most `NESTED_SLOTS_MAX`
   values of its lists.

The loops of `kvstore.loops.nested` do the same with Arrow's columns.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import NESTED_DEPTH_MAX, NESTED_NODES_MAX, NESTED_SLOTS_MAX
from kvstore.loops import shapes

# --------------------------------------------------------------------------------------------------
# Types.


def is_list(type_: pa.DataType) -> bool:
    """Whether values of the type are lists."""
    types = pa.types
    return bool(
        types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    )


def is_nested(type_: pa.DataType) -> bool:
    """Whether a column of the type holds lists, structs or maps."""
    if not type_.num_fields:  # asked of each column of each batch: 70 ns, and not 300
        return False
    return is_list(type_) or bool(pa.types.is_struct(type_) or pa.types.is_map(type_))


def fields_of(type_: pa.DataType) -> list[pa.Field]:
    """What lies in a nested type: the items of a list, the fields of a struct, key and value."""
    if pa.types.is_map(type_):
        return [type_.key_field, type_.item_field]
    return [type_.field(at) for at in range(type_.num_fields)]


def with_fields(type_: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType:
    """A nested type with other types in it. Its parts get the names that Arrow gives by itself."""
    if pa.types.is_struct(type_):
        return pa.struct(fields)
    if pa.types.is_map(type_):
        key, item = fields
        item = pa.field("value", item.type, item.nullable)
        return pa.map_(pa.field("key", key.type, nullable=False), item, type_.keys_sorted)
    field = pa.field("item", fields[0].type, fields[0].nullable)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(field, type_.list_size)
    return pa.large_list(field) if pa.types.is_large_list(type_) else pa.list_(field)


def canonical(type_: pa.DataType) -> pa.DataType:
    """A type without the names of its lists' items and without metadata: Arrow compares types
    without them, and a table keeps neither."""
    if not is_nested(type_):
        return type_
    plain = [pa.field(each.name, canonical(each.type), each.nullable) for each in fields_of(type_)]
    return with_fields(type_, plain)


def mapped(type_: pa.DataType, flat: Callable[[pa.DataType], pa.DataType | None]) -> Any:
    """A type whose flat types are replaced. None if `flat` gives None for one of them."""
    if not is_nested(type_):
        return flat(type_)
    found = []
    for field in fields_of(type_):
        inner = mapped(field.type, flat)
        if inner is None:
            return None
        found.append(pa.field(field.name, inner, field.nullable))
    return with_fields(type_, found)


def only_lists(type_: pa.DataType) -> pa.DataType:
    """A type with plain lists in place of large ones and those of fixed size."""
    if not is_nested(type_):
        return type_
    plain = [pa.field(each.name, only_lists(each.type), each.nullable) for each in fields_of(type_)]
    return pa.list_(plain[0]) if is_list(type_) else with_fields(type_, plain)


def require_type(type_: pa.DataType, flat: Callable[[pa.DataType], Any]) -> None:
    """Raise `UsageError` for a nested type of which a table has no columns. `flat` raises for a
    flat type."""
    count = 0

    def look(inner: pa.DataType, depth: int) -> int:
        nonlocal count
        count += 1
        if not is_nested(inner):
            flat(inner)
            if pa.types.is_fixed_size_binary(inner) and not inner.byte_width:
                raise UsageError("a list of binaries of no bytes", "use binary")
            return 0
        if depth > NESTED_DEPTH_MAX or count > NESTED_NODES_MAX:
            what = f"{NESTED_DEPTH_MAX} types within each other, {NESTED_NODES_MAX} in all"
            raise UsageError(f"a column has a type too deep or too large: at most {what}", "cut it")
        fields = fields_of(inner)
        names = [field.name for field in fields]
        if len(set(names)) < len(names) or "" in names:
            raise UsageError(
                f"a struct with the fields {', '.join(map(repr, names))}",
                "give it fields, each with a name of its own",
            )
        if pa.types.is_map(inner) and (
            is_nested(fields[0].type) or pa.types.is_floating(fields[0].type)
        ):
            raise UsageError(
                f"the keys of a map are {fields[0].type}",
                "use text, integers or another flat type without fractions; or a list of structs",
            )
        rooms = [look(field.type, depth + 1) for field in fields]
        if pa.types.is_fixed_size_list(inner):
            if not inner.list_size:
                raise UsageError("lists of no values, each of fixed size", "use list")
            rooms = [inner.list_size * (1 + rooms[0])]
        if sum(rooms) > NESTED_SLOTS_MAX >> 4:
            raise UsageError(f"lists of {sum(rooms)} values in {inner}"[:1000], "use list")
        return sum(rooms) if pa.types.is_fixed_size_list(inner) or _is_struct(inner) else 0

    look(type_, 1)


def _is_struct(type_: pa.DataType) -> bool:
    return bool(pa.types.is_struct(type_))


_PLAIN_NAME: Final = re.compile(r"[^\W\d]\w*(?: \w+)*", re.ASCII)


def type_text(type_: pa.DataType) -> str:
    """A type as `parse_type` reads it: as Arrow prints it, with names in quotes that are no words,
    and `not null` also in maps."""
    if not is_nested(type_):
        return str(type_)
    fields = fields_of(type_)
    inner = [f"{type_text(field.type)}{'' if field.nullable else ' not null'}" for field in fields]
    if pa.types.is_map(type_):
        inner[0] = type_text(fields[0].type)
        sorted_ = ", keys_sorted" if type_.keys_sorted else ""
        return f"map<{', '.join(inner)}{sorted_}>"
    names = (
        field.name if _PLAIN_NAME.fullmatch(field.name) else json.dumps(field.name)
        for field in fields
    )
    text = ", ".join(f"{name}: {each}" for name, each in zip(names, inner, strict=True))
    if _is_struct(type_):
        return f"struct<{text}>"
    if pa.types.is_fixed_size_list(type_):
        return f"fixed_size_list<{text}>[{type_.list_size}]"
    return f"{'large_' if pa.types.is_large_list(type_) else ''}list<{text}>"


_OPENING: Final = re.compile(r"\s*(list|large_list|fixed_size_list|struct|map)\s*<")
_FLAT: Final = re.compile(r"\s*(extension<[^<>]*>|(?:[^<>,()\[\]]|\([^()]*\)|\[[^\[\]]*\])+)")
_NAME: Final = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|([^\W\d]\w*(?: \w+)*))\s*:\s*', re.ASCII)
_NOT_NULL: Final = re.compile(r"\s+not null(?=\s*[,>])")
_SIZE: Final = re.compile(r"\s*\[(\d{1,9})\]")
_SIGN: Final = re.compile(r"\s*([,>])")
_SORTED: Final = re.compile(r"\s*,\s*keys_sorted\s*>")


def parse_nested(text: str, flat: Callable[[str], pa.DataType]) -> pa.DataType:
    """The nested type that a text tells: `list<double>`, `fixed_size_list<float>[3]`,
    `struct<a: int64, b: string not null>`, `map<string, int64>`. `flat` reads flat types. Raises
    `ValueError` for another text, and as `flat` does."""
    text, at = text.strip(), 0

    def take(pattern: re.Pattern[str]) -> re.Match[str] | None:
        nonlocal at
        found = pattern.match(text, at)
        if found:
            at = found.end()
        return found

    def need(found: re.Match[str] | None) -> re.Match[str]:
        if found is None:
            raise ValueError(f"unknown type {text!r:.200}")
        return found

    def inner(depth: int) -> tuple[pa.DataType, bool]:
        """A type within another one, and whether it may be null."""
        found = one(depth)
        return found, take(_NOT_NULL) is None

    def one(depth: int) -> pa.DataType:
        nonlocal at
        if depth > NESTED_DEPTH_MAX + 1:
            raise ValueError(f"more than {NESTED_DEPTH_MAX} types within each other")
        opening = take(_OPENING)
        if opening is None:
            given = need(take(_FLAT)).group(1)
            word = given.rstrip()
            at -= len(given) - len(word)
            if word.endswith(" not null"):
                at -= len(" not null")
                word = word.removesuffix(" not null")
            return flat(word.strip())
        kind, fields = opening.group(1), []
        while True:
            name = None if kind == "map" else take(_NAME)
            if kind == "struct":
                need(name)
            type_, is_nullable = inner(depth + 1)
            quoted = name and name.group(1)
            called = "" if name is None else json.loads(quoted) if quoted else name.group(2)
            fields.append(pa.field(called, type_, is_nullable))
            if kind == "map" and take(_SORTED):
                is_sorted, sign = True, ">"
            else:
                is_sorted, sign = False, need(take(_SIGN)).group(1)
            if sign == ">":
                break
        if kind == "struct":
            return pa.struct(fields)
        if len(fields) != (2 if kind == "map" else 1):
            raise ValueError(f"unknown type {text!r:.200}")
        if kind == "map":
            return canonical(pa.map_(fields[0].type, fields[1], is_sorted))
        if kind == "fixed_size_list":
            return canonical(pa.list_(fields[0], int(need(take(_SIZE)).group(1))))
        return canonical((pa.list_ if kind == "list" else pa.large_list)(fields[0]))

    found = one(1)
    if at != len(text) or not is_nested(found):
        raise ValueError(f"unknown type {text!r:.200}")
    return found


# --------------------------------------------------------------------------------------------------
# Values of Python as bytes, and back.


@dataclass(frozen=True)
class TypeNode:
    """A type within a column. `leaf` is the kind of a flat one."""

    type: pa.DataType
    is_nullable: bool
    inner: tuple[TypeNode, ...]
    names: tuple[str, ...]
    """The fields of a struct."""
    leaf: Any
    packed: struct.Struct | None
    room: int
    """The values of lists that Arrow keeps below a null."""

    @property
    def kind(self) -> int:
        """The kind of node of `kvstore.loops.nested`."""
        if self.leaf is not None:
            return shapes.NODE_FIXED if self.leaf.width else shapes.NODE_VARYING
        if pa.types.is_fixed_size_list(self.type):
            return shapes.NODE_SLOTS
        return shapes.NODE_FIELDS if _is_struct(self.type) else shapes.NODE_LIST


def node_of(type_: pa.DataType, kind_of: Callable[[pa.DataType], Any]) -> TypeNode:
    """The tree of a type. `kind_of` gives the kinds of flat types."""

    def made(field: pa.Field) -> TypeNode:
        if not is_nested(field.type):
            leaf = kind_of(field.type)
            packed = struct.Struct(f"<{leaf.code}") if leaf.width else None
            return TypeNode(field.type, field.nullable, (), (), leaf, packed, 0)
        fields = fields_of(field.type)
        inner = tuple(made(each) for each in fields)
        room = 0
        if pa.types.is_map(field.type):  # the loops see a list of structs
            names = ("key", "value")
            entries = pa.struct(
                [
                    pa.field(name, each.type, each.nullable)
                    for name, each in zip(names, fields, strict=True)
                ]
            )
            inner = (TypeNode(entries, False, inner, names, None, None, 0),)
        elif pa.types.is_fixed_size_list(field.type):
            room = field.type.list_size * (1 + inner[0].room)
        elif _is_struct(field.type):
            room = sum(each.room for each in inner)
        names = tuple(each.name for each in fields) if _is_struct(field.type) else ()
        return TypeNode(field.type, field.nullable, inner, names, None, None, room)

    return made(pa.field("", type_))


def has_texts(node: TypeNode) -> bool:
    """Whether texts lie in a value."""
    return any(map(has_texts, node.inner)) or (
        node.leaf is not None and node.leaf.way == shapes.TEXT
    )


def shape_of(node: TypeNode) -> list[shapes.NestedNode]:
    """A tree as the loops take it: each node before the ones below it."""
    below = list(chain.from_iterable(map(shape_of, node.inner)))
    width = 0
    if node.leaf is not None:
        width = node.leaf.width
    elif node.kind == shapes.NODE_SLOTS:
        width = node.type.list_size
    return [(node.kind, width, node.is_nullable, len(below)), *below]


class _Put:
    """The bytes of a value, as they are made."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.left = NESTED_SLOTS_MAX

    def number(self, number: int) -> None:
        """A number in base 128."""
        digits = bytearray()
        while number >= 128:
            digits.append(number & 127 | 128)
            number >>= 7
        digits.append(number)
        self.parts.append(bytes(digits))

    def count(self, slots: int) -> None:
        """Count values of lists."""
        self.left -= slots
        if self.left < 0:
            raise ValueError(f"its lists have more than {NESTED_SLOTS_MAX} values")

    def value(self, node: TypeNode, value: Any) -> None:
        """A value that is not null."""
        if node.leaf is not None:
            cell = node.leaf.stored(value)
            if node.packed is None:
                self.number(len(cell))
                self.parts.append(cell)
            else:
                self.parts.append(node.packed.pack(cell))
        elif node.names:
            self._fields(node, value)
        elif pa.types.is_map(node.type):
            pairs = _pairs(node, value)
            self.count(len(pairs))
            self.number(len(pairs) << 1)
            for pair in pairs:
                self._fields(node.inner[0], dict(zip(("key", "value"), pair, strict=True)))
        else:
            self._items(node, _items(value))

    def _fields(self, node: TypeNode, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r:.100} is no dict of the fields {', '.join(node.names)}")
        if not value.keys() <= set(node.names):
            wrong = next(name for name in value if name not in node.names)
            raise ValueError(f"there is no field {wrong!r:.100}, but {', '.join(node.names)}")
        nulls, place = 0, len(self.parts)
        self.parts.append(b"")
        for at, (name, inner) in enumerate(zip(node.names, node.inner, strict=True)):
            found = value.get(name)
            try:
                if found is None:
                    nulls |= 1 << at
                    self.count(inner.room)
                    _require_nullable(inner)
                else:
                    self.value(inner, found)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        self.parts[place] = nulls.to_bytes((len(node.names) + 7) // 8, "little")

    def _items(self, node: TypeNode, items: Sequence[Any]) -> None:
        (inner,) = node.inner
        count, nulls = len(items), items.count(None)
        is_fixed = node.kind == shapes.NODE_SLOTS
        if is_fixed and count != node.type.list_size:
            raise ValueError(f"{count} values, not {node.type.list_size}")
        self.count(count + nulls * inner.room)
        if is_fixed:
            self.parts.append(b"\x01" if nulls else b"\x00")
        else:
            self.number(count << 1 | (nulls > 0))
        if nulls:
            _require_nullable(inner)
            bits = np.array([item is None for item in items], bool)
            self.parts.append(np.packbits(bits, bitorder="little").tobytes())
        elif (packed := _packed(inner, items)) is not None:
            self.parts.append(packed)
            return
        for at, item in enumerate(items):
            if item is not None:
                try:
                    self.value(inner, item)
                except ValueError as error:
                    raise ValueError(f"item {at}: {error}") from None


def _require_nullable(node: TypeNode) -> None:
    if not node.is_nullable:
        raise ValueError("it is null, and takes no null")


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, np.ndarray) and value.ndim:
        if value.dtype.kind in "mM":
            return list(value)
        value = value.tolist()
    elif not isinstance(value, list | tuple):
        if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(
            value, Sequence
        ):
            raise ValueError(f"{value!r:.100} is no list")
        value = list(value)
    return value  # type: ignore[no-any-return]  # one of both


def _pairs(node: TypeNode, value: Any) -> list[tuple[Any, Any]]:
    pairs = list(value.items()) if isinstance(value, Mapping) else list(_items(value))
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{value!r:.100} is no dict and no list of pairs")
    keys = [pair[0] for pair in pairs]
    try:
        distinct = len(set(keys))
    except TypeError:
        raise ValueError(f"{value!r:.100} has keys of another type") from None
    if distinct < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has two keys {twice!r:.100}")
    if node.type.keys_sorted and any(one > two for one, two in pairwise(keys)):
        raise ValueError("its keys do not ascend")
    return pairs


def _packed(node: TypeNode, items: Sequence[Any]) -> bytes | None:
    """Many floats or integers at once. None for what must be looked at one by one: 768 floats take
    20 us, and 200 us one by one."""
    leaf, is_float = node.leaf, pa.types.is_floating(node.type)
    if not is_float and not pa.types.is_integer(node.type):
        return None
    wanted = float if is_float else int
    if set(map(type, items)) != {wanted}:
        return None
    code = f"<{len(items)}{leaf.code}"
    try:
        packed = struct.pack(code, *items)
    except (struct.error, OverflowError):
        return None
    if leaf.code == "f" and list(struct.unpack(code, packed)) != list(items):
        return None
    return packed


_SIMPLE: Final = tuple("bBhHiIqQfd")


def stored_of(node: TypeNode) -> Callable[[Any], bytes]:
    """The function that makes the bytes of a value of Python. It raises `ValueError`."""

    def stored(value: Any) -> bytes:
        put = _Put()
        put.value(node, value)
        return b"".join(put.parts)

    return stored


class _Taken:
    """The bytes of a value, as they are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.here = 0
        self.left = NESTED_SLOTS_MAX

    def bytes_(self, size: int) -> bytes:
        if size > len(self.data) - self.here:
            raise _no_value()
        self.here += size
        return self.data[self.here - size : self.here]

    def number(self) -> int:
        found = shift = 0
        while shift <= 49:
            (byte,) = self.bytes_(1)
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                if not byte and shift > 7:
                    break
                return found
        raise _no_value()

    def nulls(self, count: int) -> list[int]:
        """Which of `count` values are null."""
        bits = np.frombuffer(self.bytes_((count + 7) // 8), np.uint8)
        found: list[int] = np.unpackbits(bits, bitorder="little").tolist()
        if any(found[count:]):
            raise _no_value()
        return found[:count]

    def value(self, node: TypeNode) -> Any:
        if node.leaf is not None:
            leaf, cell = node.leaf, self.bytes_(node.leaf.width or self.number())
            if node.packed is not None:
                (cell,) = node.packed.unpack(cell)
            return cell if leaf.value is None else leaf.value(cell)
        if node.names:
            nulls = self.nulls(len(node.names))
            found: dict[str, Any] = {}
            for is_null, name, inner in zip(nulls, node.names, node.inner, strict=True):
                if is_null:
                    if not inner.is_nullable:
                        raise _no_value()
                    self.left -= inner.room
                    found[name] = None
                else:
                    found[name] = self.value(inner)
            return found
        (inner,) = node.inner
        if node.kind == shapes.NODE_SLOTS:
            (has_nulls,) = self.bytes_(1)
            if has_nulls > 1:
                raise _no_value()
            return self._items(inner, node.type.list_size, has_nulls=bool(has_nulls))
        number = self.number()
        items = self._items(inner, number >> 1, has_nulls=bool(number & 1))
        if not pa.types.is_map(node.type):
            return items
        pairs = {item["key"]: item["value"] for item in items}
        if len(pairs) < len(items):
            raise CorruptionError("a value of a column", "its map has a key twice")
        return pairs

    def _items(self, node: TypeNode, count: int, *, has_nulls: bool) -> list[Any]:
        self.left -= count
        if self.left < 0 or (has_nulls and not node.is_nullable):
            raise _no_value()
        nulls = self.nulls(count) if has_nulls else [0] * count
        if not has_nulls and node.packed is not None:
            leaf = node.leaf
            cells = self.bytes_(count * leaf.width)
            if leaf.value is None and leaf.code in _SIMPLE:
                return list(struct.unpack(f"<{count}{leaf.code}", cells))
            found = (cell for (cell,) in node.packed.iter_unpack(cells))
            return list(found if leaf.value is None else map(leaf.value, found))
        self.left -= sum(nulls) * node.room
        if self.left < 0:
            raise _no_value()
        return [None if is_null else self.value(node) for is_null in nulls]


def _no_value() -> CorruptionError:
    return CorruptionError("a value of a column", "its bytes are no value of its type")


def value_of(node: TypeNode) -> Callable[[bytes], Any]:
    """The function that reads the bytes of a value. It raises `CorruptionError` for bytes that are
    none, and `OverflowError` for a time that Python does not have."""

    def value(stored: bytes) -> Any:
        taken = _Taken(stored)
        try:
            found = taken.value(node)
        except UnicodeDecodeError as error:
            raise CorruptionError("a value of a column", f"no UTF-8: {error}") from None
        if taken.here != len(stored):
            raise _no_value()
        return found

    return value
