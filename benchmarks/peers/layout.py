"""Versions in a plain ordered store, as its user would lay them out for keys of one length.

data := | user key 16 | 2^64 - 1 - version, u64 big-endian |   value; empty: deleted
log  := | version u64 | number u32 |                           user key 16, then the value
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from benchmarks.data import KEY_BYTES

_U64_MAX = (1 << 64) - 1
_SUFFIX = struct.Struct(">Q")
_LOG = struct.Struct(">QI")


def suffix(version: int) -> bytes:
    """The suffix of a user key at `version`."""
    return _SUFFIX.pack(_U64_MAX - version)


def log_key(version: int, number: int = 0) -> bytes:
    """The key in the log of change `number` of `version`."""
    return _LOG.pack(version, number)


def live(rows: Iterable[tuple[bytes, bytes]], version: int) -> Iterator[tuple[bytes, bytes]]:
    """The newest value at `version` of each key that is not deleted."""
    bound, decided = suffix(version), b""
    for stored, value in rows:
        key = stored[:KEY_BYTES]
        if key == decided or stored[KEY_BYTES:] < bound:
            continue
        decided = key
        if value:
            yield key, value
