"""Streams: parts of the change index that consumers read in parallel.

    stream id := | token u64 | random 38 bits | position 22 bits | version 4 bits |    big-endian

The token of a key is a 64-bit hash, and the generation in force assigns tokens to streams. Ids sort
by token, so neighbouring streams lie together. The random bits keep the streams of two generations
apart.

Invariants
1. The token of a key never changes: it is part of the format.
2. `CONTROL_STREAM` is in every generation. If it is the only stream it takes every change, and no
   key is hashed. Otherwise it takes range deletes, imports and reverts, which concern many tokens.

Source: ScyllaDB's CDC stream ids.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from kvstore.errors import CorruptionError

TOKEN_BYTES: Final = 8
TOKEN_MAX: Final = (1 << 64) - 1
RANDOM_BITS: Final = 38
POSITION_BITS: Final = 22
VERSION_BITS: Final = 4
STREAM_VERSION: Final = 1
STREAM_ID_BYTES: Final = 16


class StreamFields(NamedTuple):
    """The fields of a stream id."""

    token: int
    random: int
    position: int


def encode_stream(fields: StreamFields) -> bytes:
    """The 16 bytes of a stream id."""
    token, random, position = fields
    assert token <= TOKEN_MAX
    assert random < 1 << RANDOM_BITS
    assert position < 1 << POSITION_BITS
    packed = ((token << RANDOM_BITS | random) << POSITION_BITS | position) << VERSION_BITS
    return (packed | STREAM_VERSION).to_bytes(STREAM_ID_BYTES, "big")


def decode_stream(stream: bytes) -> StreamFields:
    """The fields of a stream id. Raises `CorruptionError` on other bytes."""
    packed = int.from_bytes(stream, "big")
    if len(stream) != STREAM_ID_BYTES or packed & (1 << VERSION_BITS) - 1 != STREAM_VERSION:
        raise CorruptionError(f"stream id {stream.hex()}", "not a stream id of version 1")
    packed >>= VERSION_BITS
    position = packed & (1 << POSITION_BITS) - 1
    packed >>= POSITION_BITS
    return StreamFields(packed >> RANDOM_BITS, packed & (1 << RANDOM_BITS) - 1, position)


CONTROL_STREAM: Final = encode_stream(StreamFields(0, 0, 0))


def token_bytes(key: bytes) -> bytes:
    """The token of a key, as a stream id begins: 64 bits of the key's BLAKE2b hash. 0.7 us."""
    return hashlib.blake2b(key, digest_size=TOKEN_BYTES).digest()
