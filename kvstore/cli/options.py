"""Arguments and options that several commands share, and their parsers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeVar

import typer

from kvstore.cli.times import iso as iso
from kvstore.cli.times import to_duration as to_duration
from kvstore.errors import UsageError
from kvstore.span import Span

T = TypeVar("T", bound=str)

_CONTROLS: Final = (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F))
_ESCAPES: Final = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}
"""Control characters, the ends of lines, and marks that reverse the direction of text."""


class Encoding(str, Enum):
    """The notation of keys and values on the command line."""

    TEXT = "text"
    HEX = "hex"
    BASE64 = "base64"


StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store's directory.", show_default=False)
]
EncodingOption = Annotated[
    Encoding, typer.Option("--encoding", "-e", help="The notation of keys and values.")
]
KeyEncodingOption = Annotated[
    Encoding | None,
    typer.Option(help="The notation of keys, if values have another.", show_default=False),
]
ValueEncodingOption = Annotated[
    Encoding | None,
    typer.Option(help="The notation of values, if keys have another.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
AsOfOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Read at this time: 2026-11-22, '1 hour ago', yesterday, -1h, ISO-8601 with a zone, "
        "or nanoseconds. Default: the newest.",
        show_default=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=0, help="Print at most this many.", show_default=False)
]
LISTED_MAX: Final = 1000
"""Records that a list has unless --limit asks for more: a year of nightly loads, three a day."""
ListLimitOption = Annotated[int, typer.Option("--limit", min=0, help="List at most this many.")]
PrefixOption = Annotated[
    str | None,
    typer.Option("--prefix", "-p", help="Only keys with this prefix.", show_default=False),
]
StartOption = Annotated[
    str | None, typer.Option("--start", help="The first key to include.", show_default=False)
]
EndOption = Annotated[
    str | None,
    typer.Option("--end", help="The first key to exclude.", show_default=False),
]


class Encodings(NamedTuple):
    """The notations of keys and of values."""

    key: Encoding
    value: Encoding

    @classmethod
    def of(cls, both: Encoding, key: Encoding | None, value: Encoding | None) -> Encodings:
        """The notations that the three options name."""
        return cls(key or both, value or both)


_RULES: Final = {
    Encoding.TEXT: "name another encoding",
    Encoding.HEX: "write two digits (0-9, a-f) for each byte",
    Encoding.BASE64: "write base64 of RFC 4648, with its padding",
}


def to_bytes(text: str, encoding: Encoding) -> bytes:
    """Parse a key or value. Raises `UsageError`."""
    try:
        if encoding is Encoding.HEX:
            return bytes.fromhex(text)
        if encoding is Encoding.BASE64:
            return base64.b64decode(text, validate=True)
        # The bytes of the shell's arguments, also where they are not UTF-8.
        return text.encode("utf-8", "surrogateescape")
    except (ValueError, binascii.Error) as error:
        raise UsageError(f"{text!r:.80} is not {encoding.value}", _RULES[encoding]) from error


def to_text(raw: bytes, encoding: Encoding) -> str:
    """Write a key or value for a person: text, with escapes for bytes that are not text and for
    control characters, which could change the terminal or the columns of a line."""
    if encoding is Encoding.HEX:
        return raw.hex()
    if encoding is Encoding.BASE64:
        return base64.b64encode(raw).decode()
    return raw.decode("utf-8", "backslashreplace").translate(_ESCAPES)


def to_json(raw: bytes | None, encoding: Encoding) -> str | dict[str, str] | None:
    """Write a key or value for a program, without loss. Bytes that are not text become an object
    `{"base64": ...}`, as in the lines of `kvstore changes`."""
    if raw is None:
        return None
    if encoding is not Encoding.TEXT:
        return to_text(raw, encoding)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def to_span(
    encoding: Encoding, *, start: str | None = None, end: str | None = None, prefix: str | None
) -> Span:
    """The span that the options name. Raises `UsageError`."""
    bounds = (None if text is None else to_bytes(text, encoding) for text in (start, end, prefix))
    return Span.of(*bounds)


def one_of(option: str, text: str, known: Sequence[T]) -> T:
    """`text` as one of the `known` words of an option. Raises `UsageError`."""
    for word in known:
        if word == text:
            return word
    raise UsageError(f"{option} {text}", f"pass one of {', '.join(map(str, known))}")
