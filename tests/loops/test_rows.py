"""Rows and keys of tables: the loops make the bytes of their oracle, and refuse what it refuses."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.tuples import Element, desc, encode_tuple
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.loops import shapes
from kvstore.loops.elements import decode_keys, encode_keys
from kvstore.loops.rows import decode_rows, encode_rows
from tests.loops import raw, rows_oracle

WIDTHS = st.lists(st.sampled_from([0, 1, 2, 8, 16]), max_size=10)
WHERE = "table trips"


def column(values: Sequence[bytes | None], width: int, skip: int = 0) -> shapes.Column:
    """A column of these values that begins `skip` rows into its buffers."""
    padded = [b"x" * width] * skip + list(values)
    made = pa.array(padded, pa.binary(width) if width else pa.binary())
    buffers = made.buffers()
    if width:
        return width, buffers[0], skip, buffers[1], None
    return 0, buffers[0], skip, buffers[2], buffers[1]


def values_of(made: Sequence[Any], count: int, width: int) -> list[bytes | None]:
    valid, data, ends = made
    parts = [pa.py_buffer(part) for part in ([valid, data] if width else [valid, ends, data])]
    kind = pa.binary(width) if width else pa.binary()
    found: list[bytes | None] = pa.Array.from_buffers(kind, count, parts).to_pylist()
    return found


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[list[bytes | None]]]:
    widths = draw(WIDTHS)
    cell = [
        st.none() | (st.binary(min_size=width, max_size=width) if width else raw)
        for width in widths
    ]
    return widths, draw(st.lists(st.tuples(*cell).map(list), max_size=12))


@given(tables(), st.integers(0, 65535), st.integers(0, 9), st.data())
def test_rows_come_back_column_by_column(
    table: tuple[list[int], list[list[bytes | None]]],
    number: int,
    skip: int,
    data: st.DataObject,
) -> None:
    widths, rows = table
    columns = [column([row[at] for row in rows], width, skip) for at, width in enumerate(widths)]
    encoded = encode_rows(number, columns, len(rows))
    assert encoded == rows_oracle.encode_rows(number, columns, len(rows))
    first = data.draw(st.integers(0, len(rows)))
    wanted = data.draw(st.lists(st.sampled_from(range(len(widths))) if widths else st.nothing()))
    found = decode_rows(*encoded, first, len(rows) - first, number, widths, wanted, WHERE)
    for made, at in zip(found, wanted, strict=True):
        assert values_of(made, len(rows) - first, widths[at]) == [row[at] for row in rows[first:]]


def test_bytes_of_a_row_are_these() -> None:
    columns = [
        column([struct.pack("<q", 7)], 8),
        column([b"JFK"], 0),
        column([None], 1),
        column([b""], 0),
    ]
    _, row = encode_rows(3, columns, 1)
    assert row.hex() == "1103000407000000000000000003034a464b"
    for size, head in ((255, "11"), (256, "12"), (65535, "12"), (65536, "14")):
        _, row = encode_rows(3, [column([b"a" * size], 0)], 1)
        assert row.hex().startswith(f"{head}030000{size.to_bytes(int(head[1]), 'little').hex()}")


def damaged(row: bytes, draw: Any) -> bytes:
    at = draw(st.integers(0, max(len(row) - 1, 0)))
    return draw(
        st.sampled_from(
            [row[:at], row + b"\x00", row[:at] + bytes([draw(st.integers(0, 255))]) + row[at + 1 :]]
        )
    )


@given(tables(), st.data())
def test_damaged_rows_are_read_as_the_oracle_reads_them(
    table: tuple[list[int], list[list[bytes | None]]], data: st.DataObject
) -> None:
    widths, rows = table
    columns = [column([row[at] for row in rows[:1]], width) for at, width in enumerate(widths)]
    _, row = rows_oracle.encode_rows(3, columns, len(rows[:1]))
    row = damaged(row, data.draw)
    offsets = struct.pack("<2i", 0, len(row))
    every = range(len(widths))

    def outcome(decode: Any) -> Any:
        try:
            made = decode(offsets, row, 0, 1, 3, widths, every, WHERE)
        except (CorruptionError, FormatVersionError) as error:
            return str(error)
        return [values_of(each, 1, width) for each, width in zip(made, widths, strict=True)]

    assert outcome(decode_rows) == outcome(rows_oracle.decode_rows)


def test_a_row_of_a_newer_format_says_so() -> None:
    row = b"\x21\x00\x00"
    with pytest.raises(FormatVersionError, match="table trips, row 0 has format version 2"):
        decode_rows(struct.pack("<2i", 0, 3), row, 0, 1, 0, [], [], WHERE)


KINDS: dict[str, tuple[int, int, int, st.SearchStrategy[Any], Any]] = {
    "signed": (shapes.SIGNED, 0x10, 8, st.integers(-(1 << 63), (1 << 63) - 1), "<q"),
    "unsigned": (shapes.UNSIGNED, 0x10, 8, st.integers(0, (1 << 64) - 1), "<Q"),
    "double": (shapes.DOUBLE, 0x20, 8, st.floats(), "<d"),
    "binary": (shapes.FRAMED, 0x30, 0, raw, None),
    "boolean": (shapes.BOOLEAN, 0, 1, st.booleans(), "?"),
    "unique": (shapes.FIXED, 0x70, 16, st.uuids(), None),
    "decimal": (shapes.WHOLE, 0x28, 0, st.decimals(allow_nan=False, allow_infinity=False), None),
}


def cell_of(name: str, value: Any) -> bytes | None:
    if value is None:
        return None
    shape = KINDS[name][4]
    if shape:
        return struct.pack(shape, value)
    if name == "decimal":
        return encode_tuple([value])[1:]
    cell: bytes = value if isinstance(value, bytes) else value.bytes
    return cell


@st.composite
def keys(draw: st.DrawFn) -> tuple[list[tuple[str, bool]], list[tuple[Any, ...]]]:
    columns = draw(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.booleans()), max_size=4))
    row = st.tuples(*(st.none() | KINDS[name][3] for name, _ in columns))
    return columns, draw(st.lists(row, max_size=8))


@given(keys(), st.sampled_from([b"", b"\xff\xff\x01"]), st.integers(0, 9))
def test_keys_are_tuples_and_come_back(
    table: tuple[list[tuple[str, bool]], list[tuple[Any, ...]]],
    prefix: bytes,
    skip: int,
) -> None:
    columns, rows = table
    cells = [[cell_of(name, row[at]) for row in rows] for at, (name, _) in enumerate(columns)]
    given_columns = [
        (*KINDS[name][:2], is_falling, *column(cells[at], KINDS[name][2], skip))
        for at, (name, is_falling) in enumerate(columns)
    ]
    offsets, data = encode_keys(prefix, given_columns, len(rows))
    found = pa.Array.from_buffers(
        pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    ).to_pylist()

    def encoded(row: tuple[Any, ...]) -> bytes:
        elements: list[Element] = [
            desc(value) if is_falling else value
            for value, (_, is_falling) in zip(row, columns, strict=True)
        ]
        return prefix + encode_tuple(elements)

    assert found == [encoded(row) for row in rows]
    shapes = [(*KINDS[name][:2], is_falling, KINDS[name][2]) for name, is_falling in columns]
    made, ends = decode_keys(offsets, data, 0, len(rows), len(prefix), shapes, WHERE)
    assert ends == offsets[4:]
    for at, (name, _) in enumerate(columns):
        back = values_of(made[at], len(rows), KINDS[name][2])
        if name == "double":  # one NaN, one zero
            again = [(*given_columns[at][:3], *column(back, 8))]
            assert encode_keys(b"", again, len(rows)) == encode_keys(
                b"", [given_columns[at]], len(rows)
            )
        else:
            assert back == cells[at]


@given(keys(), st.data())
def test_damaged_keys_are_read_as_the_oracle_reads_them(
    table: tuple[list[tuple[str, bool]], list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    columns, rows = table
    values = rows[0] if rows else (None,) * len(columns)
    elements: list[Element] = [
        desc(value) if is_falling else value
        for value, (_, is_falling) in zip(values, columns, strict=True)
    ]
    key = damaged(encode_tuple(elements), data.draw)
    shapes = [(*KINDS[name][:2], is_falling, KINDS[name][2]) for name, is_falling in columns]

    def outcome(decode: Any) -> Any:
        offsets = struct.pack("<2i", 0, len(key))
        try:
            made, ends = decode(offsets, key, 0, 1, 0, shapes, WHERE)
        except CorruptionError as error:
            return str(error)
        widths = [shape[3] for shape in shapes]
        return ends, [values_of(each, 1, width) for each, width in zip(made, widths, strict=True)]

    assert outcome(decode_keys) == outcome(rows_oracle.decode_keys)


@pytest.mark.parametrize(
    "wrong",
    [
        (8, None, 0, b"1234567", None),
        (8, b"", 0, b"12345678", None),
        (8, None, -1, b"12345678", None),
        (0, None, 0, b"1234", struct.pack("<i", 0)),
        (0, None, 0, b"1234", struct.pack("<2i", 0, 5)),
        (0, None, 0, b"1234", struct.pack("<2i", 3, 2)),
    ],
)
def test_buffers_that_are_too_small_are_refused(wrong: shapes.Column) -> None:
    with pytest.raises(ValueError):
        encode_rows(0, [wrong], 1)
    kind = shapes.SIGNED if wrong[0] else shapes.FRAMED
    with pytest.raises(ValueError):
        encode_keys(b"", [(kind, 0x10, False, *wrong)], 1)
