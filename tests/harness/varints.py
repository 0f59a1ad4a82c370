"""Numbers as files of RocksDB hold them: the other way of `kvstore.codec.varint`."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """A number, seven bits to a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
