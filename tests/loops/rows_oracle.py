"""Rows and keys of tables once more in plain Python, value by value: what the compiled loops must
answer to any columns and any stored bytes. `kvstore.loops.rows` has the format of rows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from typing import Any, Final

from typing_extensions import Buffer

from kvstore.codec.keys import TERMINATOR, frame, is_framed, unframe
from kvstore.codec.tuples import FALSE, NULL, SIGN, TRUE, UNSIGNED, decimal_end, flip
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.loops import shapes
from kvstore.loops.shapes import (
    ARRAY_BYTES_MAX,
    ROW_FORMAT,
    CellRead,
    Column,
    KeyColumn,
    KeyRead,
    Made,
)

HEAD: Final = struct.Struct("<BH")
END: Final = {1: "B", 2: "H", 4: "I"}
ALL_ONES: Final = (1 << 64) - 1


class Shape:
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


def parsed(
    key: bytes, here: int, columns: Sequence[tuple[int, int, bool, int]]
) -> Iterator[tuple[bytes | None, int]]:
    """Each column's value, None for a null, and the place where it ends: -1 where the bytes are
    not of the column."""
    for kind, tag, is_flipped, width in columns:
        rest = key[here:] if here >= 0 else b""
        cell, size = _taken(kind, tag, width, flip(rest) if is_flipped else rest)
        here = here + size if size else -1
        yield cell, here


def _taken(kind: int, tag: int, width: int, rest: bytes) -> tuple[bytes | None, int]:
    """The value at the beginning of `rest`, and the length of its element, 0 for another one."""
    first = rest[:1]
    if first == NULL:
        return None, 1
    if kind == shapes.BOOLEAN:
        return (b"\x01" if first == TRUE else b"\x00"), int(first in (TRUE, FALSE))
    if kind in (shapes.FRAMED, shapes.WHOLE):
        if first != bytes([tag]):
            return b"", 0
        return (_framed if kind == shapes.FRAMED else _whole)(rest)
    if len(rest) <= width or first not in (bytes([tag]), UNSIGNED):
        return b"", 0
    if kind == shapes.FIXED:
        return rest[1 : width + 1], (width + 1) * (first == bytes([tag]))
    number = int.from_bytes(rest[1:9], "big")
    is_large = kind == shapes.UNSIGNED and first == UNSIGNED
    if is_large:
        return number.to_bytes(8, "little"), 9 if number & SIGN else 0
    if first != bytes([tag]) or (kind == shapes.UNSIGNED and not number & SIGN):
        return b"", 0
    if kind == shapes.DOUBLE:
        number ^= SIGN if number & SIGN else ALL_ONES
    else:
        number ^= SIGN
    return number.to_bytes(8, "little"), 9


def _framed(rest: bytes) -> tuple[bytes, int]:
    at = 1
    while (at := rest.find(b"\x00", at)) >= 0:
        if rest[at : at + 2] == TERMINATOR:
            end = at + 2
            return (unframe(rest[1:end]), end) if is_framed(rest[1:end]) else (b"", 0)
        at += 2
    return b"", 0


def _whole(rest: bytes) -> tuple[bytes, int]:
    try:
        end = decimal_end(rest, 1)
    except ValueError:
        return b"", 0
    return rest[1:end], end


# -- columns


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


# -- rows


def encode_rows(number: int, columns: Sequence[Column], count: int) -> tuple[bytes, bytes] | None:
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


# -- keys

_NAN: Final = 0x7FF8 << 48
_WIDTHS: Final = {
    shapes.SIGNED: 8,
    shapes.UNSIGNED: 8,
    shapes.DOUBLE: 8,
    shapes.FRAMED: 0,
    shapes.BOOLEAN: 1,
    shapes.WHOLE: 0,
}


def encode_keys(
    prefix: bytes, columns: Sequence[KeyColumn], count: int
) -> tuple[bytes, bytes] | None:
    encoded = []
    for kind, tag, is_flipped, width, *buffers in columns:
        _require_width(kind, width)
        column: Column = (width, buffers[0], *buffers[1:])  # type: ignore[assignment]
        found = [_element(kind, bytes([tag]), cell) for cell in cells(column, count)]
        encoded.append([flip(element) for element in found] if is_flipped else found)
    keys = [prefix + b"".join(elements[at] for elements in encoded) for at in range(count)]
    offsets = list(accumulate(map(len, keys), initial=0))
    if offsets[-1] > ARRAY_BYTES_MAX:
        return None
    return array("i", offsets).tobytes(), b"".join(keys)


def _require_width(kind: int, width: int) -> None:
    if _WIDTHS.get(kind, width) != width or (kind == shapes.FIXED and not width):
        raise ValueError(f"kind {kind} does not go with width {width}")


def _element(kind: int, tag: bytes, cell: bytes | None) -> bytes:
    if cell is None:
        return NULL
    if kind == shapes.BOOLEAN:
        return TRUE if cell != b"\x00" else FALSE
    if kind == shapes.FRAMED:
        return tag + frame(cell)
    if kind in (shapes.FIXED, shapes.WHOLE):
        return tag + cell
    number = int.from_bytes(cell, "little")
    if kind == shapes.UNSIGNED and number >= SIGN:
        return UNSIGNED + number.to_bytes(8, "big")
    if kind == shapes.DOUBLE:
        if number & ~SIGN > 0x7FF << 52:
            number = _NAN
        number = 0 if number == SIGN else number
        return tag + (number ^ (ALL_ONES if number & SIGN else SIGN)).to_bytes(8, "big")
    return tag + (number ^ SIGN).to_bytes(8, "big")


def decode_keys(
    offsets: Buffer,
    data: Buffer,
    first: int,
    count: int,
    skip: int,
    columns: Sequence[tuple[int, int, bool, int]],
    where: str,
) -> tuple[list[Made], bytes]:
    places, stored = memoryview(offsets).cast("B").cast("i"), memoryview(data)
    if first < 0 or skip < 0 or len(places) <= first + count:
        raise ValueError("keys have too few offsets")
    for kind, _, _, width in columns:
        _require_width(kind, width)
    found: list[list[bytes | None]] = [[] for _ in columns]
    ends = array("i")
    for at in range(first, first + count):
        start, end = places[at], places[at + 1]
        if not 0 <= start <= end <= len(stored):
            raise ValueError("the offsets of keys do not ascend within their bytes")
        key, here = bytes(stored[start:end]), skip
        for place, (column, (cell, reached)) in enumerate(
            zip(found, parsed(key, skip, columns), strict=True)
        ):
            if reached < 0:
                raise CorruptionError(
                    f"{where}, key {key.hex()}", f"no key of its table: column {place} does not fit"
                )
            column.append(cell)
            here = reached
        ends.append(start + here)
    return [
        made(column, width) for column, (_, _, _, width) in zip(found, columns, strict=True)
    ], ends.tobytes()


# -- single rows

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCHS: Final = {shapes.INSTANT: _EPOCH, shapes.LOCAL: _EPOCH.replace(tzinfo=None)}


class RowDicts:
    def __init__(
        self,
        where: str,
        template: dict[str, Any],
        prefix: bytes,
        keys: Sequence[KeyRead],
        number: int,
        widths: Sequence[int],
        cells: Sequence[CellRead],
    ) -> None:
        self._where, self._template = where, template
        self._prefix, self._number = prefix, number
        self._keys = list(keys)
        self._shapes = [(kind, tag, flips, width) for _, kind, tag, flips, width, _, _ in keys]
        self._cells = list(cells)
        self._shape = Shape(number, widths)
        self._wanted = [place for _, place, _, _, _ in cells]

    def read(self, key: bytes, value: bytes) -> dict[str, Any] | None:
        if len(value) < HEAD.size or (value[0] >> 4, HEAD.unpack_from(value)[1]) != (
            ROW_FORMAT,
            self._number,
        ):
            return None
        row = self._template.copy()
        if any(name is not None for name, *_ in self._keys):
            self._read_key(key, row)
        try:
            found = self._shape.cells(value, self._wanted, f"a row of {self._where}")
            for (name, _, letter, way, call), cell in zip(self._cells, found, strict=True):
                row[name] = None if cell is None else _value(_stored(letter, cell), way, call)
        except UnicodeDecodeError as error:
            raise CorruptionError(f"a row of {self._where}", f"no UTF-8: {error}") from None
        return row

    def read_all(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        otherwise: Callable[[bytes, bytes], dict[str, Any]],
    ) -> list[dict[str, Any] | None]:
        rows: list[dict[str, Any] | None] = []
        for key, value in zip(keys, values, strict=True):
            row = None if value is None else self.read(key, value)
            rows.append(otherwise(key, value) if row is None and value is not None else row)
        return rows

    def _read_key(self, key: bytes, row: dict[str, Any]) -> None:
        here = len(self._prefix)
        try:
            for column, (cell, end) in zip(
                self._keys, parsed(key, here, self._shapes), strict=True
            ):
                name, kind, *_, way, call = column
                here = end
                if end < 0 or cell is None:
                    here = -1
                    break
                if name is not None:
                    row[name] = _value(_element_value(kind, cell), way, call)
        except (ValueError, OverflowError):
            here = -1
        if here != len(key):
            raise CorruptionError(f"{self._where}, key {key.hex()}", "no key of its table")


def _element_value(kind: int, cell: bytes) -> Any:
    if kind in (shapes.SIGNED, shapes.UNSIGNED):
        return int.from_bytes(cell, "little", signed=kind == shapes.SIGNED)
    if kind == shapes.DOUBLE:
        return struct.unpack("<d", cell)[0]
    return cell[0] if kind == shapes.BOOLEAN else cell


def _stored(letter: str, cell: bytes) -> Any:
    return cell if letter == "s" else struct.unpack(f"<{letter}", cell)[0]


def _value(stored: Any, way: int, call: Callable[[Any], Any] | None) -> Any:
    if way == shapes.STORED:
        return stored
    if way == shapes.TEXT:
        return str(stored, "utf-8")
    if way == shapes.TRUTH:
        return bool(stored)
    epoch = _EPOCHS.get(way)
    if epoch is not None and shapes.INSTANT_LEAST <= stored <= shapes.INSTANT_MOST:
        return epoch + timedelta(0, 0, stored)
    assert call is not None
    return call(stored)


def row_keys(
    entries: Sequence[bytes],
    skip: int,
    columns: Sequence[tuple[int, int, bool, int]],
    prefix: bytes,
    where: str,
) -> list[bytes]:
    found = []
    for entry in entries:
        end = skip
        for place, (_, end) in enumerate(parsed(entry, skip, columns)):
            if end < 0:
                raise CorruptionError(
                    f"{where}, key {entry.hex()}",
                    f"no key of its table: column {place} does not fit",
                )
        found.append(prefix + entry[end:])
    return found
