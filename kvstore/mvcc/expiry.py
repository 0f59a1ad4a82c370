"""The records of expiries: which version of a key expires, and at what time.

A put that expires writes two records beside its version, in the same commit:

    carried := | expiry | "k" | user key |             value: | due u64 | import u64 |
    waiting := | expiry | "t" | due u64 | import u64 | user key |    value: | row |

    expiry := | reserved | 00 | "x" |     reserved: nine bytes ff, see kvstore.span
    import := the id of the import that brought the record, 0 for a commit
    row    := the key of the row with which an index entry expires; empty for all other keys

Both are ordinary keys with versions. So change entries, backups, restores and replicas carry them
like all other keys. `waiting` sorts the keys by their due times. `carried` tells of a key where its
`waiting` record is.

Invariants
1. A key expires if its newest version is a value with the same timestamp as a `waiting` record that
   is alive. An index entry expires only if its row does by the same timestamp. Any later write to
   the key, with another timestamp, cancels the expiry. The revert of an import is such a write: a
   value that it brings back has the time of the revert.
2. No import covers a `waiting` record of a commit or of another import, so its revert gives none
   a new time.
3. A due time is above the timestamp of the commit that wrote its records. A due time of an import
   may lie below the stamp of the import: the key is due right after it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvstore.errors import CorruptionError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.span import RESERVED, Span, prefix_end

EXPIRY: Final = RESERVED + b"\x00x"
"""All records of expiries have keys that begin with this."""

CARRIED: Final = EXPIRY + b"k"
WAITING: Final = EXPIRY + b"t"

_DUE = struct.Struct(">QQ")
_KEY_AT: Final = len(WAITING) + _DUE.size


class Due(NamedTuple):
    """A due time, and the id of the import that brought it, 0 for a commit."""

    time: int
    import_id: int = 0


class WaitingKey(NamedTuple):
    """A key, and the time at which a version of it may be due. `row` is the key of the row with
    which an index entry expires, and empty for all other keys."""

    due: Due
    key: bytes
    row: bytes = b""


def longest_key() -> int:
    """The bytes of the longest key that may expire: its record is a key as well."""
    return KEY_BYTES_MAX - _KEY_AT


def encode_due(due: Due) -> bytes:
    """A due time as `carried` records have it."""
    return _DUE.pack(*due)


def decode_due(value: bytes, key: bytes) -> Due:
    """The due time in the `carried` record of `key`."""
    if len(value) != _DUE.size:
        raise CorruptionError(f"the expiry of key {key.hex()}", f"{len(value)} bytes are no time")
    return Due(*_DUE.unpack(value))


def carried_key(key: bytes) -> bytes:
    """The key of the record that tells when `key` expires."""
    return CARRIED + key


def carried_of(span: Span) -> Span:
    """The `carried` records of the keys in `span`. A key that expires is shorter than the longest
    bound of a span, so a bound that is cut off divides such keys as the whole one does."""
    end = prefix_end(CARRIED) if span.end is None else carried_key(span.end)[:KEY_BYTES_MAX]
    return Span(carried_key(span.start)[:KEY_BYTES_MAX], end)


def waiting_key(due: Due, key: bytes) -> bytes:
    """The key of the record by which `key` is found at `due`."""
    return WAITING + _DUE.pack(*due) + key


def decode_waiting(stored: bytes, row: bytes = b"") -> WaitingKey:
    """The due time and the key of a `waiting` record, whose value is `row`."""
    if len(stored) < _KEY_AT:
        raise CorruptionError(f"key {stored.hex()}", "it has no due time")
    due = Due(*_DUE.unpack_from(stored, len(WAITING)))
    return WaitingKey(due, stored[_KEY_AT:], row)


def require_record(key: bytes, value: bytes | None = None) -> None:
    """Raise `CorruptionError` for a row that lies among the records of expiries, and is none."""
    if not key.startswith(EXPIRY):
        return
    if key.startswith(CARRIED):
        if value is not None:
            decode_due(value, key[len(CARRIED) :])
    elif key.startswith(WAITING):
        decode_waiting(key)
        if value and not value.startswith(RESERVED):
            raise CorruptionError(f"key {key.hex()}", f"{value.hex():.64} is no row of a table")
    else:
        raise CorruptionError(f"key {key.hex()}", "it is no record of an expiry")


def waiting_from(time: int) -> Span:
    """The `waiting` records of `time` and of later times."""
    return Span(WAITING + _DUE.pack(time, 0), WAITING[:-1] + bytes([WAITING[-1] + 1]))
