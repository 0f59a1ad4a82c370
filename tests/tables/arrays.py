"""Arrow arrays of every type with every bit pattern, what their values mean, and which of them a
column of a table holds: the rule of `kvstore.tables.exact`, written a second time by numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

ZONES: Final = (None, "UTC", "Europe/Berlin", "+05:30")
UNITS: Final = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
DAY_NS: Final = 86_400 * 10**9
FIRST_NS, LAST_NS = -719_162 * DAY_NS, 2_932_897 * DAY_NS
"""Of the years 1 and 9999; the last one is not in them."""
LONGEST_NS: Final = 10**9 * DAY_NS
"""Python's durations lie below it, and not below minus so much but a day."""

INTEGERS: Final = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
]
STAMPS: Final = [pa.timestamp(unit, zone) for unit in UNITS for zone in ZONES]
TIMES: Final = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
LENGTHS: Final = [pa.duration(unit) for unit in UNITS]

COLUMNS: Final[list[pa.DataType]] = [
    pa.bool_(),
    *INTEGERS,
    *(pa.float32(), pa.float64()),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(20, 19), pa.decimal128(3, -2)),
    *(pa.decimal256(76, 10), pa.decimal256(40, 0)),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3), pa.uuid()),
    pa.date32(),
    *STAMPS,
    *TIMES,
    *LENGTHS,
]
"""Types of columns of a table."""

SOURCES: Final[list[pa.DataType]] = [
    *COLUMNS,
    *(pa.float16(), pa.date64(), pa.string_view(), pa.binary_view(), pa.binary(16)),
    *(pa.decimal32(7, 2), pa.decimal64(18, 3), pa.decimal128(38, 10), pa.decimal256(50, 20)),
    *(pa.decimal256(76, 41), pa.decimal256(76, 76)),
]
"""Types of arrays that come, beside dictionaries and run ends of them."""

FOREIGN: Final[list[pa.DataType]] = [
    *(pa.list_(pa.string()), pa.large_list(pa.int64()), pa.struct([("s", pa.string())])),
    *(pa.map_(pa.string(), pa.int64()), pa.month_day_nano_interval(), pa.list_view(pa.int8())),
]
"""Types that no column takes."""


def family(type_: pa.DataType) -> str:
    """The values that a type has."""
    for name, fits in (
        ("integer", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("decimal", pa.types.is_decimal),
        ("bool", pa.types.is_boolean),
        ("uuid", lambda each: isinstance(each, pa.UuidType)),
        ("date", pa.types.is_date),
        ("time", pa.types.is_time),
        ("duration", pa.types.is_duration),
        ("timestamp", lambda each: pa.types.is_timestamp(each) and each.tz is None),
        ("instant", pa.types.is_timestamp),
        ("text", lambda each: pa.types.is_string(each) or pa.types.is_large_string(each)),
        ("text", pa.types.is_string_view),
    ):
        if fits(type_):
            return name
    return "binary"


def takes(column: pa.DataType, source: pa.DataType) -> bool:
    """Whether a column takes arrays of a type at all."""
    given, wanted = family(source), family(column)
    if getattr(column, "unit", "") == "ns" and given == "integer":
        return True
    also = {
        "integer": ["decimal"],
        "float": ["integer"],
        "decimal": ["integer"],
        "uuid": ["binary"],
    }
    return given == wanted or given in also.get(wanted, [])


@st.composite
def arrays(draw: st.DrawFn, type_: pa.DataType) -> pa.Array:
    """An array of a type with nulls, maybe a slice, a dictionary, or run-end encoded."""
    shape = draw(st.sampled_from(["plain", "plain", "slice", "dictionary", "runs"]))
    if shape == "plain":
        return draw(flat(type_))
    if shape == "slice":
        found = draw(flat(type_))
        first = draw(st.integers(0, len(found)))
        return found.slice(first, draw(st.integers(0, len(found))))
    if isinstance(type_, pa.BaseExtensionType):
        return draw(flat(type_))
    values = draw(flat(type_, least=1))
    if shape == "dictionary":
        places = st.none() | st.integers(0, len(values) - 1)
        index = draw(st.sampled_from([pa.int8(), pa.uint16(), pa.int64()]))
        indices = pa.array(draw(st.lists(places, max_size=6)), index)
        return pa.DictionaryArray.from_arrays(indices, values, safe=False)
    lengths = draw(st.lists(st.integers(1, 3), min_size=len(values), max_size=len(values)))
    ends = pa.array([sum(lengths[: at + 1]) for at in range(len(lengths))], pa.int32())
    try:
        found = pa.RunEndEncodedArray.from_arrays(ends, values)
    except pa.ArrowInvalid:  # it looks at the values
        return values
    return found.slice(draw(st.integers(0, len(found))))


@st.composite
def flat(draw: st.DrawFn, type_: pa.DataType, least: int = 0) -> pa.Array:
    """An array whose values are any that its buffers can have."""
    name = family(type_)
    if name == "bool":
        return made(draw(listed(st.booleans(), least)), type_, type_)
    if name == "integer":
        return made(draw(listed(whole(type_.bit_width, signed(type_)), least)), type_, type_)
    if name == "float":
        bits = st.floats(width=type_.bit_width) | st.sampled_from([-0.0, 5e-324, 2.0**60])
        if type_.bit_width < 64:
            bits = st.floats(width=type_.bit_width)
        return made(draw(listed(bits, least)), type_, type_)
    if name == "decimal":
        return draw(decimals(type_, least))
    if name == "uuid":
        found = draw(listed(st.binary(min_size=16, max_size=16), least))
        return pa.ExtensionArray.from_storage(type_, pa.array(found, pa.binary(16)))
    if name == "text":
        raw = draw(listed(texts(), least))
        if pa.types.is_string_view(type_):
            return pa.array(raw, pa.binary_view()).view(type_)
        return pa.array(raw, binary_of(type_)).view(type_)
    if name == "binary":
        least_bytes, most_bytes = 0, 17
        if pa.types.is_fixed_size_binary(type_):
            least_bytes = most_bytes = type_.byte_width
        raw_bytes = st.binary(min_size=least_bytes, max_size=most_bytes)
        if not least_bytes:
            raw_bytes |= st.binary(min_size=3, max_size=3) | st.binary(min_size=16, max_size=16)
        return pa.array(draw(listed(raw_bytes, least)), type_)
    width = pa.int32() if type_.bit_width == 32 else pa.int64()
    numbers = near_bounds(type_) | whole(type_.bit_width, is_signed=True) | st.integers(-3, 3)
    return pa.array(draw(listed(numbers, least)), width).view(type_)


def listed(items: st.SearchStrategy[Any], least: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | items, min_size=least, max_size=6)


def made(values: Sequence[Any], type_: pa.DataType, shown: pa.DataType) -> pa.Array:
    if pa.types.is_float16(type_):
        mask = [value is None for value in values]
        numbers = np.array([0 if value is None else value for value in values], np.float16)
        return pa.array(numbers, pa.float16(), mask=np.array(mask, bool))
    return pa.array(values, shown)


def signed(type_: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(type_))


def whole(bits: int, is_signed: bool) -> st.SearchStrategy[int]:
    """Integers of some bits, many of them near powers of two and ten."""
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
    marks = [each for power in (8, 24, 31, 53, 62, 63, 64) for each in near(1 << power)]
    marks += [each for power in (2, 3, 5, 18, 19) for each in near(10**power)]
    marks += [-each for each in marks]
    kept = [each for each in marks if least <= each <= most]
    every = st.integers(least, most)
    return every | st.integers(max(least, -20), min(most, 20)) | st.sampled_from(kept or [0])


def near(mark: int) -> tuple[int, int, int]:
    return mark - 1, mark, mark + 1


def near_bounds(type_: pa.DataType) -> st.SearchStrategy[int]:
    """Numbers at the ends of what a column takes, as far as the type has them."""
    unit = unit_of(type_)
    marks = [FIRST_NS, LAST_NS, DAY_NS, LONGEST_NS, DAY_NS - LONGEST_NS, 0]
    bits = type_.bit_width
    every = [each for mark in marks for each in near(mark // unit)]
    return st.sampled_from([each for each in every if -(1 << bits - 1) <= each < 1 << bits - 1])


def texts() -> st.SearchStrategy[bytes]:
    """Mostly UTF-8: long and short, and now and then bytes that are none."""
    return (
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.encode)
        | st.text("ab", max_size=30).map(str.encode)
        | st.binary(max_size=3)
        | st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82", b"a" * 13 + b"\xff"])
    )


@st.composite
def decimals(draw: st.DrawFn, type_: pa.DataType, least: int) -> pa.Array:
    """Decimals by their integers: with as many digits as the type has, and now and then more."""
    bits = 8 * type_.byte_width
    most = 10**type_.precision - 1
    marks = [*near(0), *near(most), *near(-most), *near(10 ** abs(type_.scale)), 1500]
    fitting = [each for each in marks if -(1 << bits - 1) <= each < 1 << bits - 1]
    numbers = st.integers(-most, most) | st.sampled_from(fitting)
    found = draw(listed(numbers, least))
    raw = b"".join((each or 0).to_bytes(bits // 8, "little", signed=True) for each in found)
    valid = pa.array([each is not None for each in found], pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(type_, len(found), [valid, pa.py_buffer(raw)])


def binary_of(type_: pa.DataType) -> pa.DataType:
    return pa.large_binary() if pa.types.is_large_string(type_) else pa.binary()


def unit_of(type_: pa.DataType) -> int:
    """Nanoseconds of a unit."""
    if pa.types.is_date32(type_):
        return DAY_NS
    return 10**6 if pa.types.is_date64(type_) else UNITS[type_.unit]


def meanings(array: pa.Array) -> list[Any]:
    """What the values of an array are, in any type: a number, bytes, or nanoseconds. None for a
    null. A float is its own eight bytes, with one NaN."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        inner = meanings(array.dictionary)
        return [None if at is None else inner[at] for at in array.indices.to_pylist()]
    if pa.types.is_run_end_encoded(kind):
        inner, ends = meanings(array.values), array.run_ends.to_pylist()
        rows = range(array.offset, array.offset + len(array))
        return [inner[next(at for at, end in enumerate(ends) if row < end)] for row in rows]
    name = family(kind)
    if name in ("bool", "integer", "binary"):
        return array.to_pylist()  # type: ignore[no-any-return]
    if name == "float":
        return [None if each is None else bits_of(float(each)) for each in array.to_pylist()]
    if name == "uuid":
        return array.storage.to_pylist()  # type: ignore[no-any-return]
    if name == "text":
        if pa.types.is_string_view(kind):
            return array.view(pa.binary_view()).to_pylist()  # type: ignore[no-any-return]
        return array.view(binary_of(kind)).to_pylist()  # type: ignore[no-any-return]
    if name == "decimal":
        size, raw = kind.byte_width, memoryview(array.buffers()[1] or b"")
        places = range(array.offset, array.offset + len(array))
        scale = Fraction(10) ** -kind.scale
        found = (raw[size * at : size * at + size] for at in places)
        numbers = [int.from_bytes(each, "little", signed=True) * scale for each in found]
        return [
            number if is_valid else None
            for number, is_valid in zip(numbers, array.is_valid().to_pylist(), strict=True)
        ]
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    unit = unit_of(kind)
    return [None if each is None else each * unit for each in array.view(width).to_pylist()]


def bits_of(number: float) -> bytes:
    return struct.pack(">d", number if number == number else float("nan"))


def holds(column: pa.DataType, source: pa.DataType, value: Any) -> bool:
    """Whether a column holds a meaning of `meanings`, that came from a type which it takes."""
    wanted = family(column)
    if value is None or wanted in ("bool", "uuid"):
        return value is None or wanted == "bool" or len(value) == 16
    if wanted == "binary":
        size = column.byte_width if pa.types.is_fixed_size_binary(column) else len(value)
        return bool(size == len(value))
    if wanted == "text":
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
        return True
    if wanted == "float":
        return as_meaning(column, source, value) is not None
    if wanted == "decimal":
        scaled = Fraction(value) * Fraction(10) ** column.scale
        digits = abs(scaled) < 10**column.precision
        return bool(scaled.denominator == 1 and digits)
    if wanted == "integer":
        least = -(1 << column.bit_width - 1) if signed(column) else 0
        most = least + (1 << column.bit_width) - 1
        return bool(Fraction(value).denominator == 1 and least <= value <= most)
    unit = unit_of(column)
    if (
        value % unit
        or not -(1 << column.bit_width - 1) <= value // unit < 1 << column.bit_width - 1
    ):
        return False
    if wanted == "date":
        return bool(FIRST_NS <= value < LAST_NS)
    if wanted == "time":
        return bool(0 <= value < DAY_NS)
    if wanted == "duration":
        return bool(DAY_NS - LONGEST_NS <= value < LONGEST_NS)
    return bool(FIRST_NS <= value < LAST_NS)


def as_meaning(column: pa.DataType, source: pa.DataType, value: Any) -> Any:
    """The meaning that a value has in a column that holds it; None if the column does not."""
    if value is None or family(column) != "float":
        return value
    if family(source) == "integer":
        try:
            number = float(value)
        except OverflowError:
            return None
        if number != value:
            return None
    else:
        (number,) = struct.unpack(">d", value)
    if column == pa.float32():
        try:
            (single,) = struct.unpack(">f", struct.pack(">f", number))
        except OverflowError:
            return None
        if single != number and number == number:
            return None
    return bits_of(number)
