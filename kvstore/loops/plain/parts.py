"""Parts of stored rows and keys of tables: the values of a row, and the elements of a key."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

from kvstore.codec.decimals import decimal_end
from kvstore.codec.ordered import TERMINATOR, is_framed, unframe
from kvstore.codec.tuples import FALSE, NULL, SIGN, TRUE, UNSIGNED, flip
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.loops import contract
from kvstore.loops.contract import ROW_FORMAT

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
    if kind == contract.BOOLEAN:
        return (b"\x01" if first == TRUE else b"\x00"), int(first in (TRUE, FALSE))
    if kind in (contract.FRAMED, contract.WHOLE):
        if first != bytes([tag]):
            return b"", 0
        return (_framed if kind == contract.FRAMED else _whole)(rest)
    if len(rest) <= width or first not in (bytes([tag]), UNSIGNED):
        return b"", 0
    if kind == contract.FIXED:
        return rest[1 : width + 1], (width + 1) * (first == bytes([tag]))
    number = int.from_bytes(rest[1:9], "big")
    is_large = kind == contract.UNSIGNED and first == UNSIGNED
    if is_large:
        return number.to_bytes(8, "little"), 9 if number & SIGN else 0
    if first != bytes([tag]) or (kind == contract.UNSIGNED and not number & SIGN):
        return b"", 0
    if kind == contract.DOUBLE:
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
