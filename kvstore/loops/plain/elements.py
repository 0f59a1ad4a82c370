"""Keys of several columns, whole columns at a time: `kvstore.codec.tuples` has the bytes.

A column is described by its kind (`kvstore.loops.contract`), the tag of its elements, whether its
elements are flipped, and its width in bytes, 0 if it varies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from typing_extensions import Buffer

from kvstore.codec.ordered import frame
from kvstore.codec.tuples import FALSE, NULL, SIGN, TRUE, UNSIGNED, flip
from kvstore.errors import CorruptionError
from kvstore.loops import contract
from kvstore.loops.contract import ARRAY_BYTES_MAX, Column, Made
from kvstore.loops.plain.buffers import cells, made
from kvstore.loops.plain.parts import ALL_ONES, parsed

KeyColumn: TypeAlias = (
    "tuple[int, int, bool, int, Buffer | None, int, Buffer | None, Buffer | None]"
)
"""Kind, tag and flip, and the five items of a column of values."""

_NAN: Final = 0x7FF8 << 48
_WIDTHS: Final = {
    contract.SIGNED: 8,
    contract.UNSIGNED: 8,
    contract.DOUBLE: 8,
    contract.FRAMED: 0,
    contract.BOOLEAN: 1,
    contract.WHOLE: 0,
}


def encode_keys(
    prefix: bytes, columns: Sequence[KeyColumn], count: int
) -> tuple[bytes, bytes] | None:
    """`count` keys that begin with `prefix`, as the two buffers of an Arrow binary array. None
    where one array cannot hold them."""
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
    if _WIDTHS.get(kind, width) != width or (kind == contract.FIXED and not width):
        raise ValueError(f"kind {kind} does not go with width {width}")


def _element(kind: int, tag: bytes, cell: bytes | None) -> bytes:
    if cell is None:
        return NULL
    if kind == contract.BOOLEAN:
        return TRUE if cell != b"\x00" else FALSE
    if kind == contract.FRAMED:
        return tag + frame(cell)
    if kind in (contract.FIXED, contract.WHOLE):
        return tag + cell
    number = int.from_bytes(cell, "little")
    if kind == contract.UNSIGNED and number >= SIGN:
        return UNSIGNED + number.to_bytes(8, "big")
    if kind == contract.DOUBLE:
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
    """The columns at the beginning of the keys from `first` on in an Arrow binary array, behind
    `skip` bytes; and the offsets in `data` at which the last column ends in each key.

    Raises `CorruptionError` that names `where` and the key.
    """
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
