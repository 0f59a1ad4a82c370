"""Arrow's buffers of a column, value by value: rows and keys of tables are made from them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvstore.loops.contract import Column, Made


def cells(column: Column, count: int) -> Iterator[bytes | None]:
    """The bytes of each value of a column, None for a null."""
    width, valid, first, data, ends = column
    bits, stored = memoryview(valid or b""), memoryview(data or b"")
    places = memoryview(ends or b"").cast("B").cast("i")
    if (valid is not None and len(bits) * 8 < first + count) or first < 0 or width < 0:
        raise ValueError("a column has too few bits of validity")
    if width and len(stored) < (first + count) * width:
        raise ValueError("a column has too few bytes")
    if not width and len(places) <= first + count:
        raise ValueError("a column has too few offsets")
    for at in range(first, first + count):
        if valid is not None and not bits[at >> 3] >> (at & 7) & 1:
            yield None
        elif width:
            yield bytes(stored[at * width : (at + 1) * width])
        else:
            start, end = places[at], places[at + 1]
            if not 0 <= start <= end <= len(stored):
                raise ValueError("the offsets of a column do not ascend within its bytes")
            yield bytes(stored[start:end])


def made(column: Sequence[bytes | None], width: int) -> Made:
    """The buffers of a column of these values."""
    valid = bytearray(b"\xff" * ((len(column) + 7) // 8))
    for at, cell in enumerate(column):
        if cell is None:
            valid[at >> 3] &= ~(1 << (at & 7))
    data = b"".join(bytes(width) if cell is None else cell for cell in column)
    ends = None
    if not width:
        lengths = (0 if cell is None else len(cell) for cell in column)
        ends = array("i", accumulate(lengths, initial=0)).tobytes()
    return [bytes(valid), data, ends]
