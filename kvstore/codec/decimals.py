"""Decimal numbers as bytes that sort as the numbers do.

    decimal  := 80                                      zero
              | c0 | magnitude |                        positive
              | 40 | magnitude, all bits flipped |      negative
    magnitude := | exponent u16 | pair u8 ... | 00 |

A number is 0.d1d2d3... * 10^e with a first digit above 0. The exponent is stored as e + 2^15,
big-endian. A pair is two digits plus 1, so that the end sorts below every further pair. Equal
numbers have the same bytes: 1.50 decodes as 1.5.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from kvstore.errors import UsageError

_ZERO: Final = b"\x80"
_POSITIVE: Final = b"\xc0"
_NEGATIVE: Final = b"\x40"
_BIAS: Final = 1 << 15
_FLIP: Final = bytes(range(255, -1, -1))
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
