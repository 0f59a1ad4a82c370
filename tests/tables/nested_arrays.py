"""Arrays of lists, structs and maps, of all shapes that Arrow has for them, and what they mean."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from kvstore.tables.nested import fields_of, is_list, is_nested, with_fields
from tests.tables import arrays

LEAVES = [each for each in arrays.COLUMNS if each != pa.binary(0)]
KEYS = [each for each in LEAVES if arrays.family(each) not in ("float", "uuid")]


class RefusedError(Exception):
    """A column does not hold a value."""


@st.composite
def columns(draw: st.DrawFn, depth: int = 3) -> pa.DataType:
    """A type of columns of lists, structs or maps."""
    shape = draw(st.sampled_from(["list", "large", "fixed", "struct", "map"]))

    def inner(name: str, is_nullable: bool | None = None) -> pa.Field:
        is_flat = depth == 1 or draw(st.booleans())
        type_ = draw(st.sampled_from(LEAVES)) if is_flat else draw(columns(depth - 1))
        return pa.field(name, type_, draw(st.booleans()) if is_nullable is None else is_nullable)

    if shape == "struct":
        return pa.struct([inner(name) for name in draw(st.sampled_from(["a", "ab", "ab c"]))])
    if shape == "map":
        return pa.map_(draw(st.sampled_from(KEYS)), inner("value"))
    if shape == "fixed":
        return pa.list_(inner("item"), draw(st.integers(1, 3)))
    return pa.list_(inner("item")) if shape == "list" else pa.large_list(inner("item"))


@st.composite
def sources(draw: st.DrawFn, column: pa.DataType) -> pa.DataType:
    """A type whose arrays come to a column: mostly one that it takes."""
    if not is_nested(column):
        if draw(st.integers(0, 30)) == 0:
            return draw(st.sampled_from(arrays.SOURCES))
        fitting = [each for each in arrays.SOURCES if arrays.takes(column, each)]
        return draw(st.just(column) | st.sampled_from(fitting))
    found = []
    for field in fields_of(column):
        is_key = pa.types.is_map(column) and field.name == "key"
        inner = field.type if is_key else draw(sources(field.type))
        found.append(pa.field(field.name, inner))
    if pa.types.is_struct(column):
        order = draw(st.permutations(found))
        return pa.struct(order[: max(1, len(order) - draw(st.sampled_from([0, 0, 0, 1])))])
    if pa.types.is_map(column):
        return with_fields(column, found)
    shape = draw(st.sampled_from(["same", "list", "large", "view", "large view", "fixed"]))
    (item,) = found
    made = {
        "same": lambda: with_fields(column, found),
        "list": lambda: pa.list_(item),
        "large": lambda: pa.large_list(item),
        "view": lambda: pa.list_view(item),
        "large view": lambda: pa.large_list_view(item),
        "fixed": lambda: pa.list_(item, draw(st.integers(0, 3))),
    }
    return made[shape]()


@st.composite
def arrays_of(draw: st.DrawFn, source: pa.DataType, *, is_key: bool = False) -> pa.Array:
    """An array of a type: with anything below nulls, in front and behind."""
    if not is_nested(source) and "list_view" not in str(source):
        found = draw(arrays.flat(source)) if is_key else draw(arrays.arrays(source))
        return found.drop_null() if is_key else found
    if pa.types.is_struct(source):
        parts = [draw(arrays_of(field.type)) for field in source]
        count = min(map(len, parts))
        parts = [part.slice(len(part) - count) for part in parts]
        fields = [pa.field(f.name, p.type) for f, p in zip(source, parts, strict=True)]
        found = pa.StructArray.from_arrays(parts, fields=fields, mask=draw(masks(count)))
    elif pa.types.is_fixed_size_list(source):
        items = draw(arrays_of(source.value_type))
        count = len(items) // source.list_size if source.list_size else draw(st.integers(0, 3))
        items = items.slice(len(items) - count * source.list_size)
        found = (
            pa.FixedSizeListArray.from_arrays(
                items, type=pa.list_(items.type, source.list_size), mask=draw(masks(count))
            )
            if source.list_size
            else pa.Array.from_buffers(pa.list_(items.type, 0), count, [None], children=[items])
        )
    else:
        found = draw(_lists(source))
    first = draw(st.integers(0, len(found)))
    return found.slice(first, draw(st.integers(0, len(found))))


@st.composite
def _lists(draw: st.DrawFn, source: pa.DataType) -> pa.Array:
    is_map = pa.types.is_map(source)
    if is_map:
        keys = draw(arrays_of(source.key_type, is_key=True))
        items = draw(arrays_of(source.item_type))
        count = min(len(keys), len(items))
        keys, items = keys.slice(0, count), items.slice(len(items) - count)
    else:
        items = draw(arrays_of(source.value_type))
    most = len(items)
    cuts = sorted(draw(st.lists(st.integers(0, most), min_size=1, max_size=5)))
    mask = draw(masks(len(cuts) - 1))
    if is_map:
        offsets = pa.array(cuts, pa.int32())
        return pa.MapArray.from_arrays(offsets, keys, items, mask=mask)
    width = pa.int64() if str(source).startswith("large") else pa.int32()
    if "view" in str(source).partition("<")[0]:
        starts = pa.array(cuts[:-1][::-1], width)
        sizes = pa.array([draw(st.integers(0, most - at)) for at in cuts[:-1][::-1]], width)
        make = pa.ListViewArray if width == pa.int32() else pa.LargeListViewArray
        return make.from_arrays(starts, sizes, items, mask=mask)
    make = pa.ListArray if width == pa.int32() else pa.LargeListArray
    return make.from_arrays(pa.array(cuts, width), items, mask=mask)


def masks(count: int) -> st.SearchStrategy[pa.Array | None]:
    made = st.lists(st.booleans(), min_size=count, max_size=count)
    return st.none() | made.map(lambda each: pa.array(each, pa.bool_()))


def takes(column: pa.DataType, source: pa.DataType) -> bool:
    """Whether a column takes arrays of a type at all."""
    if pa.types.is_dictionary(source) or pa.types.is_run_end_encoded(source):
        return takes(column, source.value_type)
    if not is_nested(column):
        return arrays.takes(column, source)
    if pa.types.is_struct(column):
        types = {field.name: field.type for field in column}
        return all(takes(types[field.name], field.type) for field in source)
    if pa.types.is_map(column):
        pairs = (column.key_type, source.key_type), (column.item_type, source.item_type)
        return all(takes(*pair) for pair in pairs)
    return takes(column.value_type, source.value_type)


def meanings(array: pa.Array) -> list[Any]:
    """The values of an array: lists, dicts, pairs, and what `arrays.meanings` gives."""
    kind = array.type
    if pa.types.is_struct(kind):
        parts = [meanings(array.field(at)) for at in range(kind.num_fields)]
        names = [field.name for field in kind]
        rows = zip(*parts, strict=True)
        return [
            dict(zip(names, row, strict=True)) if is_valid else None
            for row, is_valid in zip(rows, array.is_valid().to_pylist(), strict=True)
        ]
    has_items = is_list(kind) or "list_view" in str(kind).partition("<")[0]
    if not has_items and not pa.types.is_map(kind):
        return arrays.meanings(array)
    found: list[Any] = []
    for at, is_valid in enumerate(array.is_valid().to_pylist()):
        if not is_valid:
            found.append(None)
        elif pa.types.is_map(kind):
            start, end = array.offsets[at].as_py(), array.offsets[at + 1].as_py()
            pairs = zip(
                meanings(array.keys.slice(start, end - start)),
                meanings(array.items.slice(start, end - start)),
                strict=True,
            )
            found.append(list(pairs))
        else:
            found.append(meanings(array[at].values))
    return found


def held(column: pa.DataType, source: pa.DataType, value: Any) -> Any:
    """The meaning that a value has in a column. Raises `RefusedError` where the column does not
    hold it."""
    if value is None:
        return None
    if pa.types.is_dictionary(source) or pa.types.is_run_end_encoded(source):
        return held(column, source.value_type, value)
    if not is_nested(column):
        if not arrays.holds(column, source, value):
            raise RefusedError
        return arrays.as_meaning(column, source, value)

    def inner(field: pa.Field, given: pa.DataType, each: Any) -> Any:
        if each is None and not field.nullable:
            raise RefusedError
        return held(field.type, given, each)

    if pa.types.is_struct(column):
        types = {field.name: field.type for field in source}
        return {
            field.name: inner(field, types.get(field.name, field.type), value.get(field.name))
            for field in column
        }
    if pa.types.is_map(column):
        keys = [held(column.key_type, source.key_type, key) for key, _ in value]
        if any(key in keys[:at] for at, key in enumerate(keys)):
            raise RefusedError
        items = [inner(column.item_field, source.item_type, item) for _, item in value]
        return list(zip(keys, items, strict=True))
    if pa.types.is_fixed_size_list(column) and len(value) != column.list_size:
        raise RefusedError
    return [inner(column.value_field, source.value_type, item) for item in value]
