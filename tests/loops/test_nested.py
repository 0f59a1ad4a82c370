"""Lists, structs and maps as bytes: the loops refuse columns that do not fit together, and read
damaged bytes as the plain code does (`tests/tables/test_nested.py` compares both)."""

from __future__ import annotations

import struct

import pytest

from kvstore.errors import CorruptionError
from kvstore.loops import shapes
from kvstore.loops.nested import decode_nested, encode_nested

LIST: list[shapes.NestedNode] = [
    (shapes.NODE_LIST, 0, True, 1),
    (shapes.NODE_FIXED, 2, True, 0),
]
BYTES: list[shapes.NestedNode] = [(shapes.NODE_VARYING, 0, True, 0)]


def ends(*places: int) -> bytes:
    return struct.pack(f"<{len(places)}i", *places)


def items(count: int, data: bytes) -> shapes.NestedColumn:
    return None, 0, data, None, 0, count, 0


def test_a_list_is_its_number_and_its_items() -> None:
    columns = [(b"\x05", 0, None, ends(0, 1, 9, 3), 4, 3, 0), items(3, b"aabbcc")]
    with pytest.raises(ValueError, match="offsets"):  # of the null one, which must not be read
        encode_nested(LIST, [(None, *columns[0][1:]), columns[1]], 3, 100)
    columns[0] = (b"\x05", 0, None, ends(0, 1, 2, 3), 4, 3, 0)
    encoded = encode_nested(LIST, columns, 3, 100)
    assert encoded == (ends(0, 3, 3, 6), b"\x02aa\x02cc")
    assert decode_nested(LIST, b"\x05", *encoded, 0, 3, 100, "here") == [
        (3, b"\x01\x00\x01", b"", ends(0, 1, 1, 2)),
        (2, None, b"aacc", None),
    ]


@pytest.mark.parametrize(
    "column",
    [
        (None, -1, None, ends(0, 1), 4, 1, 0),
        (b"", 0, None, ends(0, 1), 4, 1, 0),
        (None, 0, None, ends(0), 4, 1, 0),
        (None, 0, None, ends(0, 1), 8, 1, 0),
        (None, 0, None, ends(0, 1), 2, 1, 0),
        (None, 0, None, ends(1, 0), 4, 1, 0),
        (None, 0, None, ends(0, 3), 4, 1, 0),
        (None, 0, None, ends(-1, 1), 4, 1, 0),
        (None, 0, None, ends(0, 1), 4, 1, 1),
        (None, 0, None, ends(0, 1), 4, 0, 0),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(column: shapes.NestedColumn) -> None:
    with pytest.raises(ValueError):
        encode_nested(LIST, [column, items(2, b"aabb")], 1, 100)


def test_buffers_that_are_too_small_are_refused() -> None:
    sound = (None, 0, None, ends(0, 1), 4, 1, 0)
    for column in (items(2, b"aab"), (b"", *items(2, b"aabb")[1:])):
        with pytest.raises(ValueError):
            encode_nested(LIST, [sound, column], 1, 100)
    for wrong in ([], [sound], [sound, items(2, b"aabb"), sound]):
        with pytest.raises(ValueError):
            encode_nested(LIST, wrong, 1, 100)
    for places in ((0, 5), (2, 1), (-1, 1)):
        with pytest.raises(ValueError):
            encode_nested(BYTES, [(None, 0, b"abcd", ends(*places), 4, 1, 0)], 1, 100)
        with pytest.raises(ValueError):
            decode_nested(BYTES, None, ends(*places), b"abcd", 0, 1, 100, "here")
    with pytest.raises(ValueError):
        decode_nested(BYTES, b"", ends(0, 1), b"a", 0, 1, 100, "here")
    with pytest.raises(ValueError):
        decode_nested(BYTES, None, ends(0), b"a", 0, 1, 100, "here")


@pytest.mark.parametrize(
    "shape",
    [
        [(5, 0, True, 0)],
        [(shapes.NODE_FIXED, 0, True, 0)],
        [(shapes.NODE_LIST, 0, True, 1)],
        [(shapes.NODE_LIST, 0, True, -1)],
        [(shapes.NODE_LIST, 0, True, 0), (shapes.NODE_FIXED, 1, True, 0)],
        [(shapes.NODE_SLOTS, 2, True, 0)],
        [(shapes.NODE_FIXED, 1, True, 1), (shapes.NODE_FIXED, 1, True, 0)],
        [(shapes.NODE_FIXED, 1, True, 0), (shapes.NODE_FIXED, 1, True, 0)],
        [
            (shapes.NODE_LIST, 0, True, 2),
            (shapes.NODE_FIXED, 1, True, 0),
            (shapes.NODE_FIXED, 1, True, 0),
        ],
        [],
    ],
)
def test_a_type_that_is_no_tree_is_refused(shape: list[shapes.NestedNode]) -> None:
    with pytest.raises(ValueError):
        decode_nested(shape, None, ends(0, 1), b"a", 0, 1, 100, "here")
    with pytest.raises(ValueError):
        encode_nested(shape, [items(1, b"a")] * len(shape), 1, 100)


@pytest.mark.parametrize(
    "cell",
    [
        *(b"", b"\x02", b"\x02a", b"\x02aab", b"\x03", b"\x03\x02aa", b"\x03\x00a"),
        b"\x80\x00",
        *(
            b"\xff" * 9,
            b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
            b"\xff\xff\xff\xff\xff\xff\xff\x7f",
        ),
        b"\xca\x01" + b"a" * 202,  # 101 items, and 100 are allowed
    ],
)
def test_bytes_that_are_no_list_are_refused_by_row(cell: bytes) -> None:
    data = b"\x00" + cell
    with pytest.raises(CorruptionError, match="here, row 1 is damaged"):
        decode_nested(LIST, None, ends(0, 1, len(data)), data, 0, 2, 100, "here")


def test_values_above_the_bound_are_told_by_their_row() -> None:
    column = (None, 0, None, ends(0, 1, 3), 4, 2, 0)
    with pytest.raises(OverflowError) as told:
        encode_nested(LIST, [column, items(3, b"aabbcc")], 2, 1)
    assert told.value.args == (1,)
