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

from typing_extensions import Buffer

from kvstore.loops.contract import ARRAY_BYTES_MAX, ROW_FORMAT, Column, Made
from kvstore.loops.plain.buffers import cells, made
from kvstore.loops.plain.parts import END, HEAD, Shape


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
    shape = Shape(number, widths)
    rows = []
    for at in range(first, first + count):
        start, end = places[at], places[at + 1]
        if not 0 <= start <= end <= len(stored):
            raise ValueError("the offsets of rows do not ascend within their bytes")
        rows.append(shape.cells(bytes(stored[start:end]), wanted, f"{where}, row {at - first}"))
    return [made([row[place] for row in rows], widths[index]) for place, index in enumerate(wanted)]
