"""What a column of a table may hold: one rule for every door through which values come.

    door                                                       how it asks
    put_batch, loads of files, pushes, Spark, and the rows     `codec.conform`: a batch of any
      that a client sent                                         schema becomes one of the table
    labels of a join                                           `codec.key_values`, `same_values`
    TableCodec.encode and entries, behind each of these        `require_held`
    put, update, lists of dicts, defaults, words of a shell    `Kind.stored`, value by value

A door passes an Arrow array, the type of the column, the words that name the column, and the number
of the first row. It gets the values in that type, or a `UsageError` that names column and row,
before anything is written.

    column             takes                                and of these
    bool               booleans                             all
    integer            integers, decimals                   those in its range, without a fraction
    float              floats, integers                     those that it holds exactly; NaN too
    decimal            decimals, integers                   those that fit without rounding
    text               texts                                those that are UTF-8
    binary             binaries                             all
    fixed binary       binaries                             those of its length
    UUID               UUIDs, binaries                      those of 16 bytes
    date               dates                                years 1 to 9999
    timestamp          timestamps, with a zone if the       years 1 to 9999, whole units
                         column has one, without otherwise
    time of day        times of day                         below 24:00, whole units
    duration           durations                            to 999,999,999 days, whole units
    any of the last    integers, where the column counts    the same
      three              nanoseconds
    list               lists of any kind                    those whose values it holds; of fixed
                                                              size: those of its length
    struct             structs without other fields         those whose fields it holds; a field
                                                              that is missing is null
    map                maps, lists of structs of a key      those whose keys and values it holds,
                         and a value                          each key once

An array may be a dictionary (categories, enums), run-end encoded, large, or of views, and its type
may be wider or narrower than the column's: the values decide. `Kind.stored` takes the values of
Python and numpy that mean the same.

Invariants
1. No value is changed: it goes in exactly, or is refused. In keys and indexes alone, -0.0 is 0.0
   and all NaN are one.
2. An array and its values one by one are taken or refused alike. Arrow's casts decide where they
   agree with `Kind.stored`; otherwise `Kind.stored` does.
3. A value that passed is read back as Arrow has it, and as Python has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import UsageError
from kvstore.loops import shapes
from kvstore.tables.definition import Kind, kind_of
from kvstore.tables.nested import fields_of, has_texts, is_list, is_nested

_DIGITS_OF_LONG: Final = 18
"""Digits of a decimal whose integer surely fits 64 bits."""


def same_values(
    given: pa.Array, type_: pa.DataType, where: str, first: int, *, no_null: str = ""
) -> pa.Array:
    """The same values in the type of a column.

    Raises `UsageError` that says `where`, for a type of another kind and for the first value that
    the column does not hold; `first` is the number of the first value. With `no_null`, which says
    why, a null is refused too. Costs a look at each text, and a look at the least and the greatest
    of times and decimals.
    """
    array = plain(given, where)
    is_null = pa.types.is_null(array.type)
    if not is_null and not _is_of_family(array.type, type_):
        raise UsageError(f"{where} is {type_}, not {given.type}", "convert it first")
    if no_null and array.null_count:
        row = first + pc.index(array.is_null(), True).as_py()
        raise UsageError(f"{where} is null in row {row}", no_null)
    if is_null:
        return pa.nulls(len(array), type_)
    if is_nested(type_):
        return _same_nested(array, type_, where, first)
    if array.type != type_:
        array = _converted(array, type_, where, first)
    require_held(array, type_, where, first)
    return array


def require_held(array: pa.Array, type_: pa.DataType, where: str, first: int) -> None:
    """Raise `UsageError` for the first value of an array of `type_` that a column of this type does
    not hold. Arrow has wider ranges, and libraries pass texts that are no UTF-8."""
    kind = kind_of(type_)
    if is_held(array, kind):
        return
    row = _first(array, lambda part: is_held(part, kind))
    raise _refusal(array, row, type_, where, first)


def is_held(array: pa.Array, kind: Kind) -> bool:
    """Whether a column of `kind` holds each value of an array of its type."""
    if kind.node is not None:
        return _is_held_within(array, kind.type)
    if kind.least is not None:
        numbers = array.view(pa.int32() if kind.width == 4 else pa.int64())
        found = pc.min_max(numbers).as_py()
        return found["min"] is None or bool(
            kind.least <= found["min"] and found["max"] <= kind.most
        )
    if is_text(kind.type):
        return _is_text(array)
    if pa.types.is_decimal(kind.type):
        return _has_digits(array)
    return True


def first_no_text(array: pa.Array, kind: Kind) -> int | None:
    """The place of the first value with a text that is no UTF-8, also within it. None if there is
    none."""
    may_be_none = kind.way == shapes.TEXT or (kind.node is not None and has_texts(kind.node))
    return _first(array, _are_texts) if may_be_none and not _are_texts(array) else None


def unheld(array: pa.Array) -> Iterator[int]:
    """The places of the values that a column of an array's type does not hold. Costs a search by
    halves for each."""
    kind = kind_of(array.type)
    first = 0
    while not is_held(rest := array.slice(first), kind):
        first += _first(rest, lambda part: is_held(part, kind))
        yield first
        first += 1


def as_python(array: pa.Array, at: int) -> Any:
    """A value of Python, whatever the array holds: bytes for what is no text, and a number of days
    or units for a time that Python does not have."""
    if is_nested(_plain_type(array.type)) and array.is_valid()[at].as_py():
        return _nested_as_python(array.slice(at, 1))
    try:
        if pa.types.is_time(array.type) and array[at].is_valid:
            kind = kind_of(array.type)
            if array.type.unit == "ns" or not is_held(array.slice(at, 1), kind):
                raise OverflowError  # Arrow gives 24:00 as 00:00, and cuts nanoseconds off
        return array[at].as_py()
    except (ValueError, OverflowError):
        if pa.types.is_temporal(array.type):
            width = pa.int32() if array.type.bit_width == 32 else pa.int64()
            return array.view(width)[at].as_py()
        return as_bytes(array)[at].as_py()


def shown(array: pa.Array, at: int) -> str:
    """A value for an error, with the unit of a number that stands for a time."""
    value = as_python(array, at)
    is_count = pa.types.is_temporal(array.type) and type(value) is int
    unit = "ms" if pa.types.is_date64(array.type) else getattr(array.type, "unit", "days")
    return f"{value!r:.100}{' ' + unit if is_count else ''}"


def plain(array: pa.Array, where: str) -> pa.Array:
    """The values of an array without its dictionary and its run ends. Views become large bytes or
    texts, because few of Arrow's functions take views. Nothing is known of the values: a text may
    be no UTF-8. Raises `UsageError` for an array whose own parts do not fit together."""
    kind = array.type
    try:
        if pa.types.is_dictionary(kind):
            return plain(array.dictionary, where).take(array.indices)
        if pa.types.is_run_end_encoded(kind):
            ends = array.run_ends.to_numpy()
            rows = np.arange(array.offset, array.offset + len(array))
            places = np.searchsorted(ends, rows, side="right")
            return plain(array.values, where).take(pa.array(places))
        if pa.types.is_string_view(kind):
            return array.view(pa.binary_view()).cast(pa.large_binary()).view(pa.large_string())
        if pa.types.is_binary_view(kind):
            return array.cast(pa.large_binary())
    except (pa.ArrowInvalid, pa.ArrowIndexError, pa.ArrowNotImplementedError) as error:
        raise UsageError(f"{where} cannot be read: {error}", "pass a whole array") from error
    return array


def as_bytes(array: pa.Array) -> pa.Array:
    """Texts as their bytes, also where these are no UTF-8. No copy."""
    return array.view(pa.large_binary() if pa.types.is_large_string(array.type) else pa.binary())


def decimals(stored: Sequence[bytes | None], type_: pa.DataType) -> pa.Array:
    """The decimals of Arrow's integers. Arrow itself makes 0.00 out of 2E-41, and of some other
    numbers with more digits than it has powers of ten."""
    found = pa.array(stored, pa.binary(type_.byte_width))
    return pa.Array.from_buffers(type_, len(found), found.buffers())


# -- lists, structs and maps ----------------------------------------------------------------------
#
# What lies below a null is never looked at: Arrow may have anything there.


class _UnheldError(Exception):
    """A value within a list, a struct or a map is none that the column holds."""


def _same_nested(array: pa.Array, type_: pa.DataType, where: str, first: int) -> pa.Array:
    """The lists, structs or maps of an array in a type of the same family."""

    def is_taken(part: pa.Array) -> bool:
        try:
            _within(part, type_)
        except _UnheldError:
            return False
        return True

    try:
        return _within(array, type_)
    except _UnheldError:
        row = _first(array, is_taken)
    try:
        _within(array.slice(row, 1), type_)
    except _UnheldError as error:
        refusal = _refusal(array, row, type_, where, first)
        raise UsageError(f"{refusal.what}: {error}", refusal.remedy) from None
    raise UsageError(f"{where}: {len(array)} rows have 2 GiB", "pass fewer rows at once")


def rebuilt(
    array: pa.Array, type_: pa.DataType, flat: Callable[[pa.Array, pa.DataType], pa.Array]
) -> pa.Array:
    """Lists, structs or maps in a type of the same shape. `flat` converts what lies in them. Raises
    `pyarrow.ArrowInvalid` for what the type does not hold."""
    try:
        return _within(array, type_, flat)
    except _UnheldError as error:
        raise pa.ArrowInvalid(str(error)) from None


def _same_flat(array: pa.Array, type_: pa.DataType) -> pa.Array:
    try:
        return same_values(array, type_, "a value", 0)
    except UsageError as error:  # the number is of no row
        raise _UnheldError(error.what.rpartition(" of row ")[0] or error.what) from None


def _within(
    given: pa.Array,
    type_: pa.DataType,
    flat: Callable[[pa.Array, pa.DataType], pa.Array] = _same_flat,
) -> pa.Array:
    """The same values in the type of a part of a column. Raises `_UnheldError`, which says where
    below the part a value is not held."""
    if not is_nested(type_):
        return flat(given, type_)
    try:
        array = plain(given, "a value")
    except UsageError as error:
        raise _UnheldError(error.what) from None
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), type_)
    is_same = flat is _same_flat
    if is_same and not _is_of_family(array.type, type_):
        raise _UnheldError(f"a value is {type_}, not {given.type}")
    valid = array.is_valid() if array.null_count else None
    bits = None if valid is None else valid.buffers()[1]
    fields = fields_of(type_)
    if pa.types.is_struct(type_):
        parts = [_part(array, field, valid, flat) for field in fields]
        return pa.Array.from_buffers(type_, len(array), [bits], children=parts)
    lengths, items = _opened(array)
    if pa.types.is_map(type_):
        entries = pa.struct(fields)
        items = _within(items, entries, flat)
        if items.null_count:
            raise _UnheldError("an entry of a map is null")
        if is_same:
            _require_keys(lengths, items.field(0), type_)
    else:
        (field,) = fields
        items = _within(items, field.type, flat)
        if not field.nullable and items.null_count:
            raise _UnheldError("an item of a list is null")
    if pa.types.is_fixed_size_list(type_):
        wrong = lengths != type_.list_size
        if valid is not None:
            wrong &= valid.to_numpy(zero_copy_only=False)
        if wrong.any():
            raise _UnheldError(f"a list has not {type_.list_size} items")
        if valid is not None:
            places = np.repeat(valid.to_numpy(zero_copy_only=False), type_.list_size)
            spread = pa.array(np.cumsum(places) - 1, mask=~places)
            items = _spread(items, spread, fields[0])
        return pa.Array.from_buffers(type_, len(array), [bits], children=[items])
    is_large = pa.types.is_large_list(type_)
    if not is_large and len(items) >= 1 << 31:
        raise _UnheldError("lists of more than 2^31 values")
    ends = np.zeros(len(array) + 1, np.int64 if is_large else np.int32)
    np.cumsum(lengths, out=ends[1:])
    buffers = [bits, pa.py_buffer(ends)]
    return pa.Array.from_buffers(type_, len(array), buffers, children=[items])


def _spread(items: pa.Array, places: pa.Array, field: pa.Field) -> pa.Array:
    """Items with room for the lists of fixed size that are null: a null, or where the type takes
    none, a value that is there."""
    if not field.nullable and len(items):
        places = places.fill_null(0)
    return items.take(places)


def _part(
    array: pa.Array,
    field: pa.Field,
    valid: pa.Array | None,
    flat: Callable[[pa.Array, pa.DataType], pa.Array],
) -> pa.Array:
    """A field of structs. Below a null it is null, whatever it takes."""
    found = [each for each in array.type if each.name == field.name]
    if len(found) > 1:
        raise _UnheldError(f"there are two fields {field.name!r}")
    inner = pa.nulls(len(array), field.type)
    try:
        if found:
            given = array.field(array.type.get_field_index(field.name))
            if valid is not None:
                places = pa.array(range(len(array)), pa.int64(), mask=~valid.to_numpy(False))
                given = _without_runs(given).take(places)
            inner = _within(given, field.type, flat)
    except (_UnheldError, UsageError) as error:
        raise _UnheldError(f"{field.name}: {error}") from None
    if not field.nullable and inner.null_count:
        nulls = inner.is_null()
        if valid is None or pc.any(pc.and_(nulls, valid)).as_py():
            raise _UnheldError(f"{field.name}: it is null, and takes no null")
    return inner


def _opened(array: pa.Array) -> tuple[Any, pa.Array]:
    """How many items each list has, none for a null, and the items of all of them, which are plain;
    of maps, the entries."""
    kind, count, buffers = array.type, len(array), array.buffers()
    if pa.types.is_map(kind):
        values = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    else:
        values = array.values
    if not count:
        return np.empty(0, np.int64), plain(values.slice(0, 0), "a value")
    end = array.offset + count
    if pa.types.is_fixed_size_list(kind):
        starts = np.arange(array.offset, end) * kind.list_size
        lengths = np.full(count, kind.list_size)
    else:
        width = np.int64 if str(kind).startswith("large_") else np.int32
        places = np.frombuffer(buffers[1], width).astype(np.int64)
        starts = places[array.offset : end]
        if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
            lengths = np.frombuffer(buffers[2], width)[array.offset : end].astype(np.int64)
        else:
            lengths = places[array.offset + 1 : end + 1] - starts
    if array.null_count:
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    is_sound = (lengths >= 0) & (starts >= 0) & (starts + lengths <= len(values))
    if not (is_sound | (lengths == 0)).all():
        raise _UnheldError("the offsets of lists lead out of their values")
    ends = np.cumsum(lengths)
    first, total = int(starts[0]), int(ends[-1])
    if (lengths == 0).all():
        return lengths, plain(values.slice(0, 0), "a value")
    if (starts == first + ends - lengths).all():
        return lengths, plain(values.slice(first, total), "a value")
    places = np.arange(total) + np.repeat(starts - ends + lengths, lengths)
    return lengths, _without_runs(values).take(pa.array(places))


def _without_runs(array: pa.Array) -> pa.Array:
    """An array without run ends in it, of which Arrow takes no values by their places."""
    array = plain(array, "a value")
    kind, buffers = array.type, array.buffers()
    if "run_end_encoded" not in str(kind):
        return array
    if pa.types.is_struct(kind):
        parts = [_without_runs(array.field(at)) for at in range(kind.num_fields)]
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays(parts, names, mask=array.is_null())
    if pa.types.is_map(kind):
        parts = [_without_runs(part) for part in (array.keys, array.items)]
        entries = pa.StructArray.from_arrays(parts, ["key", "value"])
        items, kind, count = entries, pa.list_(entries.type), 2
    else:
        items = _without_runs(array.values)
        if pa.types.is_fixed_size_list(kind):
            kind, count = pa.list_(items.type, kind.list_size), 1
        elif pa.types.is_list_view(kind):
            kind, count = pa.list_view(items.type), 3
        elif pa.types.is_large_list_view(kind):
            kind, count = pa.large_list_view(items.type), 3
        else:
            is_large = pa.types.is_large_list(kind)
            kind, count = (pa.large_list if is_large else pa.list_)(items.type), 2
    return pa.Array.from_buffers(
        kind, len(array), buffers[:count], offset=array.offset, children=[items]
    )


def _require_keys(lengths: Any, keys: pa.Array, type_: pa.DataType) -> None:
    """Raise `_UnheldError` where a map has a key twice, or keys that do not ascend as it says."""
    if not len(keys) or int(lengths.max()) < 2:
        return
    stored = keys.storage if isinstance(keys, pa.ExtensionArray) else keys
    if is_text(stored.type):
        stored = as_bytes(stored)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if type_.keys_sorted:
        falls = pc.less(stored.slice(1), stored.slice(0, len(stored) - 1)).to_numpy(False)
        if (falls & (rows[1:] == rows[:-1])).any():
            raise _UnheldError("the keys of a map do not ascend")
    pairs = pa.table({"row": rows, "key": stored}).group_by(["row", "key"], use_threads=False)
    if pairs.aggregate([]).num_rows < len(stored):
        raise _UnheldError("a map has a key twice")


def _is_held_within(array: pa.Array, type_: pa.DataType) -> bool:
    """Whether each value below an array of a nested type, of this type, is held."""
    try:
        if pa.types.is_struct(type_):
            for part, field in zip(array.flatten(), type_, strict=True):
                if not is_held(part, kind_of(field.type)):
                    return False
            return True
        lengths, items = _opened(array)
        if pa.types.is_map(type_):
            _require_keys(lengths, items.field(0), type_)
            parts = [items.field(0), items.field(1)]
        else:
            parts = [items]
    except _UnheldError:
        return False
    pairs = zip(parts, fields_of(type_), strict=True)
    return all(is_held(part, kind_of(field.type)) for part, field in pairs)


def _are_texts(array: pa.Array) -> bool:
    """Whether all texts in an array, and in the values below it, are UTF-8."""
    if pa.types.is_struct(array.type):
        return all(map(_are_texts, array.flatten()))
    if is_nested(array.type):
        items = _opened(array)[1]
        return _are_texts(items)
    return not is_text(array.type) or _is_text(array)


def _nested_as_python(array: pa.Array) -> Any:
    """The value of an array of one, for errors: of a long list its beginning."""
    array = plain(array, "a value")
    if pa.types.is_struct(array.type):
        parts = zip(array.type, array.flatten(), strict=True)
        return {field.name: as_python(plain(part, "a value"), 0) for field, part in parts}
    _, items = _opened(array)
    shown_items = [as_python(items, at) for at in range(min(len(items), 20))]
    if pa.types.is_map(array.type):
        return {str(each["key"]): each["value"] for each in shown_items}
    return shown_items


# -- inside -------------------------------------------------------------------------------------


def _is_text(array: pa.Array) -> bool:
    """Whether all values are UTF-8. Bytes that are all ASCII, as most are, cost a tenth of a check
    of each value: 0.3 ms for 100,000 texts of 15 bytes, against 3 ms."""
    _, ends, data = array.buffers()
    if data is None or not len(array):
        return True
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    places = np.frombuffer(ends, width)[array.offset : array.offset + len(array) + 1]
    first, last = int(places[0]), int(places[-1])
    stored = np.frombuffer(data, np.uint8)
    if 0 <= first <= last <= len(stored) and (
        first == last or int(stored[first:last].max()) < 0x80
    ):
        return True
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _has_digits(array: pa.Array) -> bool:
    """Whether each decimal has as many digits as its type allows."""
    kind = array.type
    if not len(array):
        return True
    if kind.byte_width == 16 and kind.precision <= _DIGITS_OF_LONG and not array.null_count:
        words = np.frombuffer(array.buffers()[1], np.int64)
        low, high = words[2 * array.offset : 2 * (array.offset + len(array))].reshape(-1, 2).T
        most = 10**kind.precision
        return bool(((high == low >> 63) & (low > -most) & (low < most)).all())
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _converted(array: pa.Array, type_: pa.DataType, where: str, first: int) -> pa.Array:
    """The values of an array of another type."""
    found = _by_arrow(array, type_)
    if found is not None:
        return found
    if _family(array.type) in ("integer", "decimal") and not pa.types.is_temporal(type_):
        return _one_by_one(array, type_, where, first)
    row = _first(array, lambda part: _by_arrow(part, type_) is not None)
    require_held(_by_arrow(array.slice(0, row), type_), type_, where, first)
    if _by_arrow(array.slice(row, 1), type_) is not None:
        raise UsageError(f"{where}: {len(array)} rows have 2 GiB", "pass fewer rows at once")
    raise _refusal(array, row, type_, where, first)


def _by_arrow(array: pa.Array, type_: pa.DataType) -> pa.Array | None:
    """The values in another type by Arrow's cast. None where Arrow refuses one, or would change
    it."""
    try:
        if pa.types.is_fixed_size_binary(array.type):
            array = array.cast(pa.binary())  # Arrow casts no null to another width
        if isinstance(type_, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(type_, array.cast(type_.storage_type))
        if pa.types.is_integer(array.type):
            if pa.types.is_decimal(type_):
                array = array.cast(pa.decimal128(_DIGITS_OF_LONG + 2, 0))
            elif pa.types.is_temporal(type_):
                array = array.cast(pa.int64())
        elif array.type == pa.time32("s"):
            array = array.cast(pa.time64("us"))  # Arrow multiplies within 32 bits, unchecked
        found = array.cast(type_)
        is_narrower = pa.types.is_floating(array.type) and type_.bit_width < array.type.bit_width
        # Arrow shifts decimals by powers of ten without a look at what leaves their bits.
        is_shifted = pa.types.is_decimal(array.type)
        if (is_narrower or is_shifted) and not _are_same(found.cast(array.type), array):
            return None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return found


def _are_same(one: pa.Array, other: pa.Array) -> bool:
    equal = pc.equal(one, other)
    if pa.types.is_floating(one.type):
        equal = pc.or_(equal, pc.and_(pc.is_nan(one), pc.is_nan(other)))
    return bool(pc.all(equal, min_count=0).as_py())


def _one_by_one(array: pa.Array, type_: pa.DataType, where: str, first: int) -> pa.Array:
    """Integers and decimals in another type, as `put` takes them. Costs 1 us a value."""
    kind, values, stored = kind_of(type_), array.to_pylist(), []
    for row, value in enumerate(values):
        try:
            stored.append(None if value is None else kind.stored(value))
        except ValueError as error:  # noqa: PERF203  # Arrow has refused the array
            raise _refusal(array, row, type_, where, first) from error
    if pa.types.is_decimal(type_):
        return decimals(stored, type_)
    make = float if pa.types.is_floating(type_) else int
    return pa.array([None if value is None else make(value) for value in values], type_)


def _first(array: pa.Array, is_taken: Callable[[pa.Array], bool]) -> int:
    """The first value that is not taken, by halving. One of them is not."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if is_taken(array.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _refusal(array: pa.Array, row: int, type_: pa.DataType, where: str, first: int) -> UsageError:
    return UsageError(
        f"{where} is {type_}, which does not hold {shown(array, row)} of row {first + row}",
        kind_of(type_).remedy,
    )


def _is_of_family(given: pa.DataType, type_: pa.DataType) -> bool:
    """Whether a column of a type takes arrays of another, if it holds their values. What lies in
    lists, structs and maps is looked at too."""
    if given == type_ or pa.types.is_null(given):
        return True
    given = _plain_type(given)
    if is_nested(given) and is_nested(type_):
        return _is_of_nested_family(given, type_)
    found, wanted = _family(given), _family(type_)
    is_count = found == "integer" and getattr(type_, "unit", "") == "ns"
    return found == wanted or (found, wanted) in _CROSSINGS or is_count


def _is_of_nested_family(given: pa.DataType, type_: pa.DataType) -> bool:
    fields, wanted = fields_of(given), fields_of(type_)
    if pa.types.is_struct(given) and pa.types.is_struct(type_):
        names = {field.name: field for field in wanted}
        are_known = len({field.name for field in fields}) == len(fields)
        return are_known and all(
            field.name in names and _is_of_family(field.type, names[field.name].type)
            for field in fields
        )
    if pa.types.is_map(type_):
        if is_list(given) and pa.types.is_struct(fields[0].type):
            fields = fields_of(fields[0].type)
            if [field.name for field in fields] != ["key", "value"]:
                return False
        elif not pa.types.is_map(given):
            return False
    elif not (is_list(given) and is_list(type_)):
        return False
    pairs = zip(fields, wanted, strict=True)
    return all(_is_of_family(one.type, two.type) for one, two in pairs)


def _plain_type(type_: pa.DataType) -> pa.DataType:
    """The type of `plain` for arrays of a type."""
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return _plain_type(type_.value_type)
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_):
        return pa.large_list(type_.value_field)
    if pa.types.is_string_view(type_):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(type_) else type_


def is_text(type_: pa.DataType) -> bool:
    """Whether values of the type are texts."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _family(type_: pa.DataType) -> str:
    if pa.types.is_timestamp(type_):
        return "timestamp" if type_.tz is None else "instant"
    for fits, name in _FAMILIES:
        if fits(type_):
            return name
    return str(type_)


_FAMILIES: Final[tuple[tuple[Any, str], ...]] = (
    (pa.types.is_integer, "integer"),
    (pa.types.is_floating, "float"),
    (pa.types.is_decimal, "decimal"),
    (lambda type_: isinstance(type_, pa.UuidType), "uuid"),
    (pa.types.is_fixed_size_binary, "fixed"),
    *((check, "text") for check in (pa.types.is_string, pa.types.is_large_string)),
    *((check, "binary") for check in (pa.types.is_binary, pa.types.is_large_binary)),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "duration"),
)

_CROSSINGS: Final = frozenset(
    [
        ("integer", "float"),
        ("integer", "decimal"),
        ("decimal", "integer"),
        ("binary", "fixed"),
        ("fixed", "binary"),
        ("fixed", "uuid"),
        ("binary", "uuid"),
    ]
)
"""From another family of types to the column's. No text becomes a number, and no float a decimal or
an integer: these would have to be rounded."""
