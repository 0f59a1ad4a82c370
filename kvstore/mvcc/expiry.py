"""The records of expiries: which version of a key expires, and at what time.

A put that expires writes two records beside its version, in the same commit:

    carried := | expiry | "k" | user key |              value: | due u64 |
    waiting := | expiry | "t" | due u64 | user key |    value: empty

    expiry := | reserved | 00 | "x" |     reserved: nine bytes ff, see kvstore.span

Both are ordinary keys with versions. So change entries, backups, restores and replicas carry them
like all other keys. `carried` tells of a key when it expires. `waiting` sorts the keys by their due
times, and is a hint: `carried` decides.

Invariants
1. A key expires if its newest version is a value with the same timestamp as its newest `carried`
   record. Any later write to the key, with another timestamp, cancels the expiry.
2. A due time is above the timestamp of the commit that wrote its records.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvstore.errors import CorruptionError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.span import RESERVED, Span

EXPIRY: Final = RESERVED + b"\x00x"
"""All records of expiries have keys that begin with this."""

CARRIED: Final = EXPIRY + b"k"
WAITING: Final = EXPIRY + b"t"

_DUE = struct.Struct(">Q")
_KEY_AT: Final = len(WAITING) + _DUE.size


class WaitingKey(NamedTuple):
    """A key, and the time at which a version of it may be due."""

    due: int
    key: bytes


def longest_key() -> int:
    """The bytes of the longest key that may expire: its record is a key as well."""
    return KEY_BYTES_MAX - _KEY_AT


def encode_due(due: int) -> bytes:
    """A due time as records have it."""
    return _DUE.pack(due)


def decode_due(value: bytes, key: bytes) -> int:
    """The due time in the `carried` record of `key`."""
    if len(value) != _DUE.size:
        raise CorruptionError(f"the expiry of key {key.hex()}", f"{len(value)} bytes are no time")
    due: int = _DUE.unpack(value)[0]
    return due


def carried_key(key: bytes) -> bytes:
    """The key of the record that tells when `key` expires."""
    return CARRIED + key


def waiting_key(due: int, key: bytes) -> bytes:
    """The key of the record by which `key` is found at `due`."""
    return WAITING + _DUE.pack(due) + key


def decode_waiting(stored: bytes) -> WaitingKey:
    """The due time and the key of a `waiting` record."""
    if len(stored) < _KEY_AT:
        raise CorruptionError(f"key {stored.hex()}", "it has no due time")
    return WaitingKey(_DUE.unpack_from(stored, len(WAITING))[0], stored[_KEY_AT:])


def waiting_from(due: int) -> Span:
    """The `waiting` records of the time `due` and of later times."""
    return Span(WAITING + _DUE.pack(due), WAITING[:-1] + bytes([WAITING[-1] + 1]))
