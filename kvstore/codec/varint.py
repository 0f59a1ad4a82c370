"""Numbers of seven bits to a byte, the lowest first (LEB128), in files of RocksDB and Parquet.

number := | 1xxxxxxx | ... | 0xxxxxxx |     at most ten bytes
"""

from __future__ import annotations

_SHIFT_MAX = 63


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and the place behind it.

    Raises `IndexError` if `data` ends first, and `ValueError` if the number has more than ten
    bytes.
    """
    found = shift = 0
    while (byte := data[at]) & 128:
        found |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if shift > _SHIFT_MAX:
            raise ValueError("a number of a header has no end")
    return found | byte << shift, at + 1


def write_varint(number: int) -> bytes:
    """The bytes of a number from 0 to 2**64 - 1."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
