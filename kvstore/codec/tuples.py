"""Several values as one key whose bytes sort as the values do, column by column.

    tuple   := element*                a tuple sorts before the longer ones that begin with it
    element := 01                      null, before everything else
             | 02                      false
             | 03                      true
             | 10 | int64 |            big-endian, sign bit flipped
             | 18 | uint64 |           big-endian: an integer from 2^63 on
             | 20 | double |           big-endian; positive: sign bit flipped, negative: all bits
             | 28 | decimal |          see codec/tuples.py
             | 30 | framed bytes |     see codec/keys.py
             | 40 | framed UTF-8 |     sorts by code point
             | 50 | int64 |            days since the epoch, as an integer
             | 60 | int64 |            microseconds since the epoch, as an integer
             | 70 | UUID 16 |
             | an element, all bits flipped: `desc`, which sorts the other way round

Invariants
1. The bytes of two tuples with values of the same types sort as the tuples do. -0.0 is 0.0, and
   NaN sorts above all numbers, as in Spark.
2. Decoding an encoded tuple returns its values.
3. No element is the beginning of another one. So a flipped element sorts the other way round, and
   an element ends where its own bytes say.

`encode_tuple` and `decode_tuple` are public: other programs write and read such keys. Decimal
numbers have an encoding of their own, which sorts as the numbers do.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final, TypeAlias
from uuid import UUID

from kvstore.codec.keys import TERMINATOR, check, frame, unframe
from kvstore.errors import CorruptionError, UsageError


@dataclass(frozen=True, slots=True)
class desc:  # noqa: N801  # reads as the keyword of a query: key=["device", desc("ts")]
    """In a tuple: `value`, which sorts the other way round. In the key of a table: the column of
    this name, greatest first."""

    value: Any


Element: TypeAlias = (
    "bool | int | float | Decimal | bytes | str | date | datetime | UUID | desc | None"
)

NULL: Final = b"\x01"
FALSE: Final = b"\x02"
TRUE: Final = b"\x03"
INTEGER: Final = b"\x10"
UNSIGNED: Final = b"\x18"
DOUBLE: Final = b"\x20"
DECIMAL: Final = b"\x28"
BYTES: Final = b"\x30"
TEXT: Final = b"\x40"
DAY: Final = b"\x50"
INSTANT: Final = b"\x60"
UNIQUE: Final = b"\x70"
FLIPPED: Final = 0x80
"""Tags from this on begin a flipped element."""

SIGN: Final = 1 << 63
UUID_BYTES: Final = 16
_U64 = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
_ALL_ONES: Final = (1 << 64) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)
_FLIP: Final = bytes(range(255, -1, -1))


def encode_tuple(values: Sequence[Element]) -> bytes:
    """The key of `values`. Raises `UsageError` for another type, an integer beyond 64 bits, or a
    datetime without a time zone."""
    return b"".join(map(encode_element, values))


def decode_tuple(key: bytes) -> tuple[Element, ...]:
    """The values of a key. Raises `CorruptionError` for bytes that no tuple has."""
    return tuple(value for value, _ in elements(key))


def flip(element: bytes) -> bytes:
    """The element with all bits flipped. Flipping twice gives the element back."""
    return element.translate(_FLIP)


def elements(key: bytes, at: int = 0) -> Iterator[tuple[Element, int]]:
    """The values of `key` from `at` on, each with the place where it ends. Raises
    `CorruptionError` for bytes that no tuple has."""
    try:
        while at < len(key):
            if key[at] < FLIPPED:
                value, at = _decoded(key, at, key)
                yield value, at
            else:
                flipped, end = _decoded(flip(key[at:]), 0, key)
                at += end
                yield desc(flipped), at
    except (ValueError, OverflowError) as error:  # no UTF-8; a day or an instant out of range
        raise CorruptionError(f"key {key.hex()}", f"no tuple: {error}") from error


def encode_element(value: Element) -> bytes:
    """One value of a tuple. Raises as `encode_tuple`."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, int):
        return encode_integer(value)
    if isinstance(value, float):
        return DOUBLE + encode_double(value)
    if isinstance(value, bytes):
        return BYTES + frame(value)
    if isinstance(value, str):
        return TEXT + frame(value.encode())
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise UsageError(f"{value!r} has no time zone", "pass an aware datetime")
        return encode_fixed(INSTANT, (value - _EPOCH) // _MICROSECOND)
    if isinstance(value, date):
        return encode_fixed(DAY, value.toordinal() - _EPOCH_DAY)
    if isinstance(value, Decimal):
        return DECIMAL + encode_decimal(value)
    if isinstance(value, UUID):
        return UNIQUE + value.bytes
    if isinstance(value, desc):
        return flip(encode_element(value.value))
    raise UsageError(f"{type(value).__name__} has no order-preserving form", "convert it")


def encode_integer(value: int) -> bytes:
    """The element of an integer from -2^63 to 2^64 - 1."""
    if SIGN <= value <= _ALL_ONES:
        return UNSIGNED + _U64.pack(value)
    return encode_fixed(INTEGER, value)


def encode_fixed(tag: bytes, value: int) -> bytes:
    """An element with a tag and a signed integer of 64 bits."""
    if not -SIGN <= value < SIGN:
        raise UsageError(f"{value} does not fit 64 bits", "encode it as text or bytes")
    return tag + _U64.pack(value + SIGN)


def encode_double(value: float) -> bytes:
    """The eight bytes of a double."""
    number = math.nan if value != value else value + 0.0  # one NaN, and no -0.0
    bits = _U64.unpack(_DOUBLE.pack(number))[0]
    return _U64.pack(bits ^ (_ALL_ONES if bits & SIGN else SIGN))


def _decoded(data: bytes, at: int, key: bytes) -> tuple[Element, int]:
    """The element of `data` at `at`, and where it ends. `key` is named in errors."""
    tag, at = data[at : at + 1], at + 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag in _FRAMED:
        end = _frame_end(data, at, key)
        check(data[at:end], where=f"key {key.hex()}")
        return _FRAMED[tag](unframe(data[at:end])), end
    if tag in _FIXED and at + 8 <= len(data):
        return _FIXED[tag](_U64.unpack_from(data, at)[0]), at + 8
    if tag == DECIMAL:
        end = decimal_end(data, at)
        return decode_decimal(data[at:end]), end
    if tag == UNIQUE and at + UUID_BYTES <= len(data):
        return UUID(bytes=data[at : at + UUID_BYTES]), at + UUID_BYTES
    raise CorruptionError(f"key {key.hex()}", f"no tuple: tag {tag.hex() or 'missing'}")


def _frame_end(data: bytes, at: int, key: bytes) -> int:
    while True:
        at = data.find(b"\x00", at)
        if at < 0 or at + 1 == len(data):
            raise CorruptionError(f"key {key.hex()}", "no tuple: a string does not end")
        if data[at : at + 2] == TERMINATOR:
            return at + 2
        at += 2


def _decode_double(stored: int) -> float:
    bits = stored ^ (SIGN if stored & SIGN else _ALL_ONES)
    number: float = _DOUBLE.unpack(_U64.pack(bits))[0]
    if _U64.unpack(encode_double(number))[0] != stored:
        raise ValueError(f"{stored:016x} is another form of {number}")
    return number


def _decode_unsigned(stored: int) -> int:
    if stored < SIGN:
        raise ValueError(f"{stored} is stored as another kind of integer")
    return stored


_CONSTANTS: Final[Mapping[bytes, Element]] = {NULL: None, FALSE: False, TRUE: True}
_FRAMED: Final[Mapping[bytes, Callable[[bytes], Element]]] = {BYTES: bytes, TEXT: bytes.decode}
_FIXED: Final[Mapping[bytes, Callable[[int], Element]]] = {
    INTEGER: lambda bits: bits - SIGN,
    UNSIGNED: _decode_unsigned,
    DOUBLE: _decode_double,
    DAY: lambda bits: date.fromordinal(bits - SIGN + _EPOCH_DAY),
    INSTANT: lambda bits: _EPOCH + timedelta(microseconds=bits - SIGN),
}


# --------------------------------------------------------------------------------------------------
# Decimal numbers as bytes that sort as the numbers do.
#
#     decimal  := 80                                      zero
#               | c0 | magnitude |                        positive
#               | 40 | magnitude, all bits flipped |      negative
#     magnitude := | exponent u16 | pair u8 ... | 00 |
#
# A number is 0.d1d2d3... * 10^e with a first digit above 0. The exponent is stored as e + 2^15,
# big-endian. A pair is two digits plus 1, so that the end sorts below every further pair. Equal
# numbers have the same bytes: 1.50 decodes as 1.5.

_ZERO: Final = b"\x80"
_POSITIVE: Final = b"\xc0"
_NEGATIVE: Final = b"\x40"
_BIAS: Final = 1 << 15
EXPONENT_MAX: Final = _BIAS - 1


def encode_decimal(value: Decimal) -> bytes:
    """The bytes of a finite number. Raises `UsageError` for NaN, infinity and an exponent beyond
    15 bits."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise UsageError(f"{value} has no place among decimals", "pass a finite number")
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return _ZERO
    power = exponent + len(text)
    if not -EXPONENT_MAX <= power <= EXPONENT_MAX:
        raise UsageError(f"{value} has the exponent {power}", f"at most {EXPONENT_MAX} is stored")
    text = text.rstrip("0")
    if len(text) % 2:
        text += "0"
    pairs = bytes(int(text[at : at + 2]) + 1 for at in range(0, len(text), 2))
    magnitude = (power + _BIAS).to_bytes(2, "big") + pairs + b"\x00"
    return _NEGATIVE + magnitude.translate(_FLIP) if sign else _POSITIVE + magnitude


def decimal_end(stored: bytes, at: int) -> int:
    """Where the decimal that begins at `at` ends. Raises `ValueError` where it does not."""
    head = stored[at : at + 1]
    if head == _ZERO:
        return at + 1
    end = stored.find(b"\xff" if head == _NEGATIVE else b"\x00", at + 3)
    if head not in (_POSITIVE, _NEGATIVE) or end < 0:
        raise ValueError("a decimal does not end")
    return end + 1


def decode_decimal(stored: bytes) -> Decimal:
    """The number of bytes that end where `decimal_end` says. Raises `ValueError` for bytes that no
    number has."""
    if stored == _ZERO:
        return Decimal(0)
    is_negative = stored[:1] == _NEGATIVE
    magnitude = stored[1:].translate(_FLIP) if is_negative else stored[1:]
    power = int.from_bytes(magnitude[:2], "big") - _BIAS
    text = "".join(f"{pair - 1:02}" for pair in magnitude[2:-1])
    if not text.isdigit():
        raise ValueError("a decimal without digits")
    found = Decimal((int(is_negative), tuple(map(int, text)), power - len(text)))
    if encode_decimal(found) != stored:
        raise ValueError(f"another form of {found}")
    return found
