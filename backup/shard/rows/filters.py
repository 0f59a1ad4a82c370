"""Filters of keys: a reader learns that a row group lacks a key without fetching the group.

They are the split block Bloom filters of Parquet's own format, which Parquet's writer makes and
other programs use too. Parquet's reader has no call that asks one, so they are asked here.

    filter := header (Thrift) | block 32 bytes ...       a block is eight words u32, little-endian

A key sets one bit in each word of one block. The upper half of its hash, XXH64, chooses the block,
and the lower half the bits. A filter that lacks one of the bits lacks the key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from kvstore.backup.shard.rows.thrift import number, read_struct, struct

_SALTS: Final = (
    0x47B6137B,
    0x44974D91,
    0x8824AD5B,
    0xA2B7289D,
    0x705495C7,
    0x2DF1424B,
    0x9EFC4947,
    0x5C6BFB31,
)
_BLOCK_BYTES = 32
_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def may_have(data: bytes, key: bytes) -> bool:
    """Whether the filter in `data` may have `key`. False is certain.

    Raises `ValueError` if `data` holds no filter, or one of another kind.
    """
    header, at = read_struct(data)
    kinds = (struct(header, field) for field in (2, 3, 4))
    if any(1 not in kind for kind in kinds) or number(header, 1) != len(data) - at:
        raise ValueError("a filter of keys is of another kind, or cut short")
    count = (len(data) - at) // _BLOCK_BYTES
    if not count or (len(data) - at) % _BLOCK_BYTES:
        raise ValueError("a filter of keys has no whole blocks")
    found = xxh64(key)
    at += ((found >> 32) * count >> 32) * _BLOCK_BYTES
    low = found & 0xFFFFFFFF
    return all(
        int.from_bytes(data[at + 4 * place : at + 4 * place + 4], "little")
        >> ((low * salt & 0xFFFFFFFF) >> 27)
        & 1
        for place, salt in enumerate(_SALTS)
    )


@lru_cache(maxsize=4096)
def xxh64(data: bytes) -> int:
    """XXH64 of `data` with the seed 0, the hash of Parquet's filters. 4 us for a short key.

    Source: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
    """
    at, size = 0, len(data)
    if size >= 32:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        while at + 32 <= size:
            for place in range(4):
                word = int.from_bytes(data[at : at + 8], "little")
                lanes[place] = _round(lanes[place], word)
                at += 8
        turned = zip(lanes, (1, 7, 12, 18), strict=True)
        found = sum(_turn(lane, by) for lane, by in turned) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        found = _P5
    found = (found + size) & _MASK
    while at + 8 <= size:
        found ^= _round(0, int.from_bytes(data[at : at + 8], "little"))
        found = (_turn(found, 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= size:
        found ^= int.from_bytes(data[at : at + 4], "little") * _P1 & _MASK
        found = (_turn(found, 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        found ^= byte * _P5 & _MASK
        found = _turn(found, 11) * _P1 & _MASK
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    return found ^ found >> 32


def _round(lane: int, word: int) -> int:
    return _turn((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _turn(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) & _MASK
