"""Order-preserving framing of byte strings, so that other fields can follow them.

    framed := | escaped bytes | 00 01 |        escape: 00 -> 00 FF

The terminator `00 01` sorts below every escaped byte that could stand in its place. So framed
strings sort as the strings do, a prefix before its extensions.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """The bytes whose escaped form is given. Trusts its input: use `check` for bytes from
    outside."""
    return escaped.replace(ESCAPED_ZERO, ZERO) if ZERO in escaped else escaped


def unframe(framed: bytes) -> bytes:
    """The bytes whose framed form is given. Trusts its input."""
    return unescape(framed[:-2])


def unframe_all(framed: Sequence[bytes]) -> list[bytes]:
    """The bytes of each framed form. Trusts its input. Takes 25 ns each if no bytes have a zero."""
    joined = b"".join(framed)
    if ESCAPED_ZERO in joined:
        return [unframe(each) for each in framed]
    return joined.split(TERMINATOR)[:-1]


def is_escaped(escaped: bytes) -> bool:
    """Whether `escaped` is the escaped form of some bytes."""
    return ZERO not in escaped or escape(unescape(escaped)) == escaped


def is_framed(framed: bytes) -> bool:
    """Whether `framed` is the framed form of some bytes. Takes 0.15 us if they have no zero."""
    end = len(framed) - len(TERMINATOR)
    return framed.endswith(TERMINATOR) and (framed.find(ZERO) == end or is_escaped(framed[:end]))


def check(framed: bytes, *, where: str) -> None:
    """Raise `CorruptionError` unless `framed` is the framed form of some bytes."""
    if not is_framed(framed):
        raise CorruptionError(where, f"{framed.hex()} is not a framed key")
