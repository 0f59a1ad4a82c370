"""Rows of a table as values of the store, and back as Arrow buffers.

    row    := | head u8 | schema number u16 | nulls | fixed | ends | bytes |

    head   := 10 | w              the format, 1, in the upper half; w is 1, 2 or 4
    nulls  := one bit per column, from the lowest bit of the first byte on; 1 is a null
    fixed  := the values of fixed width, in the order of the columns; zeros for a null
    ends   := for each column of varying width: where its bytes end within `bytes`, in w bytes
    bytes  := the values of varying width, in the order of the columns

Integers are little-endian, as in Arrow. A row has the columns of the schema with this number,
without the columns of the key. A value of fixed width has the bytes of Arrow, a boolean has a byte
0 or 1. A value of a column is found without looking at the others.

Invariants
1. A row has exactly the bytes that its schema and its last end ask for.
2. Ends ascend.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from typing_extensions import Buffer

from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.loops.contract import ARRAY_BYTES_MAX, ROW_FORMAT, Column, Made
from kvstore.loops.plain.buffers import cells, made

HEAD: Final = struct.Struct("<BH")
END: Final = {1: "B", 2: "H", 4: "I"}


def encode_rows(number: int, columns: Sequence[Column], count: int) -> tuple[bytes, bytes] | None:
    """`count` rows of the schema `number` as the two buffers of an Arrow binary array. None where
    one array cannot hold them."""
    values = [list(cells(column, count)) for column in columns]
    rows = [_row(number, columns, [each[at] for each in values]) for at in range(count)]
    offsets = list(accumulate(map(len, rows), initial=0))
    if offsets[-1] > ARRAY_BYTES_MAX:
        return None
    return array("i", offsets).tobytes(), b"".join(rows)


def _row(number: int, columns: Sequence[Column], row: Sequence[bytes | None]) -> bytes:
    nulls = sum(1 << at for at, cell in enumerate(row) if cell is None)
    fixed, varying = [], []
    for column, cell in zip(columns, row, strict=True):
        if column[0]:
            fixed.append(bytes(column[0]) if cell is None else cell)
        else:
            varying.append(cell or b"")
    size = sum(map(len, varying))
    width = 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
    head = HEAD.pack(ROW_FORMAT << 4 | width, number)
    bits = nulls.to_bytes((len(row) + 7) // 8, "little")
    ends = struct.pack(f"<{len(varying)}{END[width]}", *accumulate(map(len, varying)))
    return b"".join((head, bits, *fixed, ends, *varying))


def decode_rows(
    offsets: Buffer,
    data: Buffer,
    first: int,
    count: int,
    number: int,
    widths: Sequence[int],
    wanted: Sequence[int],
    where: str,
) -> list[Made]:
    """The columns `wanted`, by place, of the rows from `first` on in an Arrow binary array. All
    rows have the schema `number`, whose columns have these `widths`, 0 where it varies.

    Raises `CorruptionError` and `FormatVersionError` that name `where` and the row. Columns that
    are not wanted are not read.
    """
    places, stored = memoryview(offsets).cast("B").cast("i"), memoryview(data)
    if first < 0 or len(places) <= first + count:
        raise ValueError("rows have too few offsets")
    shape = _Shape(number, widths)
    rows = []
    for at in range(first, first + count):
        start, end = places[at], places[at + 1]
        if not 0 <= start <= end <= len(stored):
            raise ValueError("the offsets of rows do not ascend within their bytes")
        rows.append(shape.cells(bytes(stored[start:end]), wanted, f"{where}, row {at - first}"))
    return [made([row[place] for row in rows], widths[index]) for place, index in enumerate(wanted)]


class _Shape:
    """Where the values of a schema lie in its rows."""

    def __init__(self, number: int, widths: Sequence[int]) -> None:
        self._number, self._widths = number, widths
        self._varying = sum(not width for width in widths)
        self._body = HEAD.size + (len(widths) + 7) // 8
        fixed = list(accumulate(widths, initial=self._body))
        varying = list(accumulate((not width for width in widths), initial=0))
        self._places = [
            at if width else end
            for width, at, end in zip(widths, fixed[:-1], varying[:-1], strict=True)
        ]
        self._ends = fixed[-1]

    def cells(self, row: bytes, wanted: Sequence[int], where: str) -> list[Any]:
        """The bytes of the wanted values of a row, None for nulls."""
        if len(row) < HEAD.size:
            raise CorruptionError(where, f"{len(row)} bytes are no row")
        head, number = HEAD.unpack_from(row)
        if head >> 4 != ROW_FORMAT:
            raise FormatVersionError(where, found=head >> 4, supported=ROW_FORMAT)
        width = head & 15
        if number != self._number or width not in END:
            raise CorruptionError(where, f"its head is {row[: HEAD.size].hex()}")
        tail = self._ends + self._varying * width
        ends = [0]
        if len(row) >= tail:
            ends += struct.unpack_from(f"<{self._varying}{END[width]}", row, self._ends)
        if len(row) < tail or tail + ends[-1] != len(row):
            raise CorruptionError(where, f"its {len(row)} bytes do not fit its schema")
        found: list[Any] = []
        for index in wanted:
            place, size = self._places[index], self._widths[index]
            start, end = (place, place + size) if size else (ends[place], ends[place + 1])
            if not size:
                if start > end or tail + end > len(row):
                    raise CorruptionError(where, "its offsets do not ascend")
                start, end = start + tail, end + tail
            is_null = row[HEAD.size + (index >> 3)] >> (index & 7) & 1
            found.append(None if is_null else row[start:end])
        return found
