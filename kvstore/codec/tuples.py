"""Several values as one key whose bytes sort as the values do, column by column.

    tuple   := element*                a tuple sorts before the longer ones that begin with it
    element := 01                      null, before everything else
             | 02                      false
             | 03                      true
             | 10 | int64 |            big-endian, sign bit flipped
             | 20 | double |           big-endian; positive: sign bit flipped, negative: all bits
             | 30 | framed bytes |     see codec/ordered.py
             | 40 | framed UTF-8 |     sorts by code point
             | 50 | int64 |            days since the epoch, as an integer
             | 60 | int64 |            microseconds since the epoch, as an integer

Invariants
1. The bytes of two tuples with values of the same types sort as the tuples do. -0.0 is 0.0, and NaN
   sorts above all numbers, as in Spark.
2. Decoding an encoded tuple returns its values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Final, TypeAlias

from kvstore.codec.ordered import TERMINATOR, check, frame, unframe
from kvstore.errors import CorruptionError, UsageError

Element: TypeAlias = "bool | int | float | bytes | str | date | datetime | None"

NULL: Final = b"\x01"
FALSE: Final = b"\x02"
TRUE: Final = b"\x03"
INTEGER: Final = b"\x10"
DOUBLE: Final = b"\x20"
BYTES: Final = b"\x30"
TEXT: Final = b"\x40"
DAY: Final = b"\x50"
INSTANT: Final = b"\x60"

SIGN: Final = 1 << 63
_U64 = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
_ALL_ONES: Final = (1 << 64) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)


def encode_tuple(values: Sequence[Element]) -> bytes:
    """The key of `values`. Raises `UsageError` for another type, an integer beyond 64 bits, or a
    datetime without a time zone."""
    return b"".join(map(_encode, values))


def decode_tuple(key: bytes) -> tuple[Element, ...]:
    """The values of a key. Raises `CorruptionError` for bytes that no tuple has."""
    try:
        return tuple(_decoded(key))
    except (ValueError, OverflowError) as error:  # no UTF-8; a day or an instant out of range
        raise CorruptionError(f"key {key.hex()}", f"no tuple: {error}") from error


def _encode(value: Element) -> bytes:
    if value is None:
        return NULL
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, int):
        return INTEGER + _encode_integer(value)
    if isinstance(value, float):
        return DOUBLE + _encode_double(value)
    if isinstance(value, bytes):
        return BYTES + frame(value)
    if isinstance(value, str):
        return TEXT + frame(value.encode())
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise UsageError(f"{value!r} has no time zone", "pass an aware datetime")
        return INSTANT + _encode_integer((value - _EPOCH) // _MICROSECOND)
    if isinstance(value, date):
        return DAY + _encode_integer(value.toordinal() - _EPOCH_DAY)
    raise UsageError(f"{type(value).__name__} has no order-preserving form", "convert it")


def _encode_integer(value: int) -> bytes:
    if not -SIGN <= value < SIGN:
        raise UsageError(f"{value} does not fit 64 bits", "encode it as text or bytes")
    return _U64.pack(value + SIGN)


def _encode_double(value: float) -> bytes:
    number = math.nan if value != value else value + 0.0  # one NaN, and no -0.0
    bits = _U64.unpack(_DOUBLE.pack(number))[0]
    return _U64.pack(bits ^ (_ALL_ONES if bits & SIGN else SIGN))


def _decoded(key: bytes) -> Iterator[Element]:
    at = 0
    while at < len(key):
        tag, at = key[at : at + 1], at + 1
        if tag in _CONSTANTS:
            yield _CONSTANTS[tag]
        elif tag in _FRAMED:
            end = _frame_end(key, at)
            check(key[at:end], where=f"key {key.hex()}")
            yield _FRAMED[tag](unframe(key[at:end]))
            at = end
        elif tag in _FIXED and at + 8 <= len(key):
            yield _FIXED[tag](_U64.unpack_from(key, at)[0])
            at += 8
        else:
            raise CorruptionError(f"key {key.hex()}", f"no tuple: byte {at - 1}")


def _frame_end(key: bytes, at: int) -> int:
    while True:
        at = key.find(b"\x00", at)
        if at < 0 or at + 1 == len(key):
            raise CorruptionError(f"key {key.hex()}", "no tuple: a string does not end")
        if key[at : at + 2] == TERMINATOR:
            return at + 2
        at += 2


def _decode_double(stored: int) -> float:
    bits = stored ^ (SIGN if stored & SIGN else _ALL_ONES)
    number: float = _DOUBLE.unpack(_U64.pack(bits))[0]
    if _U64.unpack(_encode_double(number))[0] != stored:
        raise ValueError(f"{stored:016x} is another form of {number}")
    return number


_CONSTANTS: Final[Mapping[bytes, Element]] = {NULL: None, FALSE: False, TRUE: True}
_FRAMED: Final[Mapping[bytes, Callable[[bytes], Element]]] = {BYTES: bytes, TEXT: bytes.decode}
_FIXED: Final[Mapping[bytes, Callable[[int], Element]]] = {
    INTEGER: lambda bits: bits - SIGN,
    DOUBLE: _decode_double,
    DAY: lambda bits: date.fromordinal(bits - SIGN + _EPOCH_DAY),
    INSTANT: lambda bits: _EPOCH + timedelta(microseconds=bits - SIGN),
}
