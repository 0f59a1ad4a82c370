r"""Bytes, times and sizes as a person reads them. Keys and values are hostile.

    text, printable      as it is               flights/UA
    backslash            twice                  \\
    all other bytes      by their numbers       \x00\xff

Invariants
1. The notation is printable text on one line: no control character, no mark that turns the
   direction of text, no invisible character. So a key cannot look like another one by these means.
2. `from_notation(to_notation(raw)) == raw` for all bytes.
"""

from __future__ import annotations

import re
from typing import Final

from kvstore.errors import UsageError
from kvstore.timestamp import NS_PER_SECOND, TIMESTAMP_MAX, Timestamp

_ESCAPE: Final = re.compile(rb"\\(?:\\|x([0-9A-Fa-f]{2}))")
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_HEX_COLUMNS: Final = 16


def to_notation(raw: bytes, *, keeps: str = "") -> str:
    """The notation of bytes. Characters in `keeps` stay as they are."""
    return "".join(
        char if char in keeps else _shown(char) for char in raw.decode("utf-8", "surrogateescape")
    )


def _shown(char: str) -> str:
    if char == "\\":
        return "\\\\"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def from_notation(text: str) -> bytes:
    """The bytes of a notation. Raises `UsageError` for a backslash that begins no escape."""
    raw = text.encode("utf-8", "surrogatepass")
    rest = _ESCAPE.sub(b"", raw)
    if b"\\" in rest:
        raise UsageError(
            f"a backslash alone in {text[:100]!r}", r"write \\ for a backslash, \x00 for a byte"
        )
    return _ESCAPE.sub(lambda found: bytes.fromhex((found[1] or b"5c").decode()), raw)


def shortened(text: str, most: int) -> str:
    """The first characters of a text, with a mark where some are missing."""
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def is_text(raw: bytes) -> bool:
    """Whether a person can read the bytes: UTF-8 with few escapes. The last character may be
    cut off."""
    shown = to_notation(raw, keeps="\n\t\\")
    return len(shown) <= len(raw.decode("utf-8", "replace")) * 1.2 + 8


def hex_lines(raw: bytes) -> list[str]:
    """Bytes in hexadecimal, with their offsets and printable characters."""
    lines = []
    for at in range(0, len(raw), _HEX_COLUMNS):
        row = raw[at : at + _HEX_COLUMNS]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<{_HEX_COLUMNS * 3}} {shown}")
    return lines


def moment(at: int | None) -> str:
    """A time to the millisecond, which the field of the time takes back; a dash for no time.

    It is rounded up, as `kvstore.timestamp` says: the page as of it has the commit.
    """
    if at is None:
        return "-"
    whole = str(Timestamp(min(at_millisecond(at), TIMESTAMP_MAX)))
    return f"{whole[:10]} {whole[11:23]}Z"


def at_millisecond(at: int) -> int:
    """A time rounded up to milliseconds, in nanoseconds."""
    return -(-at // 10**6) * 10**6


def duration(ns: float) -> str:
    """A duration in its two largest units."""
    seconds = max(ns, 0) / NS_PER_SECOND
    if seconds < 10:
        return f"{seconds:.3g} s"
    words = []
    for length, unit in _UNITS:
        count, seconds = divmod(seconds, length)
        if count:
            words.append(f"{count:.0f} {unit}")
    return " ".join(words[:2])


def size(count: float) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
