"""The records of expiries: which version of a key expires, and at what time.

A put that expires writes two records beside its version, in the same commit:

    carried := | expiry | "k" | user key |             value: | due u64 | import u64 |
    waiting := | expiry | "t" | due u64 | import u64 | user key |    value: | row |

    expiry := | reserved | 00 | "x" |     reserved: nine bytes ff, see kvstore.base.span
    import := the id of the import that brought the record, 0 for a commit
    row    := the key of the row with which an index entry expires; empty for all other keys

Both are ordinary keys with versions. So change entries, backups, restores and replicas carry them
like all other keys. `waiting` sorts the keys by their due times. `carried` tells of a key where
its `waiting` record is.

Invariants
1. A key expires if its newest version is a value with the same timestamp as a `waiting` record
   that is alive. An index entry expires only if its row does by the same timestamp. Any later
   write to the key, with another timestamp, cancels the expiry. The revert of an import is such a
   write: a value that it brings back has the time of the revert.
2. No import covers a `waiting` record of a commit or of another import, so its revert gives none
   a new time.
3. A due time is above the timestamp of the commit that wrote its records. A due time of an import
   may lie below the stamp of the import: the key is due right after it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvstore.base.span import RESERVED, Span, prefix_end
from kvstore.codec.keys import span_bounds
from kvstore.engine.api import DATA
from kvstore.errors import CorruptionError
from kvstore.limits import EXPIRY_READ_BYTES, KEY_BYTES_MAX
from kvstore.mvcc.lookup import SearchBounds
from kvstore.mvcc.versions import Versions

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


# --------------------------------------------------------------------------------------------------
# The times at which versions expire, found by their records.
#
# Invariant: a record tells of a version only if it has the timestamp of the version. So neither a
# later write to a key nor the revert of an import lends the record of one version to another.


def dues_of(versions: Versions, keys: Sequence[bytes], written: Sequence[int]) -> list[Due | None]:
    """The due time of the version that each of `keys` has with the timestamp in `written`; None if
    it does not expire. A look-up a key, and a second one for a key that expires."""
    carried, recorded = versions_of(versions, map(carried_key, keys), written)
    places = [place for place, time in enumerate(written) if time == recorded[place]]
    return _waiting(versions, keys, carried, recorded, places)


def dues_at(versions: Versions, keys: Sequence[bytes], at: int) -> list[Due | None]:
    """The time at which each of `keys` expires, as of `at`; None if it does not, or is absent. A
    look-up a key, and two more for a key that expires."""
    carried, recorded = versions_of(versions, map(carried_key, keys), [at] * len(keys))
    places = [place for place, value in enumerate(carried) if value is not None]
    _, written = versions_of(versions, (keys[place] for place in places), [at] * len(places))
    pairs = zip(places, written, strict=True)
    places = [place for place, time in pairs if time == recorded[place]]
    return _waiting(versions, keys, carried, recorded, places)


def _waiting(
    versions: Versions,
    keys: Sequence[bytes],
    carried: Sequence[bytes | None],
    recorded: Sequence[int],
    places: Sequence[int],
) -> list[Due | None]:
    """The due times in the `carried` records at `places`, if their `waiting` records were written
    at the same times; None at all other places."""
    found: list[Due | None] = [None] * len(keys)
    dues = {
        place: decode_due(value, keys[place])
        for place in places
        if (value := carried[place]) is not None
    }
    waiting = (waiting_key(due, keys[place]) for place, due in dues.items())
    _, times = versions_of(versions, waiting, [recorded[place] for place in dues])
    for (place, due), time in zip(dues.items(), times, strict=True):
        if time == recorded[place]:
            found[place] = due
    return found


def versions_of(
    versions: Versions, keys: Iterable[bytes], at: Sequence[int]
) -> tuple[list[bytes | None], list[int]]:
    """The value of each key as of its own time in `at`, with the time of its version: None and -1
    where the key is absent. Reads a bounded number of bytes at once."""
    asked = list(keys)
    if not asked:
        return [], []
    bounds = SearchBounds(bytes_max=EXPIRY_READ_BYTES)
    found = versions.get_timed(asked, array("q", at), bounds)
    if found is not None:
        return found.values, found.times.tolist()
    half = len(asked) // 2  # a single key has no bound
    first = versions_of(versions, asked[:half], at[:half])
    second = versions_of(versions, asked[half:], at[half:])
    return first[0] + second[0], first[1] + second[1]


def may_expire(versions: Versions, span: Span) -> bool:
    """Whether a version of a key in `span` may expire, or have expired. A seek."""
    records = carried_of(span)
    cursor = versions.engine.cursor(DATA, *span_bounds(records.start, records.end))
    keys, _ = cursor.take(1)
    cursor.close()
    return bool(keys)
